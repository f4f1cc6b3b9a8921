# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""Softmax attention over tiles of keys that some query of a tile sees; keeps the log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.attention.triton.arithmetic import chosen, interval, product, rows_of

__all__ = ["attention_forward"]


@triton.jit
def attention_forward(
    q_ptr,
    k_ptr,
    shared_ptr,
    v_ptr,
    seen_ptr,
    tiles_ptr,
    counts_ptr,
    out_ptr,
    lse_ptr,
    queries,
    keys,
    seen_rows,
    width,
    most,
    pieces,
    scale,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    N_PADDED: tl.constexpr,
    P_PADDED: tl.constexpr,
    V_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SETS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One tile of queries of one head; ``most`` key tiles are listed for it, ``counts`` are seen.

    ``scale`` has the factor log2(e), so that the exponentials are powers of 2. The ``lse`` of a
    head's queries lie together.
    """
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    d = tl.arange(0, V_PADDED)
    tiles = tl.cdiv(queries, ROWS)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        # neighbours share a head, whose keys stay in the cache; its longest rows are begun first
        line = piece // tiles
        tile = tiles - 1 - piece % tiles
        b = (line // H).to(tl.int64)
        h = line % H
        t = tile * ROWS
        first = (b * queries + t) * H + h
        q = rows_of(q_ptr + first * (N + P), r, queries - t, H * (N + P), N, N_PADDED)
        if P > 0:
            qs = rows_of(q_ptr + first * (N + P) + N, r, queries - t, H * (N + P), P, P_PADDED)
        largest = tl.full((ROWS,), -1e20, tl.float32)  # above a masked score, whose power is 0
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, V_PADDED), tl.float32)
        if SETS:
            words = seen_ptr + b * width * seen_rows + t
        else:
            begin, end = interval(seen_ptr + b * 2 * seen_rows + t, seen_rows, r)
        listed = b * tl.cdiv(seen_rows, ROWS) + tile
        for i in range(tl.load(counts_ptr + listed)):
            key = tl.load(tiles_ptr + listed * most + i) * COLUMNS
            row = b * keys + key
            k = rows_of(k_ptr + (row * H + h) * N, c, keys - key, H * N, N, N_PADDED)
            scores = tl.zeros((ROWS, COLUMNS), tl.float32)
            scores = product(q, tl.trans(k), scores, WIDE)
            if P > 0:
                ks = rows_of(shared_ptr + row * P, c, keys - key, P, P, P_PADDED)
                scores = product(qs, tl.trans(ks), scores, WIDE)
            if SETS:
                seen = chosen(words + key // 32 * seen_rows, seen_rows, ROWS, COLUMNS)
            else:
                seen = (c[None, :] >= begin - key) & (c[None, :] < end - key)
            scores = tl.where(seen, scores, -1e30)
            new = tl.maximum(largest, tl.max(scores, 1) * scale)
            probs = tl.exp2(scores * scale - new[:, None])
            shrink = tl.exp2(largest - new)
            total = total * shrink + tl.sum(probs, 1)
            v = rows_of(v_ptr + (row * H + h) * V, c, keys - key, H * V, V, V_PADDED)
            acc = product(probs.to(v_ptr.dtype.element_ty), v, acc * shrink[:, None], WIDE)
            largest = new
        some = total > 0
        total = tl.where(some, total, 1.0)
        here = (r < queries - t)[:, None] & (d < V)[None, :]
        at = out_ptr + first * V + r[:, None] * (H * V) + d[None, :]
        tl.store(at, acc / total[:, None], mask=here)
        lse = (largest + tl.log2(total)) * 0.6931471805599453
        of_head = (b * H + h) * queries + t + r
        tl.store(lse_ptr + of_head, tl.where(some, lse, 1e30), mask=r < queries - t)
