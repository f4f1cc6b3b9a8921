# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The backward of the one pass where a program can hold all sources of a token, as a tile of
sources times features.

Then ``sum_j p_j <ct, v_j>`` is there when it is needed: the result is neither kept nor read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.attn_res.triton.sources import pick

__all__ = ["attn_res_backward_whole"]


@triton.jit
def attn_res_backward_whole(
    s0,
    s1,
    s2,
    s3,
    s4,
    s5,
    s6,
    s7,
    s8,
    s9,
    s10,
    s11,
    d0,
    d1,
    d2,
    d3,
    d4,
    d5,
    d6,
    d7,
    d8,
    d9,
    d10,
    d11,
    query_ptr,
    norm_ptr,
    score_ptr,
    rrms_ptr,
    ct_ptr,
    d_key_ptr,
    tokens,
    width: tl.constexpr,
    per_group,
    source_group,
    query_group,
    norm_group,
    stat_group,
    ct_group,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of the sources, and of the key over a program's tokens."""
    group = (tl.program_id(0) // per_group).to(tl.int64)
    numbers = tl.arange(0, PADDED)  # of the sources; N is padded, since tiles are powers of two
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    key = tl.load((query_ptr + group * query_group) + columns, mask=inside, other=0.0).to(
        tl.float32
    )
    key *= tl.load((norm_ptr + group * norm_group) + columns, mask=inside, other=0.0).to(tl.float32)
    # a column of pointers: one load takes a token's features in all sources
    sources = pick(numbers[:, None], s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, N)
    sources += group * source_group
    d_sources = pick(numbers[:, None], d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11, N)
    here = (numbers < N)[:, None] & inside[None, :]
    d_key = tl.zeros((BLOCK,), dtype=tl.float32)
    # staged: the next token's sources are on their way while this one is computed
    for t in tl.range(tl.program_id(0) % per_group, tokens, per_group, num_stages=STAGES):
        token = group * 0 + t  # 64 bits
        stats = (group * stat_group + token) + numbers * tokens
        scores = tl.load(score_ptr + stats, mask=numbers < N, other=-1.0e30)
        rrms = tl.load(rrms_ptr + stats, mask=numbers < N, other=0.0)
        ct = tl.load(
            ct_ptr + (group * ct_group + token * width) + columns, mask=inside, other=0.0
        ).to(tl.float32)
        value = tl.load(sources + token * width + columns[None, :], mask=here, other=0.0).to(
            tl.float32
        )
        d_probs = tl.sum(value * ct[None, :], axis=1)
        probs = tl.exp(scores - tl.max(scores, axis=0))
        probs = probs / tl.sum(probs, axis=0)
        # the softmax's transpose, times rho: the gradient of a score is d_probs less their mean
        along = probs * (d_probs - tl.sum(probs * d_probs, axis=0)) * rrms
        # scores of the padding are -1e30, and 0 times that should not be relied on
        shrink = along * tl.where(numbers < N, scores, 0.0) * rrms / width
        d_key += tl.sum(value * along[:, None], axis=0)
        y = probs[:, None] * ct[None, :] + along[:, None] * key[None, :] - shrink[:, None] * value
        written = (group * tokens + token) * width
        tl.store(
            d_sources + written + columns[None, :], y.to(d_sources.dtype.element_ty), mask=here
        )
    tl.store(d_key_ptr + tl.program_id(0).to(tl.int64) * width + columns, d_key, mask=inside)
