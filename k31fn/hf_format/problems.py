"""What keeps a checkpoint from being the one that a config describes, found from headers alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from k31fn.hf_format import mxfp4
from k31fn.hf_format.files import TensorInfo
from k31fn.hf_format.table import VISION, Entry

__all__ = ["PACKED", "SCALE", "find_problems", "is_quantised", "listed"]

# What a quantised weight's two tensors are called after its name.
PACKED = "_packed"
SCALE = "_scale"
# Any float may be cast to any other on reading. Weights that must be float32 or wider are refused
# narrow: what was rounded away does not come back.
_FLOATING = ("BF16", "F16", "F32", "F64")
_WIDE = ("F32", "F64")


class _Expected(NamedTuple):
    """What a tensor of the checkpoint must be."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


def is_quantised(name: str, tensors: dict[str, TensorInfo]) -> bool:
    """Whether the weight is stored as MXFP4."""
    return name not in tensors and name + PACKED in tensors


def find_problems(table: list[Entry], tensors: dict[str, TensorInfo]) -> str:
    """What does not fit, grouped by kind of weight; empty if all fits. Quantised experts fit."""
    expected: dict[str, _Expected] = {}
    for entry in table:
        for name, tensor in _expected(entry, tensors):
            expected[name] = tensor
    # Vision weights are not of a model that has no vision, but they do not make it another one.
    vision = any(name.startswith(VISION) for name in expected)
    missing: list[str] = []
    misshaped: list[str] = []
    mistyped: list[str] = []
    for name, (shape, dtypes) in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            missing.append(name)
            continue
        if tensor.shape != shape:
            misshaped.append(f"{name}: {list(tensor.shape)}, wanted {list(shape)}")
        if tensor.dtype not in dtypes:
            mistyped.append(f"{name}: {tensor.dtype}, wanted {'/'.join(dtypes)}")
    extra: list[str] = []
    for name in sorted(tensors):
        if name not in expected and (vision or not name.startswith(VISION)):
            extra.append(name)
    lines = [
        *listed("missing", missing),
        *listed("not of this model", extra),
        *listed("of another shape", misshaped),
        *listed("of another dtype", mistyped),
    ]
    if not lines:
        return ""
    if any(name.endswith(PACKED) for name in extra):
        lines.append("fix: only the weights of routed experts may be quantised (MXFP4)")
    lines.append("fix: load with the config of this checkpoint: k31fn.hf.config_from_hf(directory)")
    return "\n".join(lines)


def _expected(entry: Entry, tensors: dict[str, TensorInfo]) -> Iterator[tuple[str, _Expected]]:
    """The tensors that an entry needs; quantised, if the checkpoint has them so."""
    shape = entry.stored_shape
    for name in entry.names:
        if entry.quantisable and is_quantised(name, tensors):
            rows, columns = shape
            yield name + PACKED, _Expected((rows, columns // 2), ("U8",))  # two codes in a byte
            yield name + SCALE, _Expected((rows, columns // mxfp4.GROUP), ("U8",))
        else:
            yield name, _Expected(shape, _WIDE if entry.row.wide else _FLOATING)


def listed(what: str, items: Iterable[str], most: int = 20) -> list[str]:
    """One line per kind, after one that counts all; no items: no lines.

    Names that differ in numbers of layers and experts only are one kind, shown by their first: what
    is wrong with one expert is wrong with thousands.
    """
    kinds: dict[str, list[str]] = {}
    for item in items:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", item), []).append(item)
    if not kinds:
        return []
    lines = [f"{sum(map(len, kinds.values()))} {what}:"]
    for group in list(kinds.values())[:most]:
        others = f"  (and {len(group) - 1} like it)" if len(group) > 1 else ""
        lines.append(f"  {group[0]}{others}")
    if len(kinds) > most:
        lines.append(f"  ... {len(kinds) - most} more kinds")
    return lines
