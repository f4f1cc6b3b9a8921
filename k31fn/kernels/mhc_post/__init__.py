"""The step by which a sublayer's output joins the streams of a manifold-constrained
hyper-connection (mHC, arXiv 2512.24880).

``mhc_post(x [B T N D], f [B T D], h_post [B T N], h_res [B T N N]) -> [B T N D]``, per token::

    x'[j] = h_post[j] f + sum_i h_res[i, j] x[i]

The sum runs over the first index of ``h_res``. In float32 (float64 for float64 streams), rounded
once to the dtype of ``x``. The last three arguments but ``f`` come from
:mod:`k31fn.kernels.mhc_pre`. No mask: tokens are independent. Gradients: to any order in the
reference, in all arguments; the backward keeps its inputs only.
"""

import torch

from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.mhc_post.reference import mhc_post as _mhc_post
from k31fn.kernels.registry import Implementation, Op
from k31fn.kernels.vendor import adapter

__all__ = ["mhc_post"]

_TRITON = "k31fn.kernels.mhc_post.triton"
mhc_post = Op("mhc_post", _mhc_post)
mhc_post.register(
    Implementation(
        "triton",
        ("cuda", "npu"),
        lazily(_TRITON, "mhc_post"),
        lazily(_TRITON, "mhc_post_accepts"),
        dtypes=(torch.bfloat16, torch.float32),
        on_request=ON_REQUEST,
        missing=missing_triton,
        kernels=_TRITON,
    )
)
_OPERATORS = ("npu_mhc_post", "npu_mhc_post_backward")
mhc_post.register(adapter("mhc_post", "mhc_post", *_OPERATORS, dtypes=(torch.bfloat16,)))
