"""``interval_attention`` by the kernels of attention, without shared dims. First order only."""

from __future__ import annotations

from torch import Tensor

from k31fn.kernels.attention.triton.masks import bounds
from k31fn.kernels.attention.triton.op import attend, listed, refused
from k31fn.kernels.launch import Build

__all__ = ["accepts", "builds", "interval_attention"]


def accepts(q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, scale: float) -> str:
    """Why :func:`interval_attention` cannot run, or nothing."""
    del start, stop, scale
    return refused(q, k, _nothing_shared(k), v)


def interval_attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, scale: float
) -> Tensor:
    """The op; contract in :mod:`k31fn.kernels.interval_attention`."""
    seen = bounds(start, stop)
    operands = (q, k, _nothing_shared(k), v, seen, seen)
    return attend(*(x[None] for x in operands), scale, False)[0].squeeze(0)


def _nothing_shared(k: Tensor) -> Tensor:
    return k.new_zeros((*k.shape[:2], 0))


def builds(kind: str) -> list[Build]:
    """What is compiled for the heads of the vision tower."""
    return listed(kind, "images", widths=(72, 0, 72))
