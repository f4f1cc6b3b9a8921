"""Plain torch form of SiTU."""

from __future__ import annotations

import torch

from k31fn.precision import upcast
from k31fn.typing import Float, Tensor

__all__ = ["situ_glu"]


def situ_glu(
    gate: Float[Tensor, "*rows F"],
    up: Float[Tensor, "*rows F"],
    beta: float = 4.0,
    linear_beta: float = 25.0,
) -> Float[Tensor, "*rows F"]:
    """``[beta tanh(g / beta) sigmoid(g)] * [linear_beta tanh(u / linear_beta)]``."""
    g = upcast(gate)
    u = upcast(up)
    bounded = torch.tanh(g / beta) * torch.sigmoid(g) * torch.tanh(u / linear_beta)
    # the two constants as one factor: a pass over [*rows F] less
    return (bounded * (beta * linear_beta)).to(gate.dtype)
