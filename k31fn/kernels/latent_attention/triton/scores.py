# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Scores of a query's chosen keys, a tile of keys by a program, all heads at once: a key is
gathered once for all of them.

Heads are rows and keys are columns, in all that is stored too: sums over keys and over heads then
read whole lines.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.attention.triton.arithmetic import product

__all__ = ["latent_head_probs", "latent_score_gradients", "latent_scores"]

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(
    q_ptr,
    kv_ptr,
    key,
    H: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Products of a query's heads with the rows ``key``, 0 where it is -1."""
    h = tl.arange(0, HEADS)
    d = tl.arange(0, DIMS)
    some = key >= 0
    at_q = q_ptr + h[:, None] * K + d[None, :]
    at_k = kv_ptr + tl.where(some, key, 0)[:, None] * K + d[None, :]
    scores = tl.zeros((HEADS, KEYS), tl.float32)
    for i in range(0, K, DIMS):
        here = (d < K - i)[None, :]
        q = tl.load(at_q + i, mask=(h < H)[:, None] & here, other=0.0)
        k = tl.load(at_k + i, mask=some[:, None] & here, other=0.0)
        scores = product(q, tl.trans(k), scores, WIDE)
    return scores


@triton.jit
def latent_scores(
    q_ptr,
    kv_ptr,
    topk_ptr,
    weights_ptr,
    largest_ptr,
    total_ptr,
    slots,
    pieces,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Powers of 2 of one tile of scores over its largest, their sum and that largest.

    ``scale`` has the factor log2(e). The sum is NaN where the positions do not ascend: a key that
    is there twice would count twice, and nothing else can say so without a wait for the device.
    """
    h = tl.arange(0, HEADS)
    m = tl.arange(0, KEYS)
    tiles = slots // KEYS
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        row = (pieces * 0 + piece // tiles).to(tl.int64)  # a tensor in the interpreter too
        first = piece % tiles * KEYS
        key = tl.load(topk_ptr + row * slots + first + m)
        after = m + 1 < slots - first
        following = tl.load(topk_ptr + row * slots + first + m + 1, mask=after, other=-1)
        refused = tl.sum(((following >= 0) & (following <= key)).to(tl.int32), 0)
        scores = _scores(q_ptr + row * H * K, kv_ptr, key, H, K, HEADS, KEYS, DIMS, WIDE)
        scores = tl.where((key >= 0)[None, :], scores * scale, -1e30)
        # above a masked score, whose power is 0
        largest = tl.maximum(tl.max(scores, 1), -1e20)
        weights = tl.exp2(scores - largest[:, None])
        total = tl.sum(weights, 1) + tl.where(refused > 0, float("nan"), 0.0)
        at = weights_ptr + row * H * slots + h[:, None] * slots + first + m[None, :]
        tl.store(at, weights, mask=(h < H)[:, None])
        statistics = (row * tiles + piece % tiles) * H + h
        tl.store(largest_ptr + statistics, largest, mask=h < H)
        tl.store(total_ptr + statistics, total, mask=h < H)


@triton.jit
def latent_score_gradients(
    q_ptr,
    kv_ptr,
    topk_ptr,
    ct_ptr,
    lse_ptr,
    delta_ptr,
    probs_ptr,
    d_scores_ptr,
    slots,
    pieces,
    scale,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Probabilities of one tile, and gradients of its products; a key is gathered once for both."""
    h = tl.arange(0, HEADS)
    m = tl.arange(0, KEYS)
    d = tl.arange(0, DIMS)
    tiles = slots // KEYS
    heads = (h < H)[:, None]
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        row = (pieces * 0 + piece // tiles).to(tl.int64)
        first = piece % tiles * KEYS
        key = tl.load(topk_ptr + row * slots + first + m)
        some = key >= 0
        at_q = q_ptr + row * H * K + h[:, None] * K + d[None, :]
        at_ct = ct_ptr + row * H * R + h[:, None] * R + d[None, :]
        at_k = kv_ptr + tl.where(some, key, 0)[:, None] * K + d[None, :]
        scores = tl.zeros((HEADS, KEYS), tl.float32)
        d_probs = tl.zeros((HEADS, KEYS), tl.float32)
        for i in range(0, K, DIMS):
            q = tl.load(at_q + i, mask=heads & (d < K - i)[None, :], other=0.0)
            # 0 at the dims that are no values: one loop for both products
            ct = tl.load(at_ct + i, mask=heads & (d < R - i)[None, :], other=0.0)
            k = tl.load(at_k + i, mask=some[:, None] & (d < K - i)[None, :], other=0.0)
            scores = product(q, tl.trans(k), scores, WIDE)
            d_probs = product(ct, tl.trans(k), d_probs, WIDE)
        lse = tl.load(lse_ptr + row * H + h, mask=h < H, other=1e30) * _LOG2E
        delta = tl.load(delta_ptr + row * H + h, mask=h < H, other=0.0)
        scores = tl.where(some[None, :], scores * (scale * _LOG2E), -1e30)
        probs = tl.exp2(scores - lse[:, None])
        d_scores = probs * (d_probs - delta[:, None]) * scale
        at = row * H * slots + h[:, None] * slots + first + m[None, :]
        tl.store(probs_ptr + at, probs, mask=heads)
        tl.store(d_scores_ptr + at, d_scores, mask=heads)


@triton.jit
def latent_head_probs(
    q_ptr,
    kv_ptr,
    topk_ptr,
    lse_ptr,
    out_ptr,
    slots,
    pieces,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Probabilities of one tile, summed over the heads."""
    h = tl.arange(0, HEADS)
    m = tl.arange(0, KEYS)
    tiles = slots // KEYS
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        row = (pieces * 0 + piece // tiles).to(tl.int64)
        at = row * slots + piece % tiles * KEYS + m
        key = tl.load(topk_ptr + at)
        scores = _scores(q_ptr + row * H * K, kv_ptr, key, H, K, HEADS, KEYS, DIMS, WIDE)
        lse = tl.load(lse_ptr + row * H + h, mask=h < H, other=1e30)
        scores = tl.where((key >= 0)[None, :], scores * scale, -1e30)
        probs = tl.sum(tl.exp2((scores - lse[:, None]) * _LOG2E), 0)
        tl.store(out_ptr + at, probs)
