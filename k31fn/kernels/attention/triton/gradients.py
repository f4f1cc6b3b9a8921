# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""Gradients of attention, from the log-sum-exp: once by tiles of queries, once by tiles of keys.

Each adds up its own rows in a fixed order, so nothing is added by two programs. Scores are made
again in both: 1.4 times the products of one pass that would need sums across programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.attention.triton.arithmetic import chosen, interval, product, rows_of

__all__ = ["attention_backward_keys", "attention_backward_queries"]

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_backward_queries(
    q_ptr,
    k_ptr,
    shared_ptr,
    v_ptr,
    seen_ptr,
    tiles_ptr,
    counts_ptr,
    out_ptr,
    lse_ptr,
    ct_ptr,
    low_ptr,
    delta_ptr,
    d_q_ptr,
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
    """Gradients of one tile of queries of one head; for the keys' ``delta = <ct, out>``, and ``ct``
    as products take it.
    """
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    tiles = tl.cdiv(queries, ROWS)
    low = v_ptr.dtype.element_ty
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        line = piece // tiles
        tile = tiles - 1 - piece % tiles
        b = (line // H).to(tl.int64)
        h = line % H
        t = tile * ROWS
        first = (b * queries + t) * H + h
        there = queries - t
        ct = rows_of(ct_ptr + first * V, r, there, H * V, V, V_PADDED)
        out = rows_of(out_ptr + first * V, r, there, H * V, V, V_PADDED)
        delta = tl.sum(ct * out, 1)
        of_head = (b * H + h) * queries + t + r
        tl.store(delta_ptr + of_head, delta, mask=r < there)
        ct_low = ct.to(low)
        d = tl.arange(0, V_PADDED)
        here = (r < there)[:, None] & (d < V)[None, :]
        at = low_ptr + first * V + r[:, None] * (H * V) + d[None, :]
        tl.store(at, ct_low, mask=here)
        lse = tl.load(lse_ptr + of_head, mask=r < there, other=1e30) * _LOG2E
        q = rows_of(q_ptr + first * (N + P), r, there, H * (N + P), N, N_PADDED)
        d_q = tl.zeros((ROWS, N_PADDED), tl.float32)
        if P > 0:
            qs = rows_of(q_ptr + first * (N + P) + N, r, there, H * (N + P), P, P_PADDED)
            d_qs = tl.zeros((ROWS, P_PADDED), tl.float32)
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
            probs = tl.where(seen, tl.exp2(scores * (scale * _LOG2E) - lse[:, None]), 0.0)
            v = rows_of(v_ptr + (row * H + h) * V, c, keys - key, H * V, V, V_PADDED)
            d_probs = tl.zeros((ROWS, COLUMNS), tl.float32)
            d_probs = product(ct_low, tl.trans(v), d_probs, WIDE)
            d_scores = (probs * (d_probs - delta[:, None])).to(low)
            d_q = product(d_scores, k, d_q, WIDE)
            if P > 0:
                d_qs = product(d_scores, ks, d_qs, WIDE)
        d = tl.arange(0, N_PADDED)
        here = (r < there)[:, None] & (d < N)[None, :]
        at = d_q_ptr + first * (N + P) + r[:, None] * (H * (N + P))
        tl.store(at + d[None, :], (d_q * scale).to(d_q_ptr.dtype.element_ty), mask=here)
        if P > 0:
            d = tl.arange(0, P_PADDED)
            here = (r < there)[:, None] & (d < P)[None, :]
            tl.store(at + N + d[None, :], (d_qs * scale).to(d_q_ptr.dtype.element_ty), mask=here)


@triton.jit
def attention_backward_keys(
    q_ptr,
    k_ptr,
    shared_ptr,
    v_ptr,
    seen_ptr,
    tiles_ptr,
    counts_ptr,
    lse_ptr,
    delta_ptr,
    ct_ptr,
    d_k_ptr,
    d_shared_ptr,
    d_v_ptr,
    queries,
    keys,
    seen_rows,
    width,
    most,
    listed_keys,
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
    """Gradients of one tile of keys of one head; those of the shared dims are the head's part.

    Keys are the rows of every product here, so that none of them is transposed.
    """
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    tiles = tl.cdiv(keys, COLUMNS)
    low = v_ptr.dtype.element_ty
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        # the first keys are seen by most queries
        line = piece // tiles
        tile = piece % tiles
        b = (line // H).to(tl.int64)
        h = line % H
        key = tile * COLUMNS
        row = b * keys + key
        there = keys - key
        k = rows_of(k_ptr + (row * H + h) * N, c, there, H * N, N, N_PADDED)
        v = rows_of(v_ptr + (row * H + h) * V, c, there, H * V, V, V_PADDED)
        d_k = tl.zeros((COLUMNS, N_PADDED), tl.float32)
        d_v = tl.zeros((COLUMNS, V_PADDED), tl.float32)
        if P > 0:
            ks = rows_of(shared_ptr + row * P, c, there, P, P, P_PADDED)
            d_ks = tl.zeros((COLUMNS, P_PADDED), tl.float32)
        listed = b * listed_keys + tile
        for i in range(tl.load(counts_ptr + listed)):
            t = tl.load(tiles_ptr + listed * most + i) * ROWS
            first = (b * queries + t) * H + h
            q = rows_of(q_ptr + first * (N + P), r, queries - t, H * (N + P), N, N_PADDED)
            scores = tl.zeros((COLUMNS, ROWS), tl.float32)
            scores = product(k, tl.trans(q), scores, WIDE)
            if P > 0:
                of_shared = q_ptr + first * (N + P) + N
                qs = rows_of(of_shared, r, queries - t, H * (N + P), P, P_PADDED)
                scores = product(ks, tl.trans(qs), scores, WIDE)
            of_head = (b * H + h) * queries + t + r
            lse = tl.load(lse_ptr + of_head, mask=r < queries - t, other=1e30) * _LOG2E
            delta = tl.load(delta_ptr + of_head, mask=r < queries - t, other=0.0)
            if SETS:
                words = seen_ptr + (b * (seen_rows // 32) + t // 32) * (width * 32) + key
                seen = chosen(words, width * 32, COLUMNS, ROWS)
            else:
                bounds = seen_ptr + b * 2 * seen_rows + t + r
                begin = tl.load(bounds)[None, :] - key
                end = tl.load(bounds + seen_rows)[None, :] - key
                seen = (c[:, None] >= begin) & (c[:, None] < end)
            probs = tl.where(seen, tl.exp2(scores * (scale * _LOG2E) - lse[None, :]), 0.0)
            ct = rows_of(ct_ptr + first * V, r, queries - t, H * V, V, V_PADDED)
            d_v = product(probs.to(low), ct, d_v, WIDE)
            d_probs = tl.zeros((COLUMNS, ROWS), tl.float32)
            d_probs = product(v, tl.trans(ct), d_probs, WIDE)
            d_scores = (probs * (d_probs - delta[None, :])).to(low)
            d_k = product(d_scores, q, d_k, WIDE)
            if P > 0:
                d_ks = product(d_scores, qs, d_ks, WIDE)
        d = tl.arange(0, N_PADDED)
        here = (c < there)[:, None] & (d < N)[None, :]
        at = d_k_ptr + (row * H + h) * N + c[:, None] * (H * N) + d[None, :]
        tl.store(at, (d_k * scale).to(d_k_ptr.dtype.element_ty), mask=here)
        d = tl.arange(0, V_PADDED)
        here = (c < there)[:, None] & (d < V)[None, :]
        at = d_v_ptr + (row * H + h) * V + c[:, None] * (H * V) + d[None, :]
        tl.store(at, d_v.to(d_v_ptr.dtype.element_ty), mask=here)
        if P > 0:
            d = tl.arange(0, P_PADDED)
            here = (c < there)[:, None] & (d < P)[None, :]
            at = d_shared_ptr + (row * H + h) * P + c[:, None] * (H * P) + d[None, :]
            tl.store(at, d_ks * scale, mask=here)
