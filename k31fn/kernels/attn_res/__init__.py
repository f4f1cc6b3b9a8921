"""Attention over residual sources: every sublayer reads a learned softmax mix of earlier sums of the residual stream.

For sources ``v_1 .. v_N`` (each ``[B, T, D]``), a query ``r [D]`` and a norm weight ``n [D]``, per token:

    s_i = < r * n, v_i * rsqrt(mean(v_i^2) + eps) >        the key is normalised
    out = sum_i softmax_i(s) v_i                            the value is the raw source

Source: the Kimi K3 report, arXiv 2607.24653, equations 8 to 10. There is no 1/sqrt(D) and there are no heads; the query
is a parameter and does not depend on the input.

Precision: scores and mix in float32 (float64 for float64 sources), rounded once to the dtype of the sources.
No mask: tokens are independent, so packed documents and padding need no care.
Gradients: to any order, in the sources, the query and the norm weight. The backward keeps references to the sources and
two numbers per token and source; no copy of a source.

Two-phase form, for the many sublayers that share the same frozen blocks: ``summarize`` reads the blocks once for all
their queries, ``merge`` adds the running sum by online softmax. Together they equal
``attn_res((*blocks, prefix), ...)``.

``triton`` is one pass over up to 12 sources each way, in float32, with first derivatives only. Its backward keeps the
result too, and in bfloat16 what was rounded off it.
"""

import torch

from k31fn.kernels.attn_res.reference import Summary
from k31fn.kernels.attn_res.reference import attn_res as _attn_res
from k31fn.kernels.attn_res.reference import merge as _merge
from k31fn.kernels.attn_res.reference import summarize as _summarize
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op

__all__ = ["Summary", "attn_res", "merge", "summarize"]

_TRITON = "k31fn.kernels.attn_res.triton"
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
summarize = Op("attn_res_summarize", _summarize)
merge = Op("attn_res_merge", _merge)
