"""SiTU, the bounded gated activation of the MLPs and experts (Kimi K3 report, arXiv 2607.24653).

``situ_glu(gate, up, beta, linear_beta) = [beta tanh(g / beta) sigmoid(g)] * [linear_beta tanh(u /
linear_beta)]``, elementwise in float32 (float64 for float64 inputs) and rounded once to the dtype
of ``gate``; ``|y| < beta * linear_beta``. For small inputs it is SwiGLU, ``g sigmoid(g) u``.
``gate`` and ``up`` have one shape and dtype.

Differentiable to any order in the reference, which keeps a dozen tensors of their size in float32.
``triton`` keeps the inputs alone, with first derivatives only.
"""

import torch

from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op
from k31fn.kernels.situ.reference import situ_glu as _situ_glu

__all__ = ["situ_glu"]

_TRITON = "k31fn.kernels.situ.triton"
situ_glu = Op("situ_glu", _situ_glu)
situ_glu.register(
    Implementation(
        "triton",
        ("cuda",),
        lazily(_TRITON, "situ_glu"),
        lazily(_TRITON, "accepts"),
        dtypes=(torch.bfloat16, torch.float32),
        on_request=("npu", *ON_REQUEST),
        missing=missing_triton,
        kernels=_TRITON,
    )
)
