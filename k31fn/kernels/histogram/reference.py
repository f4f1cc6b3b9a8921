"""Plain torch form of the required-bias histogram."""

from __future__ import annotations

import torch

from k31fn.precision import upcast
from k31fn.typing import Bool, Float, Int, Tensor

__all__ = ["bin_range", "required_bias_histogram"]


def bin_range(
    bias: Float[Tensor, "*layers E"], num_bins: int
) -> tuple[Float[Tensor, "*layers 1"], Float[Tensor, "*layers 1"]]:
    """Lower edge of the first bin and width of a bin: ``[bmin - 1, bmax + 1]`` in ``num_bins``
    equal parts.
    """
    wide = upcast(bias)
    # scores lie in (0, 1), so no required bias is further than 1 from the biases that there are
    low = wide.amin(-1, keepdim=True) - 1
    high = wide.amax(-1, keepdim=True) + 1
    return low, (high - low) / num_bins


def required_bias_histogram(
    scores: Float[Tensor, "N E"],
    cutoff: Float[Tensor, "N"],
    valid: Bool[Tensor, "N"],
    bias: Float[Tensor, "E"],
    num_bins: int,
) -> Int[Tensor, "E num_bins"]:
    """Counts of the biases that tokens would need, by one addition per token and expert."""
    num_experts = scores.shape[1]
    low, width = bin_range(bias, num_bins)
    required = cutoff[:, None] - scores
    bins = ((required - low) / width).to(torch.int64).clamp(0, num_bins - 1)
    cells = bins + num_bins * torch.arange(num_experts, device=scores.device)
    # integers: their sum is the same in any order, so it is deterministic on a GPU too
    counts = torch.zeros(num_experts * num_bins, dtype=torch.int32, device=scores.device)
    ones = valid.to(torch.int32)[:, None].expand(cells.shape)
    return counts.scatter_add(0, cells.flatten(), ones.flatten()).unflatten(
        0, (num_experts, num_bins)
    )
