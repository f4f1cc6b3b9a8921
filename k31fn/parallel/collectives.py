"""Named-axis collectives as layers write them.

This version runs on one rank: over an absent axis, or one of size 1, a collective is an identity, and anything else is
refused before work is done.
"""

from __future__ import annotations

from jaxtyping import Shaped
from torch import Tensor

from k31fn.parallel.sharding import Axis

__all__ = ["psum", "pvary"]


def psum(x: Shaped[Tensor, "..."], axis: Axis | tuple[()]) -> Shaped[Tensor, "..."]:
    """The sum of ``x`` over the ranks of ``axis`` (varying to invariant); its transpose hands the cotangent back."""
    return _single_rank(x, axis, "psum")


def pvary(x: Shaped[Tensor, "..."], axis: Axis | tuple[()]) -> Shaped[Tensor, "..."]:
    """Marks an invariant ``x`` as used differently on each rank of ``axis``; its transpose is :func:`psum`."""
    return _single_rank(x, axis, "pvary")


def _single_rank(x: Tensor, axis: Axis | tuple[()], name: str) -> Tensor:
    if isinstance(axis, Axis) and axis.size > 1:
        raise ValueError(
            f"{name} over axis {axis.name!r} of size {axis.size}: only one rank is supported: sh=UNSHARDED"
        )
    return x
