"""Plain torch form: dense tiles of queries with the set as a mask, so nothing of T x topk x K is
gathered.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from k31fn.autodiff.custom_vjp import stop_gradient
from k31fn.kernels.attention.reference import by_head, heads_first, probabilities
from k31fn.kernels.tiling import map_query_tiles
from k31fn.typing import Bool, Float, Int, Tensor

__all__ = ["SparseAttentionOut", "as_mask", "multiplicity", "sparse_attention"]


class SparseAttentionOut(NamedTuple):
    """Attention output, and the head-summed probability of each chosen key (no gradient)."""

    out: Float[Tensor, "B T H V"]
    probs: Float[Tensor, "B T M"]


def sparse_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S Hk N"],
    k_shared: Float[Tensor, "B S P"],
    v: Float[Tensor, "B S Hk V"],
    topk_idx: Int[Tensor, "B T M"],
    scale: float,
) -> SparseAttentionOut:
    """Softmax attention over the keys ``topk_idx[t]`` of each query, and the head-summed
    probabilities.
    """
    queries, keys, values = heads_first(q, k, k_shared, v, scale)
    tiles = map_query_tiles(
        _tile, (queries, topk_idx), (keys, values), width=q.shape[0] * q.shape[2]
    )
    outs, probs = zip(*tiles, strict=True)
    out = torch.cat(outs, dim=-2).transpose(1, 2)
    # a query that chose no key has a mean over all of them, which is no result
    has_keys = (topk_idx >= 0).any(dim=-1)
    out = torch.where(has_keys[..., None, None], out, 0.0)
    return SparseAttentionOut(out=out, probs=torch.cat(probs, dim=-2))


def _tile(q: Tensor, topk_idx: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # dense and masked: to gather the chosen keys would copy topk x 576 numbers for each query
    p = probabilities(q, k, as_mask(topk_idx, k.shape[-2]))
    index = topk_idx.to(torch.int64)
    # the probabilities teach the indexer, and its loss must not reach the attention through them
    summed = stop_gradient(p).sum(dim=1).gather(-1, index.clamp(min=0))
    return by_head(p, v), torch.where(index < 0, 0.0, summed / multiplicity(topk_idx, k.shape[-2]))


def as_mask(topk_idx: Int[Tensor, "B t M"], num_keys: int) -> Bool[Tensor, "B t S"]:
    """True at the chosen keys. Slots of -1 go to an extra column, which is cut off."""
    slot = torch.where(topk_idx < 0, num_keys, topk_idx).to(torch.int64)
    none = torch.zeros(
        (*topk_idx.shape[:-1], num_keys + 1), dtype=torch.bool, device=topk_idx.device
    )
    return none.scatter(-1, slot, True)[..., :num_keys]


def multiplicity(topk_idx: Int[Tensor, "B t M"], num_keys: int) -> Int[Tensor, "B t M"]:
    """How many slots have the same position as each slot, itself too; of slots of -1 their own
    number.
    """
    slot = torch.where(topk_idx < 0, num_keys, topk_idx).to(torch.int64)
    shape = (*topk_idx.shape[:-1], num_keys + 1)
    counts = torch.zeros(shape, dtype=torch.int32, device=topk_idx.device)
    ones = torch.ones_like(slot, dtype=torch.int32)
    return counts.scatter_add(-1, slot, ones).gather(-1, slot)
