"""Which trees can be saved, and whether a checkpoint fits a tree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from k31fn import tree
from k31fn.checkpoint.blocks import Box
from k31fn.checkpoint.layout import Layout, Part
from k31fn.parallel.mesh import MeshAxes

__all__ = ["check_alike", "check_metadata", "declared", "named_tensors", "owned", "parts_of"]

_INTEGERS = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
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
    named = dict(pairs)
    wrong = [f"{n!r} is a {type(x).__name__}" for n, x in pairs if not isinstance(x, Tensor)]
    wrong += [
        f"{n!r} is {x.dtype}"
        for n, x in pairs
        if isinstance(x, Tensor) and str(x.dtype)[len("torch.") :] not in _DTYPES
    ]
    if argument == "state":
        wrong += [
            f"{n!r} is a meta tensor" for n, x in pairs if isinstance(x, Tensor) and x.is_meta
        ]
    if wrong:
        raise ValueError(
            f"{argument} must hold tensors of supported dtypes; other values go into metadata: "
            f"{_few(wrong)}"
        )
    if len(named) < len(pairs):
        twice = sorted({n for i, (n, _) in enumerate(pairs) if n in dict(pairs[:i])})
        raise ValueError(
            f"{argument} has two leaves of one path: {_few(twice)}; rename a key that has a dot "
            "in it"
        )
    if not named:
        raise ValueError(f"{argument} has no tensors")
    return named


def check_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's metadata.

    Raises:
        ValueError: it is not JSON data.
    """
    try:
        json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata is not JSON data: {error}; tensors belong in state") from error
    return dict(metadata)


def declared(x: Tensor) -> dict[str, Any]:
    """What a manifest says of a whole tensor."""
    return {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}


def parts_of(named: Mapping[str, Tensor], layout: Layout | None, axes: MeshAxes) -> dict[str, Part]:
    """What each of a rank's tensors is of the whole one.

    Args:
        named: what the rank holds, by path.
        layout: the whole state and how it is split; None: every rank holds all of it.
        axes: of the ranks, bound to this one.

    Raises:
        ValueError: a tensor that the layout does not give this rank, or in another shape or dtype.
    """
    parts = (layout or Layout(dict(named))).parts(axes)
    if missing := [n for n in named if n not in parts]:
        raise ValueError(
            f"the layout gives this rank no {_few(list(map(repr, missing)))}; leave it out of the "
            "tree"
        )
    wrong = [
        n
        for n, x in named.items()
        if (tuple(x.shape), x.dtype) != (parts[n].box.shape, parts[n].dtype)
    ]
    if wrong:
        shapes = [
            (n, named[n].dtype, list(named[n].shape), parts[n].dtype, list(parts[n].box.shape))
            for n in wrong
        ]
        texts = [
            f"{n!r} is {mine} {a}, its part of the layout {other} {b}"
            for n, mine, a, other, b in shapes
        ]
        raise ValueError(f"tensors are not what the layout gives this rank: {_few(texts)}")
    return {name: parts[name] for name in named}


def owned(
    named: Mapping[str, Tensor], layout: Layout | None, axes: MeshAxes
) -> dict[str, tuple[Tensor, Box]]:
    """What this rank writes of its tensors. Empty ones are nobody's: the manifest says all that
    they are.

    Raises:
        ValueError: as :func:`parts_of`.
    """
    parts = parts_of(named, layout, axes)
    return {
        name: (x, parts[name].box) for name, x in named.items() if parts[name].writes and x.numel()
    }


def check_alike(
    path: Path, saved: dict[str, Any], wanted: dict[str, Tensor], partial: bool
) -> None:
    """Compares what a manifest says was saved with the tensors to restore.

    Raises:
        ValueError: they differ in names (``partial``: some are not there), shapes or dtypes; lists
            all differences.
    """
    differences = [f"{n!r} is not in it" for n in wanted if n not in saved]
    differences += [] if partial else [f"{n!r} is only in it" for n in saved if n not in wanted]
    for name in (n for n in wanted if n in saved):
        theirs, ours = saved[name], declared(wanted[name])
        if (theirs["dtype"], theirs["shape"]) != (ours["dtype"], ours["shape"]):
            expected = f"expected {ours['dtype']} {ours['shape']}"
            differences.append(f"{name!r} is {theirs['dtype']} {theirs['shape']}, {expected}")
    if differences:
        raise ValueError(
            f"checkpoint {path} differs from the state to restore: {_few(differences)}"
        )


def _few(items: list[str]) -> str:
    return "; ".join(items[:20]) + (f"; and {len(items) - 20} more" if len(items) > 20 else "")
