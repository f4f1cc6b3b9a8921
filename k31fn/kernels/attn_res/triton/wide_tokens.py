# pyright: reportMissingImports=false, reportMissingParameterType=false, reportGeneralTypeIssues=false
"""Kernels for a token that is too wide to be held (Ascend): it is read in pieces of its
features, and twice, each way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.attn_res.triton.sources import at

__all__ = ["attn_res_backward_scores", "attn_res_backward_sources", "attn_res_forward_pieces"]


@triton.jit
def attn_res_forward_pieces(
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
    key_ptr,
    out_ptr,
    score_ptr,
    rrms_ptr,
    tokens,
    width,
    per_group,
    source_group,
    key_group,
    eps,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics and result of a token."""
    group = (tl.program_id(0) // per_group).to(tl.int64)
    numbers = tl.arange(0, PADDED)
    # a program takes every per_group-th token: the grid is as large as the device, not the batch
    for t in range(tl.program_id(0) % per_group, tokens, per_group):
        token = group * 0 + t  # 64 bits
        squares = tl.zeros((PADDED,), dtype=tl.float32)
        products = tl.zeros((PADDED,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            row = group * source_group + token * width
            key = tl.load((key_ptr + group * key_group) + columns, mask=inside, other=0.0)
            # unrolled, with the pointers known when compiled: Ascend has no choice between pointers
            for i in tl.static_range(N):
                source = at(i, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11)
                value = tl.load(source + row + columns, mask=inside, other=0.0).to(tl.float32)
                # the i-th number of a vector is set by a mask: Triton has no indexing of registers
                squares = tl.where(numbers == i, squares + tl.sum(value * value, axis=0), squares)
                products = tl.where(numbers == i, products + tl.sum(value * key, axis=0), products)
        rrms = 1.0 / tl.sqrt(squares / width + eps)
        scores = products * rrms
        stats = (group * N + numbers) * tokens + token
        tl.store(score_ptr + stats, scores, mask=numbers < N)
        tl.store(rrms_ptr + stats, rrms, mask=numbers < N)
        # what pads N to a power of two gets the probability 0
        scores = tl.where(numbers < N, scores, -1.0e30)
        probs = tl.exp(scores - tl.max(scores, axis=0))
        probs = probs / tl.sum(probs, axis=0)
        # the second reading of the sources: the first one's values did not fit
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            row = group * source_group + token * width
            mixed = tl.zeros((BLOCK,), dtype=tl.float32)
            for i in tl.static_range(N):
                source = at(i, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11)
                value = tl.load(source + row + columns, mask=inside, other=0.0).to(tl.float32)
                mixed += value * tl.sum(tl.where(numbers == i, probs, 0.0), axis=0)
            out = mixed.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (group * tokens + token) * width + columns, out, mask=inside)


@triton.jit
def attn_res_backward_scores(
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
    score_ptr,
    ct_ptr,
    d_score_ptr,
    tokens,
    width,
    per_group,
    source_group,
    stat_group,
    ct_group,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of a token's scores."""
    group = (tl.program_id(0) // per_group).to(tl.int64)
    numbers = tl.arange(0, PADDED)
    for t in range(tl.program_id(0) % per_group, tokens, per_group):
        token = group * 0 + t  # 64 bits
        d_probs = tl.zeros((PADDED,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            row = group * source_group + token * width
            ct = tl.load(
                ct_ptr + (group * ct_group + token * width) + columns, mask=inside, other=0.0
            ).to(tl.float32)
            for i in tl.static_range(N):
                source = at(i, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11)
                value = tl.load(source + row + columns, mask=inside, other=0.0).to(tl.float32)
                d_probs = tl.where(numbers == i, d_probs + tl.sum(ct * value, axis=0), d_probs)
        # probabilities are computed again from the scores, which the forward kept
        scores = tl.load(
            score_ptr + group * stat_group + numbers * tokens + token,
            mask=numbers < N,
            other=-1.0e30,
        )
        probs = tl.exp(scores - tl.max(scores, axis=0))
        probs = probs / tl.sum(probs, axis=0)
        d_scores = probs * (d_probs - tl.sum(probs * d_probs, axis=0))
        tl.store(d_score_ptr + (group * N + numbers) * tokens + token, d_scores, mask=numbers < N)


@triton.jit
def attn_res_backward_sources(
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
    key_ptr,
    score_ptr,
    rrms_ptr,
    d_score_ptr,
    ct_ptr,
    d_key_ptr,
    tokens,
    width,
    splits,
    pieces,
    source_group,
    key_group,
    stat_group,
    ct_group,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of the sources, and of the key over a program's tokens, for one piece of the
    features.
    """
    group = (tl.program_id(0) // (splits * pieces)).to(tl.int64)
    split = (tl.program_id(0) // pieces) % splits
    columns = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    numbers = tl.arange(0, PADDED)
    key = tl.load((key_ptr + group * key_group) + columns, mask=inside, other=0.0)
    # summed over the tokens in registers, over the splits by another kernel: one fixed order
    d_key = tl.zeros((BLOCK,), dtype=tl.float32)
    for t in range(split, tokens, splits):
        token = group * 0 + t  # 64 bits
        row = group * source_group + token * width
        written = (group * tokens + token) * width
        ct = tl.load(
            ct_ptr + (group * ct_group + token * width) + columns, mask=inside, other=0.0
        ).to(tl.float32)
        stats = (group * stat_group + token) + numbers * tokens
        scores = tl.load(score_ptr + stats, mask=numbers < N, other=-1.0e30)
        rrms = tl.load(rrms_ptr + stats, mask=numbers < N, other=0.0)
        d_scores = tl.load(
            d_score_ptr + (group * N + numbers) * tokens + token, mask=numbers < N, other=0.0
        )
        probs = tl.exp(scores - tl.max(scores, axis=0))
        probs = probs / tl.sum(probs, axis=0)
        # s_i = rho_i <key, v_i>: along the key, and along v_i through rho_i
        along_key = d_scores * rrms
        along_value = d_scores * scores * rrms * rrms / width
        for i in tl.static_range(N):
            source = at(i, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11)
            value = tl.load(source + row + columns, mask=inside, other=0.0).to(tl.float32)
            of_ct = tl.sum(tl.where(numbers == i, probs, 0.0), axis=0)
            of_key = tl.sum(tl.where(numbers == i, along_key, 0.0), axis=0)
            of_value = tl.sum(tl.where(numbers == i, along_value, 0.0), axis=0)
            d_key += of_key * value
            d_source = at(i, d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11) + written
            y = of_ct * ct + of_key * key - of_value * value
            tl.store(d_source + columns, y.to(d0.dtype.element_ty), mask=inside)
    tl.store(d_key_ptr + (group * splits + split) * width + columns, d_key, mask=inside)
