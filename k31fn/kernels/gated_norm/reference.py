"""Gated RMSNorm in plain torch.

The backward is written by hand in plain torch and starts from the inputs.
"""

from __future__ import annotations

import torch

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.precision import upcast
from k31fn.typing import Float, Tensor

__all__ = ["gated_norm"]


def gated_norm(
    o: Float[Tensor, "*rows V"],
    gate: Float[Tensor, "*rows V"],
    weight: Float[Tensor, "V"],
    eps: float,
) -> Float[Tensor, "*rows V"]:
    """``sigmoid(gate) * weight * o * rsqrt(mean(o^2) + eps)``; contract in
    :mod:`k31fn.kernels.gated_norm`.
    """
    return _gated_norm(o, gate, weight, eps)


def _normalised(o: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = upcast(o)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * inverse, inverse


def _fwd(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    y = _normalised(o, eps)[0] * torch.sigmoid(upcast(gate)) * upcast(weight)
    return y.to(gate.dtype), (o, gate, weight)


def _bwd(eps: float, residuals: tuple[Tensor, ...], ct: Tensor) -> tuple[Tensor, ...]:
    o, gate, weight = residuals
    # computed again: kept, they would be two more float32 tensors of [B T H V]
    n, inverse = _normalised(o, eps)
    opened = torch.sigmoid(upcast(gate))
    weighted = upcast(ct) * opened
    d_weight = (weighted * n).flatten(0, -2).sum(0)
    d_n = weighted * upcast(weight)
    along = d_n * n
    # sigmoid' = sigmoid (1 - sigmoid), whose first factor is in d_n already
    d_gate = along * (1 - opened)
    d_o = inverse * torch.addcmul(d_n, n, along.mean(-1, keepdim=True), value=-1)
    return d_o.to(o.dtype), d_gate.to(gate.dtype), d_weight.to(weight.dtype)


_gated_norm = custom_vjp(_fwd, _bwd, nondiff_argnums=(3,), name="gated_norm")
