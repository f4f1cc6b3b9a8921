# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
"""The backward of the first of the two phases: gradients of the scores, of the blocks and of the
keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.attn_res.triton.shared import at, product, stacked

__all__ = [
    "attn_res_summarize_d_blocks",
    "attn_res_summarize_d_keys",
    "attn_res_summarize_d_scores",
]


@triton.jit
def attn_res_summarize_d_scores(
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
    rrms_ptr,
    d_sum_ptr,
    d_mix_ptr,
    prob_ptr,
    along_ptr,
    tokens,
    width,
    queries,
    per_group,
    source_group,
    stat_group,
    score_group,
    d_sum_group,
    d_mix_group,
    N: tl.constexpr,
    SOURCES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    CHOOSE: tl.constexpr,
):
    """Probabilities and gradients of a token's scores, from the products of the mixes' cotangents
    with the blocks.
    """
    group = (tl.program_id(0) // per_group).to(tl.int64)
    numbers = tl.arange(0, SOURCES)
    asked = tl.arange(0, PADDED)
    there = asked < queries
    for t in range(tl.program_id(0) % per_group, tokens, per_group):
        token = group * 0 + t  # 64 bits
        d_mix_row = d_mix_ptr + (group * d_mix_group + token * width)
        row = group * source_group + token * width
        d_probs = tl.zeros((PADDED, SOURCES), dtype=tl.float32)
        for start in tl.range(0, width, BLOCK, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            d_mix = tl.load(
                d_mix_row + (asked.to(tl.int64) * tokens * width)[:, None] + columns[None, :],
                mask=there[:, None] & inside[None, :],
                other=0.0,
            )
            value = stacked(
                numbers,
                row,
                columns,
                inside,
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
                N,
                CHOOSE,
            )
            d_probs = product(d_mix, tl.trans(value), d_probs, PARTS, WIDE)
        both = there[:, None] & (numbers < N)[None, :]
        tile = asked[:, None] * tokens + numbers[None, :] * (queries * tokens)
        scores = tl.load(score_ptr + (group * score_group + token) + tile, mask=both, other=-1.0e30)
        rrms = tl.load(
            rrms_ptr + (group * stat_group + token) + numbers * tokens, mask=numbers < N, other=0.0
        )
        d_sum = tl.load(
            d_sum_ptr + (group * d_sum_group + token) + asked * tokens, mask=there, other=0.0
        )
        weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
        probs = weights * (1.0 / tl.sum(weights, axis=1))[:, None]
        d_scores = (
            probs * (d_probs - tl.sum(probs * d_probs, axis=1)[:, None]) + d_sum[:, None] * weights
        )
        written = (group * N * queries * tokens + token) + tile
        tl.store(prob_ptr + written, probs, mask=both)
        tl.store(along_ptr + written, d_scores * rrms[None, :], mask=both)


@triton.jit
def attn_res_summarize_d_blocks(
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
    prob_ptr,
    along_ptr,
    d_mix_ptr,
    tokens,
    width,
    queries,
    pieces,
    per_group,
    source_group,
    key_group,
    stat_group,
    score_group,
    d_mix_group,
    N: tl.constexpr,
    SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of a piece of a token in all blocks at once, so that the cotangents are read
    once.
    """
    group = (tl.program_id(0) // per_group).to(tl.int64)
    numbers = tl.arange(0, SOURCES)
    exists = numbers < N
    for p in range(tl.program_id(0) % per_group, tokens * pieces, per_group):
        token = group * 0 + p // pieces  # 64 bits
        columns = (p % pieces) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        y = tl.zeros((SOURCES, BLOCK), dtype=tl.float32)
        shrink = tl.zeros((SOURCES,), dtype=tl.float32)
        for q in tl.range(0, queries, num_stages=STAGES):
            at_score = (group * 0 + q) * tokens + token + numbers * (queries * tokens)
            along = tl.load(
                along_ptr + group * N * queries * tokens + at_score, mask=exists, other=0.0
            )
            prob = tl.load(
                prob_ptr + group * N * queries * tokens + at_score, mask=exists, other=0.0
            )
            shrink += along * tl.load(
                score_ptr + group * score_group + at_score, mask=exists, other=0.0
            )
            key = tl.load(
                key_ptr + (group * key_group + q * width) + columns, mask=inside, other=0.0
            )
            d_mix = d_mix_ptr + (group * d_mix_group + (group * 0 + q * tokens + token) * width)
            d_mix = tl.load(d_mix + columns, mask=inside, other=0.0)
            y += prob[:, None] * d_mix[None, :] + along[:, None] * key[None, :]
        rrms = tl.load(
            rrms_ptr + (group * stat_group + token) + numbers * tokens, mask=exists, other=0.0
        )
        shrink = shrink * rrms / width
        for i in tl.static_range(N):
            source = at(i, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11) + (
                group * source_group + token * width
            )
            value = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
            this = numbers == i
            of_value = tl.sum(tl.where(this, shrink, 0.0), axis=0)
            found = tl.sum(tl.where(this[:, None], y, 0.0), axis=0) - of_value * value
            d_source = (
                at(i, d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11)
                + (group * tokens + token) * width
            )
            tl.store(d_source + columns, found.to(d0.dtype.element_ty), mask=inside)


@triton.jit
def attn_res_summarize_d_keys(
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
    along_ptr,
    d_key_ptr,
    tokens,
    width,
    queries,
    splits,
    pieces,
    source_group,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Gradients of a piece of all keys, over the tokens of a split."""
    group = (tl.program_id(0) // (splits * pieces)).to(tl.int64)
    split = (tl.program_id(0) // pieces) % splits
    columns = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    asked = tl.arange(0, PADDED)
    rows = tl.arange(0, ROWS)
    d_keys = tl.zeros((PADDED, BLOCK), dtype=tl.float32)
    for p in tl.range(split, tl.cdiv(tokens, ROWS), splits, num_stages=STAGES):
        first = group * 0 + p * ROWS  # 64 bits
        here = rows < tokens - first
        for i in tl.static_range(N):
            source = at(i, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11) + (
                group * source_group + first * width
            )
            value = tl.load(
                source + rows[:, None] * width + columns[None, :],
                mask=here[:, None] & inside[None, :],
                other=0.0,
            )
            along = tl.load(
                along_ptr
                + ((group * N + i) * queries * tokens + first)
                + asked[:, None] * tokens
                + rows[None, :],
                mask=(asked < queries)[:, None] & here[None, :],
                other=0.0,
            )
            d_keys = product(along, value, d_keys, PARTS, WIDE)
    tl.store(
        d_key_ptr
        + (group * splits + split) * queries * width
        + asked[:, None] * width
        + columns[None, :],
        d_keys,
        mask=(asked < queries)[:, None] & inside[None, :],
    )
