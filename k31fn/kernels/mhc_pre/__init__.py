"""A sublayer's read of the streams of a manifold-constrained hyper-connection (mHC), and how
they are mixed.

For N streams ``x [B T N D]``, per token in float32 (float64 for float64 streams), with ``xf [N D]``
its flat form::

    z      = (xf rsqrt(mean(xf^2) + eps)) phi               phi [N D, 2N + N N], columns N | N | N N
    h_pre  = sigmoid(scale_0 z_0 + base_0) + 1e-6
    h_post = 2 sigmoid(scale_1 z_1 + base_1)
    h_res  = sinkhorn(scale_2 z_2 + base_2)                       [N N], rows first
    y      = sum_i h_pre[i] x[i]                                  what the sublayer F reads

and then :mod:`k31fn.kernels.mhc_post` gives ``x'[j] = h_post[j] F(y) + sum_i h_res[i, j] x[i]``.
Source: mHC, arXiv 2512.24880, in the form of the released code, which is the definition here::

    sinkhorn(a) = softmax over the last dim, plus 1e-6; one normalisation of the columns (sum over
                  the first index); then iterations - 1 times rows and columns. Every division is
                  by the sum plus 1e-6.

So the columns of ``h_res`` sum to 1, its rows only nearly. The paper's form starts from ``exp(a)``:
it overflows, and differs by up to 8e-3.

``mhc_pre(x, phi, scale [3], base [2N + N N], eps, iterations) -> Pre(y, x, h_post, h_res)``: ``y [B
T D]`` in the dtype of the streams; ``x`` is the argument handed through, so that the gradient of
what else reads it comes back to this op and is added in the same pass; ``h_post [B T N]`` and
``h_res [B T N N]`` in float32 (or float64).

``mhc_head(x, phi [N D, N], scale [1], base [N], eps) -> y`` is the read before the final norm:
``h_pre`` alone.

No mask: tokens are independent, so packed documents and padding need no care. Gradients: to any
order in the reference, in the streams, ``phi``, ``scale`` and ``base``; the backward keeps its
inputs only.
"""

import torch

from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.mhc_pre.reference import SINKHORN_EPS, Pre, sinkhorn
from k31fn.kernels.mhc_pre.reference import mhc_head as _mhc_head
from k31fn.kernels.mhc_pre.reference import mhc_pre as _mhc_pre
from k31fn.kernels.registry import Implementation, Op
from k31fn.kernels.vendor import adapter

__all__ = ["SINKHORN_EPS", "Pre", "mhc_head", "mhc_pre", "sinkhorn"]

_TRITON = "k31fn.kernels.mhc_pre.triton.read"
mhc_pre = Op("mhc_pre", _mhc_pre)
mhc_pre.register(
    Implementation(
        "triton",
        ("cuda", "npu"),
        lazily(_TRITON, "mhc_pre"),
        lazily(_TRITON, "accepts"),
        dtypes=(torch.bfloat16, torch.float32),
        on_request=ON_REQUEST,
        missing=missing_triton,
        kernels=_TRITON,
    )
)
# second choice on an NPU: Triton's kernels run on every Ascend, these on Ascend 950 alone
_OPERATORS = (
    "npu_mhc_pre",
    "npu_mhc_pre_backward",
    "npu_mhc_sinkhorn",
    "npu_mhc_sinkhorn_backward",
)
mhc_pre.register(adapter("mhc_pre", "mhc_pre", *_OPERATORS, dtypes=(torch.bfloat16,)))
mhc_head = Op("mhc_head", _mhc_head)
