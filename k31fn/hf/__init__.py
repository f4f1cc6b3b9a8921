"""Checkpoints of K3 and K3.1 in the names of their release: safetensors and ``config.json``.

* :func:`load` reads the parameters and the routers' balance, :func:`export` writes them: plain, or
  with routed experts as MXFP4; whole, or each rank of a mesh its own slices (:func:`part_of`).
* :func:`open_checkpoint` reads any part of any weight.
* :func:`verify` compares a folder with its config from headers alone.
* :func:`config_from_hf` gives the :class:`k31fn.model.Config` that a checkpoint's ``config.json``
  describes.
* :func:`to_names` puts parameters or gradients under the checkpoint's names.

``python -m k31fn.hf import|export|verify`` is the command line.

All of it is written in :mod:`k31fn.hf_format`, which training reads from too; its ``table`` has the
names, one row per kind of weight.
"""

from k31fn.hf_format.checkpoint import export, load, to_names
from k31fn.hf_format.config import config_from_hf
from k31fn.hf_format.rank_part import RankPart, part_of
from k31fn.hf_format.reader import open_checkpoint
from k31fn.hf_format.verification import verify

__all__ = [
    "RankPart",
    "config_from_hf",
    "export",
    "load",
    "open_checkpoint",
    "part_of",
    "to_names",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
