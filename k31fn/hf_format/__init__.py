"""The format of K3's and K3.1's released checkpoints: names, layouts, safetensors files and
``config.json``.

:mod:`k31fn.hf` is its door for users, and lies above training, since its command makes and reads
runs. This package lies below: the trainer reads the weights that adapters are of from here.

* Names and layouts: :mod:`~k31fn.hf_format.table`, one row per kind of weight, and
  :mod:`~k31fn.hf_format.transforms`.
* Files: :mod:`~k31fn.hf_format.files` and :mod:`~k31fn.hf_format.file_writer`.
* ``config.json``: :mod:`~k31fn.hf_format.config` and :mod:`~k31fn.hf_format.vision_config`.
"""
