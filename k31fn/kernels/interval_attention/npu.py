"""``interval_attention`` by CANN's flash attention, as :mod:`k31fn.kernels.attention.npu`. First
order only.

A run of queries with the same interval (an image) and the keys of the interval are one sequence,
without a mask.
"""

from __future__ import annotations

from torch import Tensor

from k31fn.kernels.attention.npu import attention_accepts, pack, packed_attention

__all__ = ["interval_attention", "interval_attention_accepts"]


def interval_attention_accepts(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, scale: float
) -> str:
    """Why :func:`interval_attention` cannot run, or nothing."""
    return attention_accepts(q, k, _nothing_shared(k), v, start, stop, scale)


def interval_attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, scale: float
) -> Tensor:
    """Attention of each query over its interval; contract in
    :mod:`k31fn.kernels.interval_attention`.

    Raises:
        ValueError: more than 1024 runs of queries with the same interval.
    """
    packing = pack(start, stop, k.shape[1], causal=False)
    return packed_attention(q, k, _nothing_shared(k), v, start, stop, scale, packing)


def _nothing_shared(k: Tensor) -> Tensor:
    # MLA's attention with no shared part: one adapter serves both operators
    return k.new_zeros((*k.shape[:2], 0))
