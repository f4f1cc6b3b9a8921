"""Plain torch form of the cross-entropy statistics."""

from __future__ import annotations

from typing import NamedTuple

import torch

from k31fn.precision import upcast
from k31fn.typing import Float, Int, Tensor

__all__ = ["Statistics", "cross_entropy"]


class Statistics(NamedTuple):
    """Statistics of each token, ``[*rows]`` each, in float32 (float64 for float64 logits)."""

    lse: Tensor
    picked: Tensor


def cross_entropy(logits: Float[Tensor, "*rows Z"], labels: Int[Tensor, "*rows"]) -> Statistics:
    """``lse = logsumexp(logits)`` and ``picked = logits[label]``, 0 for a label that is no column.

    ``lse`` is read off one column of the log-softmax, which costs one exponential per logit each
    way; ``torch.logsumexp`` takes twice the time on a CPU.
    """
    inside = (labels >= 0) & (labels < logits.shape[-1])
    # gather takes no narrower index
    column = torch.where(inside, labels, 0).to(torch.int64)[..., None]
    wide = upcast(logits)
    at_column = wide.gather(-1, column)[..., 0]
    lse = at_column - torch.log_softmax(wide, -1).gather(-1, column)[..., 0]
    return Statistics(lse=lse, picked=torch.where(inside, at_column, 0))
