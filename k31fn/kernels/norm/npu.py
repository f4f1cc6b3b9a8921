# pyright: reportMissingImports=false
"""``rms_norm`` by CANN's operator and its gradient operator. First order only.

The operator takes a weight of the dtype of ``x`` and keeps ``rsqrt(mean(x^2) + eps)`` in float32.
Its documentation does not say whether bfloat16 is rounded once more before the weight, as this op
is: values may differ by one rounding.
"""

from __future__ import annotations

from typing import Any

import torch_npu
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp

__all__ = ["rms_norm", "rms_norm_accepts"]


def rms_norm_accepts(x: Tensor, weight: Tensor, eps: float) -> str:
    """Why :func:`rms_norm` cannot run, or nothing."""
    del weight, eps
    return "" if x.numel() else "the operator takes no empty tensor"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x * rsqrt(mean(x^2) + eps)``; contract in :mod:`k31fn.kernels.norm`."""
    return _rms_norm(x, weight, eps)


def _fwd(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Any]:
    # the weight in the dtype of x, as the contract's last product is
    y, inverse = torch_npu.npu_rms_norm(x.reshape(-1, x.shape[-1]), weight.to(x.dtype), epsilon=eps)
    return y.view(x.shape), (x, weight, inverse)


def _bwd(eps: float, residuals: Any, ct: Tensor) -> tuple[Tensor, Tensor]:
    x, weight, inverse = residuals
    rows = x.reshape(-1, x.shape[-1])
    d_x, d_weight = torch_npu.npu_rms_norm_backward(
        ct.reshape(rows.shape), rows, weight.to(x.dtype), inverse
    )
    return d_x.view(x.shape), d_weight.to(weight.dtype)


_rms_norm = custom_vjp(_fwd, _bwd, nondiff_argnums=(2,), opaque=True, name="rms_norm (npu)")
