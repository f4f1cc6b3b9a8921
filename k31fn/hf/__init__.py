"""Checkpoints of K3 and K3.1 in the names of their release: safetensors and ``config.json``.

* :func:`load` reads the parameters and the routers' balance, :func:`export` writes them: plain, or
  with routed experts as MXFP4; whole, or each rank of a mesh its own slices (:func:`part_of`).
* :func:`open_checkpoint` reads any part of any weight.
* :func:`verify` compares a folder with its config from headers alone.
* :func:`config_from_hf` gives the :class:`k31fn.model.Config` that a checkpoint's ``config.json``
  describes.
* :func:`to_names` puts parameters or gradients under the checkpoint's names.

``python -m k31fn.hf import|export|verify`` is the command line.

:mod:`k31fn.hf.table` has the names, one row per kind of weight.
"""

from k31fn.hf.checkpoint import export, load, to_names
from k31fn.hf.config import config_from_hf
from k31fn.hf.ranks import Part, part_of
from k31fn.hf.reading import Reader, open_checkpoint
from k31fn.hf.report import Report, verify

__all__ = [
    "Part",
    "Reader",
    "Report",
    "config_from_hf",
    "export",
    "load",
    "open_checkpoint",
    "part_of",
    "to_names",
    "verify",
]
