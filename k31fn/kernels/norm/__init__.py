"""Normalisation over the last dim, statistics in float32 (float64 for float64 inputs).

``rms_norm(x, weight, eps)``: ``w * x * rsqrt(mean(x^2) + eps)`` (Zhang and Sennrich 2019, arXiv
1910.07467). Cast order of the released models: the normalised value is rounded to the dtype of
``x`` and then multiplied by the weight in that dtype.

``layer_norm(x, weight, bias, eps)``: ``w * (x - mean) * rsqrt(var + eps) + b`` with the biased
variance (Ba et al. 2016, arXiv 1607.06450), all in float32, rounded once.

Shapes: ``x [..., D]``, ``weight`` and ``bias`` ``[D]``; the result has the shape and dtype of
``x``. Rows are independent, so no mask is taken: a padded row stays finite because of ``eps``. The
references are differentiable to any order, and ``library``, torch's own ``layer_norm``, is too;
``triton`` reads ``x`` once each way and keeps the inputs alone, with first derivatives only.
"""

import torch
from torch.nn.functional import layer_norm as _torch_layer_norm

from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.norm.reference import layer_norm as _layer_norm
from k31fn.kernels.norm.reference import rms_norm as _rms_norm
from k31fn.kernels.registry import Implementation, Op
from k31fn.kernels.vendor import adapter
from k31fn.precision import upcast
from k31fn.typing import Float, Tensor

__all__ = ["layer_norm", "rms_norm"]

_DTYPES = (torch.bfloat16, torch.float32)
rms_norm = Op("rms_norm", _rms_norm)
rms_norm.register(
    adapter("norm", "rms_norm", "npu_rms_norm", "npu_rms_norm_backward", dtypes=_DTYPES)
)
_TRITON = "k31fn.kernels.norm.triton"
rms_norm.register(
    Implementation(
        "triton",
        ("cuda",),
        lazily(_TRITON, "rms_norm"),
        lazily(_TRITON, "accepts"),
        dtypes=_DTYPES,
        on_request=("npu", *ON_REQUEST),
        missing=missing_triton,
        kernels=_TRITON,
    )
)


def _library_layer_norm(
    x: Float[Tensor, "*rows D"], weight: Float[Tensor, "D"], bias: Float[Tensor, "D"], eps: float
) -> Float[Tensor, "*rows D"]:
    # widened first: on CUDA torch wants one dtype, and the weights are not to be rounded
    wide = _torch_layer_norm(upcast(x), x.shape[-1:], upcast(weight), upcast(bias), eps)
    return wide.to(x.dtype)


layer_norm = Op("layer_norm", _layer_norm)
layer_norm.register(
    Implementation(
        "library", ("cuda",), _library_layer_norm, dtypes=_DTYPES, on_request=("cpu", "npu")
    )
)
