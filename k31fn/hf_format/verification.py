"""Whether a folder holds the checkpoint that its ``config.json`` describes, without reading a
tensor.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from k31fn import model
from k31fn.hf_format.config import config_from_hf
from k31fn.hf_format.files import survey
from k31fn.hf_format.problems import PACKED, find_problems
from k31fn.hf_format.table import entries

__all__ = ["Verification", "verify"]


class Verification(NamedTuple):
    """What the headers of a checkpoint say.

    Attributes:
        num_files: safetensors files.
        num_tensors: in them.
        num_weights: numbers they stand for; a byte of MXFP4 codes is two.
        num_quantised: tensors that are MXFP4 codes.
        problems: what is wrong, "" for nothing.
    """

    num_files: int
    num_tensors: int
    num_weights: int
    num_quantised: int
    problems: str


def verify(directory: str | Path, cfg: model.Config | None = None) -> Verification:
    """Compares files, names, shapes and dtypes with a config.

    Only headers are read: a checkpoint of any size takes seconds and little memory. That a weight
    is finite, or that two weights of one shape have not changed places, is not seen.

    Args:
        directory: of the checkpoint.
        cfg: the model; None: that of ``config.json``.
    """
    root = Path(directory)
    tensors, broken = survey(root)
    found = (
        ["files that are not complete or do not belong together:", *(f"  {p}" for p in broken)]
        if broken
        else []
    )
    try:
        wanted = config_from_hf(root) if cfg is None else cfg
    except ValueError as e:
        found += ["config that k31fn cannot read:", f"  {e}"]
    else:
        if fits := find_problems(entries(wanted), tensors) if not broken else "":
            found.append(fits)
    packed = [t for name, t in tensors.items() if name.endswith(PACKED)]
    plain = [t for name, t in tensors.items() if not name.endswith(PACKED) and t.dtype != "U8"]
    weights = sum(math.prod(t.shape) for t in plain) + 2 * sum(math.prod(t.shape) for t in packed)
    return Verification(
        len({t.file for t in tensors.values()}),
        len(tensors),
        weights,
        len(packed),
        "\n".join(found),
    )
