"""Plain torch form: dense tiles of queries with the set as a mask, so nothing of T x topk x K is
gathered.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from k31fn.autodiff.custom_vjp import detached
from k31fn.kernels.attention.reference import by_head, heads_first, masked_scores
from k31fn.kernels.tiling import map_query_tiles
from k31fn.precision import upcast
from k31fn.typing import Bool, Float, Int, Tensor

__all__ = ["SparseAttentionOut", "as_mask", "head_probs", "multiplicity", "sparse_attention"]


# Of a query that chose no key: finite, and no score less it has an exponential above 0.
_NO_KEYS = 1e30


class SparseAttentionOut(NamedTuple):
    """Attention output, and the log-sum-exp of each head's scores (no gradient)."""

    out: Float[Tensor, "B T H V"]
    lse: Float[Tensor, "B T H"]


def sparse_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S Hk N"],
    k_shared: Float[Tensor, "B S P"],
    v: Float[Tensor, "B S Hk V"],
    topk_idx: Int[Tensor, "B T M"],
    scale: float,
) -> SparseAttentionOut:
    """Softmax attention over the keys ``topk_idx[t]`` of each query, and its statistics."""
    queries, keys = heads_first(q, k, k_shared, scale)
    values = upcast(v).transpose(1, 2).contiguous()
    tiles = map_query_tiles(
        _attended, (queries, topk_idx), (keys, values), width=q.shape[0] * q.shape[2]
    )
    outs, statistics = zip(*tiles, strict=True)
    out = torch.cat(outs, dim=-2).transpose(1, 2)
    lse = torch.cat(statistics, dim=-1).transpose(1, 2)
    # a query that chose no key has a mean over all of them, which is no result
    has_keys = (topk_idx >= 0).any(dim=-1)[..., None]
    return SparseAttentionOut(
        out=torch.where(has_keys[..., None], out, 0.0), lse=torch.where(has_keys, lse, _NO_KEYS)
    )


def _attended(q: Tensor, topk_idx: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # dense and masked: to gather the chosen keys would copy topk x 576 numbers for each query
    scores = masked_scores(q, k, as_mask(topk_idx, k.shape[-2]))
    # the statistics teach the indexer, and its loss must not reach the attention through them
    lse = torch.logsumexp(detached(scores), dim=-1)
    return by_head(torch.softmax(scores, dim=-1), v), lse


def head_probs(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S Hk N"],
    k_shared: Float[Tensor, "B S P"],
    lse: Float[Tensor, "B T H"],
    topk_idx: Int[Tensor, "B T M"],
    scale: float,
) -> Float[Tensor, "B T M"]:
    """Probabilities that :func:`sparse_attention` gave the keys ``topk_idx[t]``, summed over the
    heads.
    """
    q, k, k_shared, lse = detached((q, k, k_shared, lse))
    queries, keys = heads_first(q, k, k_shared, scale)
    statistics = lse.transpose(1, 2)[..., None]
    tiles = map_query_tiles(
        _taught,
        (queries, statistics, topk_idx),
        (keys,),
        width=q.shape[0] * q.shape[2],
        gradient=False,
    )
    return torch.cat(tiles, dim=-2)


def _taught(q: Tensor, lse: Tensor, topk_idx: Tensor, k: Tensor) -> Tensor:
    scores = masked_scores(q, k, as_mask(topk_idx, k.shape[-2]))
    index = topk_idx.to(torch.int64)
    summed = (scores - lse).exp().sum(dim=1).gather(-1, index.clamp(min=0))
    return torch.where(index < 0, 0.0, summed / multiplicity(topk_idx, k.shape[-2]))


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
