"""Plain torch form of the router's choice."""

from __future__ import annotations

import torch

from k31fn.kernels.topk import topk
from k31fn.typing import Bool, Float, Int, Tensor

__all__ = ["biased_scores", "choose_experts"]


def choose_experts(
    scores: Float[Tensor, "*rows E"],
    bias: Float[Tensor, "E"],
    valid: Bool[Tensor, "*rows"],
    top_k: int,
) -> tuple[Int[Tensor, "*rows G"], Int[Tensor, "*rows 1"]]:
    """The chosen experts and the next best one, by :func:`k31fn.kernels.topk.topk`."""
    ranked = topk(biased_scores(scores, bias), top_k + 1)
    copy = torch.arange(valid.numel() * top_k, device=scores.device).view(*valid.shape, top_k)
    topk_idx = torch.where(valid[..., None], ranked[..., :-1], copy % scores.shape[-1])
    # A view would keep the whole ranking alive for as long as the decision is kept.
    return topk_idx, ranked[..., -1:].clone()


def biased_scores(
    scores: Float[Tensor, "*rows E"], bias: Float[Tensor, "E"]
) -> Float[Tensor, "*rows E"]:
    """``scores + bias`` as experts are compared by: always finite."""
    return torch.nan_to_num(scores + bias)
