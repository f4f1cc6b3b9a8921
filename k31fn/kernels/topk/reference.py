"""Plain torch form: ``torch.topk`` over distinct integer keys."""

from __future__ import annotations

import torch

from k31fn._functorch import reinterpret
from k31fn.precision import upcast
from k31fn.typing import Bool, Float, Int, Tensor

__all__ = ["topk"]


@torch.no_grad()
def topk(
    scores: Float[Tensor, "*rows S"],
    k: int,
    *,
    eligible: Bool[Tensor, "*rows S"] | None = None,
    ordered: bool = True,
) -> Int[Tensor, "*rows M"]:
    """Positions of the k greatest scores, lowest position first among equals, -1 where a row has
    fewer.

    Scores of up to 32 bits: one int64 key holds the score's ordered bits above the reversed
    position, so keys are distinct. float64 leaves no room for the position: a stable sort of the
    exact values.

    Raises:
        ValueError: k < 1.
    """
    if k < 1:
        raise ValueError(f"topk: k={k} must be at least 1")
    if eligible is not None:
        scores = torch.where(eligible, scores, -torch.inf)
    k = min(k, scores.shape[-1])
    if scores.dtype == torch.float64:
        values, index = torch.sort(scores, dim=-1, descending=True, stable=True)
        return torch.where(values[..., :k] == -torch.inf, -1, index[..., :k])
    # torch's topk takes any of equal scores, and others on other devices: keys are never equal
    keys = _distinct_keys(scores)
    best = keys.topk(k, dim=-1, sorted=ordered).values
    index = scores.shape[-1] - 1 - (best & ((1 << _POSITION_BITS) - 1))
    return torch.where(best < _LOWEST_FINITE, -1, index)


_POSITION_BITS = 31  # what 32 bits of score leave of an int64, but for the sign
# keys of -inf lie below: its ordered bits are -0x7F800001
_LOWEST_FINITE = -0x7F800000 << _POSITION_BITS


def _distinct_keys(scores: Float[Tensor, "*rows S"]) -> Int[Tensor, "*rows S"]:
    """Ordered bits of the score above the position counted from the end."""
    bits = reinterpret(upcast(scores) + 0.0, torch.int32)  # + 0.0 turns -0.0 into +0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats descend in their bits
    from_end = torch.arange(scores.shape[-1] - 1, -1, -1, device=scores.device)
    return (ordered.to(torch.int64) << _POSITION_BITS) | from_end
