"""Plain torch form of the norms."""

from __future__ import annotations

import torch

from k31fn.precision import upcast
from k31fn.typing import Float, Tensor

__all__ = ["layer_norm", "rms_norm"]


def rms_norm(
    x: Float[Tensor, "*rows D"], weight: Float[Tensor, "D"], eps: float
) -> Float[Tensor, "*rows D"]:
    """``weight * round(x * rsqrt(mean(x^2) + eps))``: rounded to the dtype of ``x`` before the
    weight.
    """
    x_wide = upcast(x)
    normalised = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    # rounded before the weight, as the checkpoints' own code does: another order is other bits
    return normalised.to(x.dtype) * weight.to(x.dtype)


def layer_norm(
    x: Float[Tensor, "*rows D"], weight: Float[Tensor, "D"], bias: Float[Tensor, "D"], eps: float
) -> Float[Tensor, "*rows D"]:
    """``weight * (x - mean) * rsqrt(var + eps) + bias``, rounded to the dtype of ``x`` once."""
    x_wide = upcast(x)
    # two passes: mean(x^2) - mean(x)^2 would cancel where the mean is large
    centred = x_wide - x_wide.mean(-1, keepdim=True)
    normalised = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (normalised * upcast(weight) + upcast(bias)).to(x.dtype)
