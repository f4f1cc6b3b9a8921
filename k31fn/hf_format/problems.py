"""What keeps a checkpoint from being the one that a config describes, found from headers alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from k31fn.hf_format import mxfp4
from k31fn.hf_format.files import TensorInfo
from k31fn.hf_format.table import VISION, Entry

__all__ = ["PACKED", "SCALE", "find_problems", "is_quantised", "listed"]

PACKED, SCALE = (
    "_packed",
    "_scale",
)  # what a quantised weight's two tensors are called after its name
_FLOATING = ("BF16", "F16", "F32", "F64")
_WIDE = ("F32", "F64")


def is_quantised(name: str, tensors: dict[str, TensorInfo]) -> bool:
    """Whether the weight is stored as MXFP4."""
    return name not in tensors and name + PACKED in tensors


def find_problems(table: list[Entry], tensors: dict[str, TensorInfo]) -> str:
    """What does not fit, grouped by kind of weight; empty if all fits. Quantised experts fit."""
    wanted = {name: wish for entry in table for name, wish in _wishes(entry, tensors)}
    vision = any(name.startswith(VISION) for name in wanted)
    extra = sorted(n for n in tensors if n not in wanted and (vision or not n.startswith(VISION)))
    both = [(name, *wish, tensors[name]) for name, wish in wanted.items() if name in tensors]
    found = [
        *listed("missing", [name for name in wanted if name not in tensors]),
        *listed("not of this model", extra),
        *listed(
            "of another shape",
            [f"{n}: {list(t.shape)}, wanted {list(s)}" for n, s, _, t in both if t.shape != s],
        ),
        *listed(
            "of another dtype",
            [f"{n}: {t.dtype}, wanted {'/'.join(d)}" for n, _, d, t in both if t.dtype not in d],
        ),
    ]
    if not found:
        return ""
    if any(name.endswith(PACKED) for name in extra):
        found.append("fix: only the weights of routed experts may be quantised (MXFP4)")
    return "\n".join(
        [*found, "fix: load with the config of this checkpoint: k31fn.hf.config_from_hf(directory)"]
    )


def _wishes(
    entry: Entry, tensors: dict[str, TensorInfo]
) -> Iterator[tuple[str, tuple[tuple[int, ...], tuple[str, ...]]]]:
    """The tensors that an entry needs, each with its shape and the dtypes it may have."""
    shape = entry.stored_shape
    for name in entry.names:
        if entry.quantisable and is_quantised(name, tensors):
            rows, columns = shape
            yield name + PACKED, ((rows, columns // 2), ("U8",))
            yield name + SCALE, ((rows, columns // mxfp4.GROUP), ("U8",))
        else:
            yield name, (shape, _WIDE if entry.row.wide else _FLOATING)


def listed(what: str, items: Iterable[str], most: int = 20) -> list[str]:
    """One line per kind: names that differ in numbers of layers and experts only are one kind,
    shown by their first.
    """
    kinds: dict[str, list[str]] = {}
    for item in items:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", item), []).append(item)
    count = sum(map(len, kinds.values()))
    lines = [
        f"  {group[0]}" + (f"  (and {len(group) - 1} like it)" if len(group) > 1 else "")
        for group in list(kinds.values())[:most]
    ]
    if len(kinds) > most:
        lines.append(f"  ... {len(kinds) - most} more kinds")
    return [f"{count} {what}:", *lines] if count else []
