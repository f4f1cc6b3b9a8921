# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
"""The first of the two phases: the blocks' mixes of all queries.

Forward: scores, the product of the blocks with the keys, and then the mixes. Backward: the
gradients of the scores, and from them those of the blocks and of the keys. Each reads the blocks
once, whatever the number of queries. In a product with bfloat16 a float32 number is the sum of
three bfloat16 numbers, so that products are exact. Gradients of keys are summed over a program's
tokens in registers and over programs in a fixed order. First order only.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff import custom_vjp, stop_gradient
from k31fn.kernels.attn_res.reference import Summary
from k31fn.kernels.attn_res.reference import summarize as reference
from k31fn.kernels.attn_res.triton.shared import (
    alike,
    build,
    named,
    odd_shapes,
    padded,
    pick,
    power,
    product,
    stacked,
)
from k31fn.kernels.attn_res.triton.summarize_backward import (
    attn_res_summarize_d_blocks,
    attn_res_summarize_d_keys,
    attn_res_summarize_d_scores,
)
from k31fn.kernels.attn_res.triton.weights import attn_res_d_weights, build_of_weights, of_weights
from k31fn.kernels.launch import INTERPRETED, Build, Tile, grouped, programs, step

__all__ = ["MOST_QUERIES", "attn_res_summarize", "attn_res_summarize_accepts", "builds"]

MOST_QUERIES = 32

# per device kind: scores, mix, gradients of the scores, of the blocks, of the keys. Of the first
# and the last, rows are tokens; columns of the second and the fourth are those of all sources
# together.
_TILES = {
    "cuda": (
        Tile(warps=4, per_core=4, rows=64, columns=64, stages=4),
        Tile(warps=4, per_core=4, columns=8192, stages=1),
        Tile(warps=2, per_core=6, columns=32, stages=4),
        Tile(warps=4, per_core=4, columns=8192, stages=3),
        Tile(warps=4, per_core=4, rows=16, columns=64, stages=4),
    ),
    "npu": (
        Tile(rows=32, columns=128),
        Tile(per_core=2, columns=4096),
        Tile(columns=128),
        Tile(per_core=2, columns=4096),
        Tile(rows=32, columns=128),
    ),
    "cpu": (
        Tile(rows=16, columns=16),
        Tile(columns=64),
        Tile(columns=16),
        Tile(columns=64),
        Tile(rows=16, columns=16),
    ),
}


@triton.jit
def attn_res_summarize_scores(
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
    score_ptr,
    rrms_ptr,
    number,
    sources,
    tokens,
    width,
    queries,
    per_group,
    source_group,
    key_group,
    eps,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    group = (tl.program_id(0) // per_group).to(tl.int64)
    asked = tl.arange(0, PADDED)
    rows = tl.arange(0, ROWS)
    for p in range(tl.program_id(0) % per_group, tl.cdiv(tokens, ROWS) * N, per_group):
        first = group * 0 + (p // N) * ROWS  # 64 bits
        here = rows < tokens - first
        source = pick(p % N, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, N)
        source += group * source_group + first * width
        products = tl.zeros((PADDED, ROWS), dtype=tl.float32)
        squares = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for start in tl.range(0, width, BLOCK, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            value = tl.load(
                source + rows[:, None] * width + columns[None, :],
                mask=here[:, None] & inside[None, :],
                other=0.0,
            )
            key = tl.load(
                key_ptr + group * key_group + asked[:, None] * width + columns[None, :],
                mask=(asked < queries)[:, None] & inside[None, :],
                other=0.0,
            )
            squares += value.to(tl.float32) * value.to(tl.float32)
            products = product(key, tl.trans(value), products, PARTS, WIDE)
        rrms = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / width + eps)
        written = group * sources + number + p % N
        tl.store(rrms_ptr + written * tokens + first + rows, rrms, mask=here)
        tl.store(
            score_ptr
            + (written * queries * tokens + first)
            + asked[:, None] * tokens
            + rows[None, :],
            products * rrms[None, :],
            mask=(asked < queries)[:, None] & here[None, :],
        )


@triton.jit
def attn_res_summarize_mix(
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
    max_ptr,
    sum_ptr,
    mix_ptr,
    tokens,
    width,
    queries,
    pieces,
    per_group,
    source_group,
    N: tl.constexpr,
    SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    CHOOSE: tl.constexpr,
):
    group = (tl.program_id(0) // per_group).to(tl.int64)
    numbers = tl.arange(0, SOURCES)
    for p in range(tl.program_id(0) % per_group, tokens * pieces, per_group):
        token = group * 0 + p // pieces  # 64 bits
        columns = (p % pieces) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        row = group * source_group + token * width
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
        ).to(tl.float32)
        for q in tl.range(0, queries, num_stages=STAGES):
            at_score = (group * N * queries + q) * tokens + token
            scores = tl.load(
                score_ptr + at_score + numbers * (queries * tokens), mask=numbers < N, other=-1.0e30
            )
            largest = tl.max(scores, axis=0)
            weights = tl.exp(scores - largest)
            total = tl.sum(weights, axis=0)
            mixed = tl.sum(value * (weights * (1.0 / total))[:, None], axis=0)
            written = (group * queries + q) * tokens + token
            tl.store(mix_ptr + written * width + columns, mixed, mask=inside)
            if p % pieces == 0:
                tl.store(max_ptr + written, largest)
                tl.store(sum_ptr + written, total)


def attn_res_summarize_accepts(
    blocks: tuple[Tensor, ...], queries: Tensor, norm_weights: Tensor, eps: float
) -> str:
    """Why :func:`attn_res_summarize` cannot run, or nothing."""
    del eps
    if not 1 <= len(queries) <= MOST_QUERIES:
        return f"it takes 1 to {MOST_QUERIES} queries, got {len(queries)}"
    return odd_shapes(blocks, (queries, norm_weights), tuple(queries.shape[:1])) if blocks else ""


def attn_res_summarize(
    blocks: tuple[Tensor, ...], queries: Tensor, norm_weights: Tensor, eps: float
) -> Summary:
    """The op; scores, softmax and sums in float32."""
    if not blocks:
        return reference(blocks, queries, norm_weights, eps)  # constants
    summary = _summarize(
        tuple(b.flatten(0, 1)[None] for b in blocks), queries[None], norm_weights[None], eps
    )
    rows = blocks[0].shape[:2]
    largest, total, out = (part.squeeze(0).unflatten(1, rows) for part in summary)
    return Summary(stop_gradient(largest), total, out)


def _summarize_fwd(
    blocks: tuple[Tensor, ...], queries: Tensor, norms: Tensor, eps: float
) -> tuple[Summary, tuple[object, ...]]:
    keys = queries.to(torch.float32) * norms.to(torch.float32)
    scores, rrms = grouped(functools.partial(_launch_scores, eps), *blocks, keys)
    return Summary(*grouped(_launch_mix, *blocks, scores)), (
        blocks,
        queries,
        norms,
        keys,
        scores,
        rrms,
    )


def _summarize_bwd(
    eps: float, residuals: tuple[Any, ...], ct: Summary
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    del eps  # it is in rrms
    blocks, queries, norms, keys, scores, rrms = residuals
    probs, along = grouped(_launch_d_scores, *blocks, scores, rrms, ct.sum, ct.out)
    d_blocks = grouped(_launch_d_blocks, *blocks, keys, scores, rrms, probs, along, ct.out)
    d_queries, d_norms = grouped(_launch_d_keys, *blocks, queries, norms, along)
    return d_blocks, d_queries, d_norms


_summarize = custom_vjp(
    _summarize_fwd, nondiff_argnums=(3,), opaque=True, name="attn_res_summarize (triton)"
).defvjp(_summarize_fwd, _summarize_bwd)


def _launch_scores(eps: float, *operands: Tensor) -> tuple[Tensor, ...]:
    *given, keys = operands
    groups, (_, tokens, width) = max(x.shape[0] for x in operands), given[0].shape
    sources, n, queries, keys = alike(given), len(given), keys.shape[1], keys.contiguous()
    tile, kind = _TILES[keys.device.type][0], keys.device.type
    scores, rrms = keys.new_empty((groups, n, queries, tokens)), keys.new_empty((groups, n, tokens))
    once = _at_once(kind, n)
    cut = _of_product(kind, tile, once, queries, sources[0].itemsize)
    per_group = programs(keys.device, groups, triton.cdiv(tokens, tile.rows) * once, tile.per_core)
    for i in range(0, n, once):
        attn_res_summarize_scores[(groups * per_group,)](
            *padded(sources[i : i + once]),
            keys,
            scores,
            rrms,
            i,
            n,
            tokens,
            width,
            queries,
            per_group,
            step(sources[0]),
            step(keys),
            eps,
            **named(attn_res_summarize_scores, cut),
        )
    return scores, rrms


def _launch_mix(*operands: Tensor) -> tuple[Tensor, ...]:
    *given, scores = operands
    (groups, n, queries, tokens), width = scores.shape, given[0].shape[-1]
    sources, scores = alike(given), scores.contiguous()
    tile = _TILES[scores.device.type][1]
    largest, total = (scores.new_empty((groups, queries, tokens)) for _ in range(2))
    out = scores.new_empty((groups, queries, tokens, width))
    cut = _of_width(scores.device.type, tile, n, width)
    pieces = triton.cdiv(width, cut["BLOCK"])
    per_group = programs(scores.device, groups, tokens * pieces, tile.per_core)
    attn_res_summarize_mix[(groups * per_group,)](
        *padded(sources),
        scores,
        largest,
        total,
        out,
        tokens,
        width,
        queries,
        pieces,
        per_group,
        step(sources[0]),
        **named(attn_res_summarize_mix, cut),
    )
    return largest, total, out


def _launch_d_scores(*operands: Tensor) -> tuple[Tensor, ...]:
    *given, scores, rrms, d_sum, d_mix = operands
    groups, (_, n, queries, tokens), width = (
        max(x.shape[0] for x in operands),
        scores.shape,
        given[0].shape[-1],
    )
    sources = alike(given)
    scores, rrms, d_sum, d_mix = (x.contiguous() for x in (scores, rrms, d_sum, d_mix))
    tile = _TILES[scores.device.type][2]
    probs, along = (scores.new_empty((groups, n, queries, tokens)) for _ in range(2))
    cut = _of_product(scores.device.type, tile, n, queries, sources[0].itemsize)
    per_group = programs(scores.device, groups, tokens, tile.per_core)
    attn_res_summarize_d_scores[(groups * per_group,)](
        *padded(sources),
        scores,
        rrms,
        d_sum,
        d_mix,
        probs,
        along,
        tokens,
        width,
        queries,
        per_group,
        *map(step, (sources[0], rrms, scores, d_sum, d_mix)),
        **named(attn_res_summarize_d_scores, cut),
    )
    return probs, along


def _launch_d_blocks(*operands: Tensor) -> tuple[Tensor, ...]:
    *given, keys, scores, rrms, probs, along, d_mix = operands
    groups, (_, n, queries, tokens), width = (
        max(x.shape[0] for x in operands),
        scores.shape,
        given[0].shape[-1],
    )
    sources = alike(given)
    keys, scores, rrms, d_mix = (x.contiguous() for x in (keys, scores, rrms, d_mix))
    probs, along = (x.expand(groups, -1, -1, -1).contiguous() for x in (probs, along))
    tile = _TILES[keys.device.type][3]
    cut = _of_width(keys.device.type, tile, n, width)
    pieces = triton.cdiv(width, cut["BLOCK"])
    per_group = programs(keys.device, groups, tokens * pieces, tile.per_core)
    d_sources = [s.new_empty((groups, tokens, width)) for s in sources]
    attn_res_summarize_d_blocks[(groups * per_group,)](
        *padded(sources),
        *padded(d_sources),
        keys,
        scores,
        rrms,
        probs,
        along,
        d_mix,
        tokens,
        width,
        queries,
        pieces,
        per_group,
        *map(step, (sources[0], keys, rrms, scores, d_mix)),
        **named(attn_res_summarize_d_blocks, cut),
    )
    return tuple(d_sources)


def _launch_d_keys(*operands: Tensor) -> tuple[Tensor, ...]:
    *given, asked, norms, along = operands
    groups, (_, n, queries, tokens), width = (
        max(x.shape[0] for x in operands),
        along.shape,
        given[0].shape[-1],
    )
    sources, along = alike(given), along.expand(groups, -1, -1, -1).contiguous()
    tile = _TILES[along.device.type][4]
    cut = _of_product(along.device.type, tile, n, queries, sources[0].itemsize)
    pieces = triton.cdiv(width, cut["BLOCK"])
    splits = programs(along.device, groups * pieces, triton.cdiv(tokens, tile.rows), tile.per_core)
    d_keys = along.new_empty((groups, splits, queries, width))
    attn_res_summarize_d_keys[(groups * splits * pieces,)](
        *padded(sources),
        along,
        d_keys,
        tokens,
        width,
        queries,
        splits,
        pieces,
        step(sources[0]),
        **named(attn_res_summarize_d_keys, cut),
    )
    found = of_weights(
        along.device.type,
        attn_res_d_weights,
        d_keys.flatten(2),
        *(x.contiguous().flatten(1) for x in (asked, norms)),
    )
    return tuple(x.unflatten(1, (queries, width)) for x in found)


def _at_once(kind: str, n: int) -> int:
    """Sources of a launch of the scores: Ascend's compiler does not choose between pointers."""
    return 1 if kind == "npu" else n


