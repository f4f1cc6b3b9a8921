"""Attention over residual sources: every sublayer reads a learned softmax mix of earlier sums of
the residual stream.

For sources ``v_1 .. v_N`` (each ``[B, T, D]``), a query ``r [D]`` and a norm weight ``n [D]``, per
token:

    s_i = < r * n, v_i * rsqrt(mean(v_i^2) + eps) >        the key is normalised
    out = sum_i softmax_i(s) v_i                            the value is the raw source

Source: the Kimi K3 report, arXiv 2607.24653, equations 8 to 10. There is no 1/sqrt(D) and there are
no heads; the query is a parameter and does not depend on the input.

Precision: scores and mix in float32 (float64 for float64 sources), rounded once to the dtype of the
sources.
No mask: tokens are independent, so packed documents and padding need no care.
Gradients: to any order, in the sources, the query and the norm weight. The backward keeps
references to the sources and two numbers per token and source; no copy of a source.

``triton`` is in float32, for up to 12 sources, with first derivatives only. It reads each source
once each way. For more than 4 sources its backward keeps the rounded result too and takes from it
what the gradients of the scores need: these are off by the size of rounding one source
(:mod:`~.attn_res.triton.one_pass`).
"""

import torch

from k31fn.kernels.attn_res.reference import attn_res as _attn_res
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op

__all__ = ["attn_res"]

_TRITON = "k31fn.kernels.attn_res.triton.one_pass"

attn_res = Op("attn_res", _attn_res)
attn_res.register(
    Implementation(
        "triton",
        ("cuda", "npu"),
        lazily(_TRITON, "attn_res"),
        lazily(_TRITON, "attn_res_accepts"),
        dtypes=(torch.bfloat16, torch.float32),
        on_request=ON_REQUEST,
        missing=missing_triton,
        kernels=_TRITON,
    )
)
