# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""Sums over a query's chosen keys, and over the queries that chose a key."""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.attention.triton.arithmetic import product

__all__ = ["latent_delta", "latent_key_sums", "latent_rows", "latent_sums"]


@triton.jit
def latent_sums(
    weights_ptr,
    kv_ptr,
    topk_ptr,
    largest_ptr,
    total_ptr,
    out_ptr,
    lse_ptr,
    slots,
    pieces,
    H: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    SHARED: tl.constexpr,
    SPLITS: tl.constexpr,
    SCORED: tl.constexpr,
    TILES: tl.constexpr,
    SOFTMAX: tl.constexpr,
    WIDE: tl.constexpr,
):
    """``out[h] = sum_m weights[h, m] kv[key m]`` of one query, DIMS of its latent and SHARED of
    its other dims by a program.

    SOFTMAX: the weights are those of tiles of SCORED keys over each tile's own largest score; they
    are brought together here, the statistics are stored, and the other dims are left out.
    """
    h = tl.arange(0, HEADS)
    m = tl.arange(0, KEYS)
    low = kv_ptr.dtype.element_ty
    heads = h < H
    tiles = slots // SCORED
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        row = (pieces * 0 + piece // SPLITS).to(tl.int64)
        split = piece % SPLITS
        c = split * DIMS + tl.arange(0, DIMS)
        if SOFTMAX:
            t = tl.arange(0, TILES)
            at = row * tiles * H + t[:, None] * H + h[None, :]
            real = (t < tiles)[:, None] & heads[None, :]
            largest = tl.load(largest_ptr + at, mask=real, other=-1e20)
            total = tl.load(total_ptr + at, mask=real, other=0.0)
            most = tl.max(largest, 0)
            total = tl.sum(total * tl.exp2(largest - most[None, :]), 0)
            none = total == 0
            lse = most + tl.log2(tl.where(none, 1.0, total))
            lse = tl.where(none, 1e30, lse)
            kept = tl.where(none, lse, lse * 0.6931471805599453)
            tl.store(lse_ptr + row * H + h, kept, mask=h < H - split * H)  # the first program
        acc = tl.zeros((HEADS, DIMS), tl.float32)
        if SHARED > 0:
            s = split * SHARED + tl.arange(0, SHARED)
            shared = tl.zeros((HEADS, SHARED), tl.float32)
        at = weights_ptr + row * H * slots + h[:, None] * slots + m[None, :]
        key = tl.load(topk_ptr + row * slots + m)
        for i in range(0, slots, KEYS):
            # a step ahead, or the rows could not be fetched further ahead than their positions
            ahead = m < slots - i - KEYS
            following = tl.load(topk_ptr + row * slots + i + KEYS + m, mask=ahead, other=-1)
            some = (key >= 0)[:, None]
            from_key = kv_ptr + tl.where(key >= 0, key, 0)[:, None] * (R + P)
            weights = tl.load(at + i, mask=heads[:, None], other=0.0)
            if SOFTMAX:
                of_tile = largest_ptr + (row * tiles + i // SCORED) * H + h
                factor = tl.exp2(tl.load(of_tile, mask=heads, other=-1e20) - lse)
                weights = (weights.to(tl.float32) * factor[:, None]).to(low)
            v = tl.load(from_key + c[None, :], mask=some & (c < R)[None, :], other=0.0)
            acc = product(weights, v, acc, WIDE)
            if SHARED > 0:
                v = tl.load(from_key + R + s[None, :], mask=some & (s < P)[None, :], other=0.0)
                shared = product(weights, v, shared, WIDE)
            key = following
        width = R if SOFTMAX else R + P
        at = out_ptr + row * H * width + h[:, None] * width
        tl.store(at + c[None, :], acc, mask=heads[:, None] & (c < R)[None, :])
        if SHARED > 0:
            tl.store(at + R + s[None, :], shared, mask=heads[:, None] & (s < P)[None, :])


@triton.jit
def latent_delta(
    out_ptr, ct_ptr, delta_ptr, rows, R: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """``delta = <ct, out>`` of some rows, each of one query and head."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    for i in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (rows * 0 + i).to(tl.int64) * ROWS
        here = (r < rows - row)[:, None] & (d < R)[None, :]
        at = row * R + r[:, None] * R + d[None, :]
        out = tl.load(out_ptr + at, mask=here, other=0.0).to(tl.float32)
        ct = tl.load(ct_ptr + at, mask=here, other=0.0).to(tl.float32)
        tl.store(delta_ptr + row + r, tl.sum(out * ct, 1), mask=r < rows - row)


@triton.jit
def latent_rows(
    q_ptr,
    ct_ptr,
    probs_ptr,
    d_scores_ptr,
    rows_ptr,
    slots,
    pieces,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """What one query gives the rows of a tile of its keys: ``probs^T ct + d_scores^T q``."""
    h = tl.arange(0, HEADS)
    m = tl.arange(0, KEYS)
    d = tl.arange(0, DIMS)
    tiles = slots // KEYS
    heads = (h < H)[:, None]
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        row = (pieces * 0 + piece // tiles).to(tl.int64)
        first = piece % tiles * KEYS
        at = row * H * slots + h[:, None] * slots + first + m[None, :]
        probs = tl.load(probs_ptr + at, mask=heads, other=0.0)
        d_scores = tl.load(d_scores_ptr + at, mask=heads, other=0.0)
        at_q = q_ptr + row * H * K + h[:, None] * K + d[None, :]
        at_ct = ct_ptr + row * H * R + h[:, None] * R + d[None, :]
        at_row = rows_ptr + (row * slots + first) * K + m[:, None] * K + d[None, :]
        for i in range(0, K, DIMS):
            ct = tl.load(at_ct + i, mask=heads & (d < R - i)[None, :], other=0.0)
            q = tl.load(at_q + i, mask=heads & (d < K - i)[None, :], other=0.0)
            acc = tl.zeros((KEYS, DIMS), tl.float32)
            acc = product(tl.trans(probs), ct, acc, WIDE)
            acc = product(tl.trans(d_scores), q, acc, WIDE)
            tl.store(at_row + i, acc, mask=(d < K - i)[None, :])


@triton.jit
def latent_key_sums(
    rows_ptr,
    order_ptr,
    starts_ptr,
    d_kv_ptr,
    keys,
    R: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Adds the rows of each key to its gradient, in the order of the queries."""
    r = tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    s = tl.arange(0, SHARED)
    for key in range(tl.program_id(0), keys, tl.num_programs(0)):
        first = tl.load(starts_ptr + key)
        last = tl.load(starts_ptr + key + 1)
        # many keys have no query in a strip: later ones, and those of other documents
        if last > first:
            at = d_kv_ptr + (keys * 0 + key).to(tl.int64) * (R + P)
            acc = tl.load(at + c, mask=c < R, other=0.0)
            shared = tl.load(at + R + s, mask=s < P, other=0.0)
            for i in range(first, last, ROWS):
                there = (r < last - i)[:, None]
                slot = tl.load(order_ptr + i + r, mask=r < last - i, other=0)
                of_slot = rows_ptr + slot[:, None] * (R + P)
                row = tl.load(of_slot + c[None, :], mask=there & (c < R)[None, :], other=0.0)
                acc += tl.sum(row.to(tl.float32), 0)
                row = tl.load(of_slot + R + s[None, :], mask=there & (s < P)[None, :], other=0.0)
                shared += tl.sum(row.to(tl.float32), 0)
            tl.store(at + c, acc, mask=c < R)
            tl.store(at + R + s, shared, mask=s < P)
