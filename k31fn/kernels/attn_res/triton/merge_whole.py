# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The second phase where a program can hold a token: one kernel each way, which reads everything
once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.attn_res.triton.shared import add_pairs

__all__ = ["attn_res_merge_backward_whole", "attn_res_merge_forward_whole"]


@triton.jit
def attn_res_merge_forward_whole(
    max_ptr,
    sum_ptr,
    mix_ptr,
    prefix_ptr,
    query_ptr,
    norm_ptr,
    out_ptr,
    weight_ptr,
    score_ptr,
    rrms_ptr,
    tokens,
    width: tl.constexpr,
    per_group,
    max_group,
    sum_group,
    mix_group,
    prefix_group,
    query_group,
    norm_group,
    eps,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Result and statistics of a token."""
    group = (tl.program_id(0) // per_group).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    key = tl.load((query_ptr + group * query_group) + columns, mask=inside, other=0.0).to(
        tl.float32
    )
    key *= tl.load((norm_ptr + group * norm_group) + columns, mask=inside, other=0.0).to(tl.float32)
    for t in tl.range(tl.program_id(0) % per_group, tokens, per_group, num_stages=STAGES):
        token = group * 0 + t  # 64 bits
        value = tl.load(
            prefix_ptr + (group * prefix_group + token * width) + columns, mask=inside, other=0.0
        )
        mix = tl.load(
            mix_ptr + (group * mix_group + token * width) + columns, mask=inside, other=0.0
        )
        before = tl.load(max_ptr + (group * max_group + token))
        total = tl.load(sum_ptr + (group * sum_group + token))
        value = value.to(tl.float32)
        square, product = tl.reduce((value * value, value * key), 0, add_pairs)
        rrms = 1.0 / tl.sqrt(square / width + eps)
        score = product * rrms
        largest = tl.maximum(before, score)
        now = tl.exp(score - largest)
        weight = now / (tl.exp(before - largest) * total + now)
        written = group * tokens + token
        tl.store(score_ptr + written, score)
        tl.store(rrms_ptr + written, rrms)
        tl.store(weight_ptr + written, weight)
        out = (mix + weight * (value - mix)).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + written * width + columns, out, mask=inside)


@triton.jit
def attn_res_merge_backward_whole(
    sum_ptr,
    prefix_ptr,
    query_ptr,
    norm_ptr,
    out_ptr,
    weight_ptr,
    score_ptr,
    rrms_ptr,
    ct_ptr,
    d_max_ptr,
    d_sum_ptr,
    d_mix_ptr,
    d_prefix_ptr,
    d_key_ptr,
    tokens,
    width: tl.constexpr,
    per_group,
    sum_group,
    prefix_group,
    query_group,
    norm_group,
    out_group,
    stat_group,
    ct_group,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All gradients of a token, and the key's over a program's tokens."""
    group = (tl.program_id(0) // per_group).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    key = tl.load((query_ptr + group * query_group) + columns, mask=inside, other=0.0).to(
        tl.float32
    )
    key *= tl.load((norm_ptr + group * norm_group) + columns, mask=inside, other=0.0).to(tl.float32)
    d_key = tl.zeros((BLOCK,), dtype=tl.float32)
    for t in tl.range(tl.program_id(0) % per_group, tokens, per_group, num_stages=STAGES):
        token = group * 0 + t  # 64 bits
        value = tl.load(
            prefix_ptr + (group * prefix_group + token * width) + columns, mask=inside, other=0.0
        )
        out = tl.load(
            out_ptr + (group * out_group + token * width) + columns, mask=inside, other=0.0
        )
        ct = tl.load(
            ct_ptr + (group * ct_group + token * width) + columns, mask=inside, other=0.0
        ).to(tl.float32)
        stats = group * stat_group + token
        weight = tl.load(weight_ptr + stats)
        rrms = tl.load(rrms_ptr + stats)
        score = tl.load(score_ptr + stats)
        total = tl.load(sum_ptr + (group * sum_group + token))
        value = value.to(tl.float32)
        d_score = tl.sum(ct * (value - out.to(tl.float32)), axis=0) * weight
        written = group * tokens + token
        tl.store(d_max_ptr + written, -d_score)
        tl.store(
            d_sum_ptr + written,
            tl.where(total > 0.0, -d_score / tl.where(total > 0.0, total, 1.0), 0.0),
        )
        along = d_score * rrms
        d_key += along * value
        of_prefix = weight * ct + along * key - (along * score * rrms / width) * value
        tl.store(
            d_prefix_ptr + written * width + columns,
            of_prefix.to(d_prefix_ptr.dtype.element_ty),
            mask=inside,
        )
        tl.store(d_mix_ptr + written * width + columns, ct - weight * ct, mask=inside)
    tl.store(d_key_ptr + tl.program_id(0).to(tl.int64) * width + columns, d_key, mask=inside)
