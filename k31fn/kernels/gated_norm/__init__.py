"""Output norm of KDA and Gated DeltaNet: RMSNorm per head, gated.

``gated_norm(o, gate, weight, eps)``::

    y = sigmoid(gate) * weight * o * rsqrt(mean(o^2) + eps)        the mean over the last dim

Source: Kimi Linear, arXiv 2510.26692; RMSNorm, arXiv 1910.07467. Weight and sigmoid are applied in
float32 (float64 for float64 inputs), and the result is rounded once: this is not the cast order of
``rms_norm``.

Shapes: ``o`` and ``gate`` ``[... V]``, ``weight [V]``; the result has the shape of ``o`` and the
dtype of ``gate``.
Rows are independent, so no mask is taken: a row of zeros (padding) gives zeros.

Gradients flow to ``o gate weight``, to any order in the reference.
"""

import torch

from k31fn.kernels.gated_norm.reference import gated_norm as _reference
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op
from k31fn.kernels.vendor import adapter

__all__ = ["gated_norm"]

_DTYPES = (torch.bfloat16, torch.float32)
_TRITON = "k31fn.kernels.gated_norm.triton"
gated_norm = Op("gated_norm", _reference)
gated_norm.register(
    Implementation(
        "triton",
        ("cuda",),
        lazily(_TRITON, "gated_norm"),
        lazily(_TRITON, "accepts"),
        dtypes=(torch.bfloat16, torch.float32),
        on_request=("npu", *ON_REQUEST),
        missing=missing_triton,
        kernels=_TRITON,
    )
)
gated_norm.register(
    adapter("gated_norm", "gated_norm", "npu_rms_norm", "npu_rms_norm_backward", dtypes=_DTYPES)
)
