"""Verification that a folder holds the checkpoint that its ``config.json`` describes, without
reading a tensor.
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
    problems: list[str] = []
    if broken:
        problems.append("files that are not complete or do not belong together:")
        problems += [f"  {problem}" for problem in broken]
    # Both are told, files and config: whoever repairs a folder wants to know all of it.
    try:
        wanted = config_from_hf(root) if cfg is None else cfg
    except ValueError as e:
        problems += ["config that k31fn cannot read:", f"  {e}"]
    else:
        # What incomplete files lack would be listed again, tensor by tensor.
        misfits = "" if broken else find_problems(entries(wanted), tensors)
        if misfits:
            problems.append(misfits)
    files: set[str] = set()
    num_weights = num_quantised = 0
    for name, tensor in tensors.items():
        files.add(tensor.file)
        if name.endswith(PACKED):
            num_quantised += 1
            num_weights += 2 * math.prod(tensor.shape)  # two codes in a byte
        elif tensor.dtype != "U8":  # not scales, which stand for no weight
            num_weights += math.prod(tensor.shape)
    return Verification(len(files), len(tensors), num_weights, num_quantised, "\n".join(problems))
