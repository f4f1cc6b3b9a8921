# pyright: reportMissingImports=false
"""``gated_norm``: CANN's RMSNorm on float32, and the gate in plain torch. First order only."""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.precision import upcast

__all__ = ["gated_norm", "gated_norm_accepts"]


def gated_norm_accepts(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> str:
    """Why :func:`gated_norm` cannot run, or nothing."""
    del gate, weight, eps
    return "" if o.numel() else "the operator takes no empty tensor"


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``sigmoid(gate) * weight * o * rsqrt(mean(o^2) + eps)``; contract in
    :mod:`k31fn.kernels.gated_norm`.
    """
    return _gated_norm(o, gate, weight, eps)


def _rows(x: Tensor) -> Tensor:
    # in float32: the operator would round its result to bfloat16 before the gate
    return upcast(x).reshape(-1, x.shape[-1])


def _fwd(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Any]:
    normalised, inverse = torch_npu.npu_rms_norm(_rows(o), upcast(weight), epsilon=eps)
    y = normalised * torch.sigmoid(_rows(gate))
    return y.to(gate.dtype).view(gate.shape), (o, gate, weight, inverse)


def _bwd(eps: float, residuals: Any, ct: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    o, gate, weight, inverse = residuals
    wide = _rows(o)
    opened = torch.sigmoid(_rows(gate))
    d_y = _rows(ct)
    d_normalised = d_y * opened
    d_gate = d_normalised * (1 - opened) * (wide * inverse * upcast(weight))
    d_o, d_weight = torch_npu.npu_rms_norm_backward(d_normalised, wide, upcast(weight), inverse)
    return (
        d_o.to(o.dtype).view(o.shape),
        d_gate.to(gate.dtype).view(gate.shape),
        d_weight.to(weight.dtype),
    )


_gated_norm = custom_vjp(_fwd, _bwd, nondiff_argnums=(3,), opaque=True, name="gated_norm (npu)")
