# pyright: reportMissingImports=false
"""``sparse_attention`` by the kernels of attention, with sets as bit masks. First order only."""

from __future__ import annotations

from torch import Tensor

from k31fn.autodiff.custom_vjp import detached
from k31fn.kernels.attention.triton.op import attend, listed, refused
from k31fn.kernels.launch import Build
from k31fn.kernels.sparse_attention.reference import SparseAttentionOut
from k31fn.kernels.sparse_attention.triton import selection

__all__ = ["accepts", "builds", "sparse_attention"]


def accepts(
    q: Tensor, k: Tensor, k_shared: Tensor, v: Tensor, topk_idx: Tensor, scale: float
) -> str:
    """Why :func:`sparse_attention` cannot run, or nothing."""
    del topk_idx, scale
    return refused(q, k, k_shared, v)


def sparse_attention(
    q: Tensor, k: Tensor, k_shared: Tensor, v: Tensor, topk_idx: Tensor, scale: float
) -> SparseAttentionOut:
    """The op; contract in :mod:`k31fn.kernels.sparse_attention`."""
    seen = selection.selection(topk_idx, k.shape[1])
    out, lse = attend(*(x[None] for x in (q, k, k_shared, v, *seen)), scale, True)
    return SparseAttentionOut(out.squeeze(0), detached(lse.squeeze(0).mT))


def builds(kind: str) -> list[Build]:
    """What is compiled for heads of 128 + 64 and 128 dims on a kind of device."""
    return selection.builds(kind) + listed(kind, "sets", sets=True)
