"""Checkpoints of K3 and K3.1 in the names of their release: safetensors and ``config.json``, unquantised text model.

* :func:`load` reads the parameters and the routers' balance, :func:`export` writes them.
* :func:`config_from_hf` gives the :class:`k31fn.model.Config` that a checkpoint's ``config.json`` describes.
* :func:`to_names` puts parameters or gradients under the checkpoint's names.

:mod:`k31fn.hf.table` has the names, one row per kind of weight.
"""

from k31fn.hf.checkpoint import export, load, to_names
from k31fn.hf.config import config_from_hf

__all__ = ["config_from_hf", "export", "load", "to_names"]
