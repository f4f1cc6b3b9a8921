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

Two-phase form, for the many sublayers that share the same frozen blocks: ``summarize`` reads the
blocks once for all their queries, ``merge`` adds the running sum by online softmax. Together they
equal ``attn_res((*blocks, prefix), ...)``. With Q queries and bfloat16 sources that moves ``N + 6
Q`` sources' bytes in place of ``(N + 2) Q``. Take the summaries apart with ``unbind``: its backward
makes one sum of their gradients.

``triton`` is in float32, for up to 12 sources and 32 queries, with first derivatives only. The
one-pass form reads each source once each way. For more than 4 sources its backward keeps the
rounded result too, as that of ``merge`` does, and takes from it what the gradients of the scores
need: these are off by the size of rounding one source (:mod:`~.attn_res.triton.one_pass`).
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


def _triton(op: str, file: str) -> Implementation:
    return Implementation(
        "triton",
        ("cuda", "npu"),
        lazily(f"{_TRITON}.{file}", op),
        lazily(f"{_TRITON}.{file}", f"{op}_accepts"),
        dtypes=(torch.bfloat16, torch.float32),
        on_request=ON_REQUEST,
        missing=missing_triton,
        kernels=f"{_TRITON}.{file}",
    )


attn_res = Op("attn_res", _attn_res)
attn_res.register(_triton("attn_res", "one_pass"))
summarize = Op("attn_res_summarize", _summarize)
summarize.register(_triton("attn_res_summarize", "summarize"))
merge = Op("attn_res_merge", _merge)
merge.register(_triton("attn_res_merge", "merge"))
