"""Plain torch form, tiled over queries."""

from __future__ import annotations

import torch

from k31fn.autodiff.custom_vjp import detached
from k31fn.kernels.indexer.reference import head_weighted_scores
from k31fn.kernels.sparse_attention.reference import multiplicity
from k31fn.kernels.tiling import map_query_tiles
from k31fn.precision import upcast
from k31fn.typing import Float, Int, Tensor

__all__ = ["indexer_kl"]

_MASKED = -1e30  # finite, so that 0 * log-probability is 0 at a slot of -1


def indexer_kl(
    q: Float[Tensor, "B T J I"],
    k: Float[Tensor, "B S I"],
    w: Float[Tensor, "B T J"],
    teacher: Float[Tensor, "B T M"],
    topk_idx: Int[Tensor, "B T M"],
    scale: float,
) -> Float[Tensor, ""]:
    """``sum_t KL(teacher[t] || softmax(I[t]))`` over the chosen keys of each query."""
    # the teacher is the main attention, which the indexer follows and must not move
    queries = upcast(q).flatten(-2) * scale, upcast(w), upcast(detached(teacher)), topk_idx
    sums = map_query_tiles(_tile, queries, (upcast(k),), width=w.shape[0] * w.shape[-1])
    return torch.stack(sums).sum()


def _tile(q: Tensor, w: Tensor, teacher: Tensor, topk_idx: Tensor, k: Tensor) -> Tensor:
    index = topk_idx.to(torch.int64)
    scores = head_weighted_scores(q, w, k).gather(-1, index.clamp(min=0))
    # a position in two slots has half of its probability in each, as the teacher has
    scores = scores - multiplicity(topk_idx, k.shape[-2]).to(scores.dtype).log()
    log_q = torch.log_softmax(torch.where(index < 0, _MASKED, scores), dim=-1)
    # xlogy: a probability of 0 has entropy 0, where log would be infinite
    return torch.special.xlogy(teacher, teacher).sum() - (teacher * log_q).sum()
