"""Which trees can be saved, and whether a checkpoint fits a tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from k31fn import tree
from k31fn.checkpoint.boxes import Box
from k31fn.checkpoint.state_layout import StateLayout, TensorPart
from k31fn.parallel.mesh import MeshAxes

__all__ = ["check_alike", "declared", "named_tensors", "owned", "parts_of"]

_INTEGERS = (
    "bool",
    *("int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
)
_FLOATS = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)
_DTYPES = frozenset((*_INTEGERS, *_FLOATS))  # known to numpy and zarr by torch's names


def named_tensors(state: Any, argument: str) -> dict[str, Tensor]:
    """The leaves of a tree by path.

    Args:
        state: the tree.
        argument: what to call it in an error; ``"state"`` refuses meta tensors, which have no
            values.

    Raises:
        ValueError: a leaf that cannot be saved, two of one path, or none at all.
    """
    pairs = tree.flatten_with_paths(state)
    wrong: list[str] = []
    for path, leaf in pairs:
        if not isinstance(leaf, Tensor):
            wrong.append(f"{path!r} is a {type(leaf).__name__}")
        elif str(leaf.dtype).removeprefix("torch.") not in _DTYPES:
            wrong.append(f"{path!r} is {leaf.dtype}")
        elif argument == "state" and leaf.is_meta:
            wrong.append(f"{path!r} is a meta tensor")
    if wrong:
        raise ValueError(
            f"{argument} must hold tensors of supported dtypes; other values go into metadata: "
            f"{_few(wrong)}"
        )
    named = dict(pairs)
    if len(named) < len(pairs):
        # A key "a.b" and a key "b" inside "a" are one path.
        counts = Counter(path for path, _ in pairs)
        twice = sorted(path for path, count in counts.items() if count > 1)
        raise ValueError(
            f"{argument} has two leaves of one path: {_few(twice)}; rename a key that has a dot "
            "in it"
        )
    if not named:
        raise ValueError(f"{argument} has no tensors")
    return named


def declared(x: Tensor) -> dict[str, Any]:
    """What a manifest says of a whole tensor."""
    return {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}


def parts_of(
    named: Mapping[str, Tensor], layout: StateLayout | None, axes: MeshAxes
) -> dict[str, TensorPart]:
    """What each of a rank's tensors is of the whole one.

    Args:
        named: what the rank holds, by path.
        layout: the whole state and how it is split; None: every rank holds all of it.
        axes: of the ranks, bound to this one.

    Raises:
        ValueError: a tensor that the layout does not give this rank, or in another shape or dtype.
    """
    parts = (layout or StateLayout(dict(named))).parts(axes)
    missing = [repr(name) for name in named if name not in parts]
    if missing:
        raise ValueError(f"the layout gives this rank no {_few(missing)}; leave it out of the tree")
    wrong: list[str] = []
    for name, x in named.items():
        part = parts[name]
        if (tuple(x.shape), x.dtype) != (part.box.shape, part.dtype):
            expected = f"its part of the layout {part.dtype} {list(part.box.shape)}"
            wrong.append(f"{name!r} is {x.dtype} {list(x.shape)}, {expected}")
    if wrong:
        raise ValueError(f"tensors are not what the layout gives this rank: {_few(wrong)}")
    return {name: parts[name] for name in named}


def owned(
    named: Mapping[str, Tensor], layout: StateLayout | None, axes: MeshAxes
) -> dict[str, tuple[Tensor, Box]]:
    """The tensors that this rank writes, and what each is of the whole one.

    Empty ones are nobody's: the manifest says all that they are.

    Raises:
        ValueError: as :func:`parts_of`.
    """
    parts = parts_of(named, layout, axes)
    owned: dict[str, tuple[Tensor, Box]] = {}
    for name, x in named.items():
        if parts[name].writes and x.numel():
            owned[name] = (x, parts[name].box)
    return owned


def check_alike(
    path: Path, saved: dict[str, Any], wanted: dict[str, Tensor], partial: bool
) -> None:
    """Compares what a manifest says was saved with the tensors to restore.

    Raises:
        ValueError: they differ in names (``partial``: some are not there), shapes or dtypes; lists
            all differences.
    """
    differences = [f"{name!r} is not in it" for name in wanted if name not in saved]
    if not partial:
        differences += [f"{name!r} is only in it" for name in saved if name not in wanted]
    for name, x in wanted.items():
        if name not in saved:
            continue
        theirs = saved[name]
        ours = declared(x)
        if (theirs["dtype"], theirs["shape"]) != (ours["dtype"], ours["shape"]):
            expected = f"expected {ours['dtype']} {ours['shape']}"
            differences.append(f"{name!r} is {theirs['dtype']} {theirs['shape']}, {expected}")
    if differences:
        raise ValueError(
            f"checkpoint {path} differs from the state to restore: {_few(differences)}"
        )


def _few(items: list[str]) -> str:
    """The first 20, and how many more there are."""
    text = "; ".join(items[:20])
    return f"{text}; and {len(items) - 20} more" if len(items) > 20 else text
