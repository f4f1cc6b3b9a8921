"""Which trees can be saved, and whether a checkpoint fits a tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from k31fn import tree

__all__ = ["check_alike", "named_tensors"]

_INTEGERS = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
_FLOATS = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float16", "bfloat16", "float32", "float64")
_DTYPES = frozenset((*_INTEGERS, *_FLOATS))  # known to numpy and zarr by torch's names


def named_tensors(state: Any, argument: str) -> dict[str, Tensor]:
    """The leaves of a tree by path.

    Args:
        state: the tree.
        argument: what to call it in an error; ``"state"`` refuses meta tensors, which have no values.

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
        wrong += [f"{n!r} is a meta tensor" for n, x in pairs if isinstance(x, Tensor) and x.is_meta]
    if wrong:
        raise ValueError(
            f"{argument} must hold tensors of supported dtypes; other values go into metadata: {_few(wrong)}"
        )
    if len(named) < len(pairs):
        twice = sorted({n for i, (n, _) in enumerate(pairs) if n in dict(pairs[:i])})
        raise ValueError(f"{argument} has two leaves of one path: {_few(twice)}; rename a key that has a dot in it")
    if not named:
        raise ValueError(f"{argument} has no tensors")
    return named


def check_alike(path: Path, saved: dict[str, Any], wanted: dict[str, Tensor], partial: bool) -> None:
    """Compares what a manifest says was saved with the tensors to restore.

    Raises:
        ValueError: they differ in names (``partial``: some are not there), shapes or dtypes; lists all differences.
    """
    differences = [f"{n!r} is not in it" for n in wanted if n not in saved]
    differences += [] if partial else [f"{n!r} is only in it" for n in saved if n not in wanted]
    for name in (n for n in wanted if n in saved):
        theirs = (saved[name]["dtype"], saved[name]["shape"])
        ours = (str(wanted[name].dtype).removeprefix("torch."), list(wanted[name].shape))
        if theirs != ours:
            differences.append(f"{name!r} is {theirs[0]} {theirs[1]}, expected {ours[0]} {ours[1]}")
    if differences:
        raise ValueError(f"checkpoint {path} differs from the state to restore: {_few(differences)}")


def _few(items: list[str]) -> str:
    return "; ".join(items[:20]) + (f"; and {len(items) - 20} more" if len(items) > 20 else "")
