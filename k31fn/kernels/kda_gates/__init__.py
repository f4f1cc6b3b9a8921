"""What stands between a KDA layer's projections and :mod:`~k31fn.kernels.kda`: norms and gates.

``kda_gates(q, k, z, beta, A_log, dt_bias, bound, eps, scale) -> KdaGates(q, k, g, beta)``::

    q = scale q rsqrt(sum q^2 + eps)        k = k rsqrt(sum k^2 + eps)        over a head's dims
    g = bound * sigmoid(exp(A_log) (z + dt_bias))            beta = sigmoid(beta)

Source: Kimi Linear, arXiv 2510.26692; the bounded decay is that of Kimi K3, arXiv 2607.24653.

Shapes: ``q k z [B T H K]``, ``beta [B T H]``, ``A_log [H]``, ``dt_bias [H K]``. ``bound`` is the
strongest log-decay per token, below 0; ``scale`` that of queries. ``q`` and ``k`` come out in their
own dtype, rounded once; ``g`` and ``beta`` in float32 (float64 for float64 inputs), as is all
arithmetic: a rounded ``A_log`` would change the decay's rate. ``A_log`` above ``MOST_A_LOG`` counts
as that and gets gradient 0: beyond it the sigmoid is a step for any input, and near 89 float32 has
no exponential, which the backward multiplies by.
Tokens are independent, so no mask is taken; padding is finite.

Gradients flow to all six tensors, to any order in the reference. ``triton`` reads everything once
each way and keeps the inputs alone, with first derivatives only.
"""

import torch

from k31fn.kernels.kda_gates.reference import MOST_A_LOG, KdaGates
from k31fn.kernels.kda_gates.reference import kda_gates as _reference
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op

__all__ = ["MOST_A_LOG", "KdaGates", "kda_gates"]

_TRITON = "k31fn.kernels.kda_gates.triton"
kda_gates = Op("kda_gates", _reference)
kda_gates.register(
    Implementation(
        "triton",
        ("cuda", "npu"),
        lazily(_TRITON, "kda_gates"),
        lazily(_TRITON, "accepts"),
        dtypes=(torch.bfloat16, torch.float32),
        on_request=ON_REQUEST,
        missing=missing_triton,
        kernels=_TRITON,
    )
)
