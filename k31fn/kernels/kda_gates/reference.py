"""Norms and gates of KDA in plain torch; contract in :mod:`k31fn.kernels.kda_gates`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from k31fn.precision import upcast
from k31fn.typing import Float, Tensor

__all__ = ["MOST_A_LOG", "KdaGates", "kda_gates"]

MOST_A_LOG = 40.0
"""``A_log`` that a larger one counts as; the square of e^40 is a float32."""


class KdaGates(NamedTuple):
    """What ``kda`` takes: unit queries (scaled) and keys, log-decays, and beta in (0, 1)."""

    q: Float[Tensor, "B T H K"]
    k: Float[Tensor, "B T H K"]
    g: Float[Tensor, "B T H K"]
    beta: Float[Tensor, "B T H"]


def kda_gates(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    z: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    A_log: Float[Tensor, " H"],
    dt_bias: Float[Tensor, "H K"],
    bound: float,
    eps: float,
    scale: float,
) -> KdaGates:
    """The op."""
    rate = upcast(A_log).clamp(max=MOST_A_LOG).exp()[:, None]
    g = bound * torch.sigmoid(rate * (upcast(z) + upcast(dt_bias)))
    # The scale goes with the norm of q, so that both are rounded once.
    q = _l2_norm(q, eps, scale)
    k = _l2_norm(k, eps, 1.0)
    return KdaGates(q, k, g, torch.sigmoid(upcast(beta)))


def _l2_norm(x: Float[Tensor, "B T H K"], eps: float, scale: float) -> Float[Tensor, "B T H K"]:
    """``scale * x * rsqrt(sum x^2 + eps)`` in float32, rounded once."""
    wide = upcast(x)
    return (wide * (scale * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps))).to(x.dtype)