def _of_product(kind: str, tile: Tile, n: int, queries: int, itemsize: int) -> dict[str, Any]:
    """What the kernels with products, whose sides are at least 16, are compiled with."""
    return {
        "N": n,
        "SOURCES": max(16, power(n)),
        "PADDED": max(16, power(queries)),
        "ROWS": tile.rows,
        "BLOCK": max(16, tile.columns * 2 // itemsize),
        "STAGES": tile.stages,
        "PARTS": 3 if itemsize == 2 else 1,
        "WIDE": INTERPRETED,
        "CHOOSE": kind != "npu",
        "num_warps": tile.warps,
    }


def _of_width(kind: str, tile: Tile, n: int, width: int) -> dict[str, Any]:
    """What the kernels of one query after the other are compiled with; a narrow token is one piece.

    A thread has 8 features of all sources, so that sums over sources stay in it.
    """
    sources = power(n)
    block = min(tile.columns // sources, power(width))
    return {
        "N": n,
        "SOURCES": sources,
        "BLOCK": block,
        "STAGES": tile.stages,
        "CHOOSE": kind != "npu",
        "num_warps": max(1, min(tile.warps, block // 256)),
    }


def builds(kind: str) -> list[Build]:
    """What is compiled for the shapes of K3.1 (8 blocks, and the queries of 12 layers) on a kind of
    device.
    """
    scores, mix, d_scores, d_blocks, d_keys = _TILES[kind]
    found = []
    for dtype, itemsize, n, queries in (("bf16", 2, 8, 24), ("fp32", 4, 2, 3)):
        shapes = f"{dtype} N{n} Q{queries}"
        of_scores = _of_product(kind, scores, _at_once(kind, n), queries, itemsize)
        of_d_scores, of_keys = (
            _of_product(kind, tile, n, queries, itemsize) for tile in (d_scores, d_keys)
        )
        found += [
            build(attn_res_summarize_scores, shapes, of_scores, "forward", scores),
            build(attn_res_summarize_mix, shapes, _of_width(kind, mix, n, 7168), "forward", mix),
            build(attn_res_summarize_d_scores, shapes, of_d_scores, "backward", d_scores),
            build(
                attn_res_summarize_d_blocks,
                shapes,
                _of_width(kind, d_blocks, n, 7168),
                "backward",
                d_blocks,
            ),
            build(attn_res_summarize_d_keys, shapes, of_keys, "backward", d_keys),
        ]
    return [*found, build_of_weights(kind, "fp32 Q24 D7168", 4)]
