# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""The factors of every tile of C tokens, which need no state. With b = beta::

    L, P = <k_i e^(G_i), k_j e^(-G_j)>, <q_i e^(G_i), k_j e^(-G_j)>         lower, within a document
    T    = (I + strict(L) diag(b))^-1
    W, U = T R (K e^G), T V        -R Q e^G       P diag(b)       b K e^(G_end - G)       e^(G_end)

R keeps the rows of the document that the incoming state belongs to. Nothing is divided by b, so
b = 0 is fine.

PARTS 2, in bfloat16: T, P diag(b) and b K e^(G_end - G) are two numbers each, of a line first those
of all tiles, then what their rounding left. With keys that are alike the results are small
differences of what these three make, and would have a third of the digits of the operands.

GATED: ``q k g beta`` are projections, and norms, gates and beta are made here. ``norm``: the
factors of queries and of keys, which the gradients by blocks of features cannot make.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.kda.triton.shared import (
    inverse,
    log2_decay,
    opened,
    product,
    program_of,
    rate_of,
    readers,
    row_of,
    running,
    store_parts,
)

__all__ = ["kda_prepare"]


@triton.jit
def _factor(x, last, eps, scale, TWO: tl.constexpr):
    """``scale / sqrt(sum x^2 + eps)`` of rows in one block or two."""
    i = tl.arange(0, x.shape[0])
    # as diagonals of products: sums of rows would need the rows in another layout
    square = tl.dot(x, tl.trans(x), input_precision="ieee")
    if TWO:
        square = product(last, tl.trans(last), square)
    square = tl.sum(tl.where(i[:, None] == i[None, :], square, 0.0), 1)
    return (scale / tl.sqrt(square + eps))[:, None]


@triton.jit
def kda_prepare(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    ids_ptr,
    stop_ptr,
    rate_ptr,
    bias_ptr,
    wq_ptr,
    kf_ptr,
    u_ptr,
    p_ptr,
    inverse_ptr,
    d_ptr,
    norm_ptr,
    tokens,
    first,
    tiles,
    bound,
    eps,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    VBLOCK: tl.constexpr,
    PER: tl.constexpr,
    STAGES: tl.constexpr,
    LEAST: tl.constexpr,
    LOW: tl.constexpr,
    HALF: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
):
    """PER tiles of one head; BLOCK is K or half of it, VBLOCK divides V. ``first``: the tile that
    the segment begins with. ``rate`` is A_log.
    """
    _, line, start = program_of(tiles, 1, PER)
    row, h, ids, stop = row_of(line, ids_ptr, stop_ptr, tokens, H)
    i = tl.arange(0, C)
    I = i[:, None]
    J = i[None, :]
    c = tl.arange(0, BLOCK)
    cv = tl.arange(0, VBLOCK)
    none = tl.zeros([C, BLOCK], LOW)
    if GATED:
        rate = rate_of(tl.load(rate_ptr + line))[0]
        bias = tl.load(bias_ptr + line * K + c).to(tl.float32)
        bias_last = tl.load(bias_ptr + line * K + K - BLOCK + c).to(tl.float32)
        bound *= 1.4426950408889634
    for n in tl.range(start, tl.minimum(start + PER, tiles), num_stages=STAGES):
        t0 = (first + n) * C
        valid, doc, enters, leaves, goes_on = readers(ids, t0, stop, C)
        here = valid[:, None]
        token = (row.to(tl.int64) * tokens + t0) * H + h
        tile = line.to(tl.int64) * tiles + n
        of_parts = line.to(tl.int64) * (PARTS * tiles) + n
        see = (I >= J) & (doc[:, None] == doc[None, :]) & here
        b = tl.load(beta_ptr + token + i * H, mask=valid, other=0.0).to(tl.float32)
        if GATED:
            b = tl.where(valid, opened(b)[0], 0.0)
            at = token * K + (I * (H * K) + c[None, :])
            q = tl.load(q_ptr + at, mask=here, other=0.0).to(LOW)
            k = tl.load(k_ptr + at, mask=here, other=0.0).to(LOW)
            q_last = tl.load(q_ptr + at + (K - BLOCK), mask=here, other=0.0).to(LOW)
            k_last = tl.load(k_ptr + at + (K - BLOCK), mask=here, other=0.0).to(LOW)
            q_norm = _factor(q, q_last, eps, scale, BLOCK < K)
            k_norm = _factor(k, k_last, eps, 1.0, BLOCK < K)
            tl.store(norm_ptr + tile * (2 * C) + I, q_norm)
            tl.store(norm_ptr + tile * (2 * C) + C + I, k_norm)
        low = tl.zeros([C, C], tl.float32)
        p = tl.zeros([C, C], tl.float32)
        # of the two blocks; the compiler for Ascend has no tuples that grow
        decayed = none
        decayed_last = none
        for x in tl.static_range(0, K, BLOCK):
            at = token * K + x + (I * (H * K) + c[None, :])
            g = tl.load(g_ptr + at, mask=here, other=0.0).to(tl.float32)
            if GATED:
                if x > 0:
                    q = q_last
                    k = k_last
                    g += bias_last[None, :]
                else:
                    g += bias[None, :]
                q = q.to(tl.float32) * q_norm
                k = k.to(tl.float32) * k_norm
                g = tl.where(here, opened(rate * g)[0] * bound, 0.0)
            else:
                k = tl.load(k_ptr + at, mask=here, other=0.0).to(tl.float32)
                q = tl.load(q_ptr + at, mask=here, other=0.0).to(tl.float32)
                g = log2_decay(g, LEAST)
            G, behind, total = running(g, C, HALF)
            tl.store(d_ptr + tile * K + x + c, tl.where(goes_on, tl.exp2(total), 0.0))
            e = tl.exp2(G)
            grown = (k * tl.exp2(-G)).to(LOW)
            kd = (k * e).to(LOW)
            # negated: the scan subtracts it, since a product that is added to a slice of another
            # becomes its accumulator, and ptxas then waits after each
            qd = (q * -e).to(LOW)
            low = product(kd, tl.trans(grown), low)
            p = product(qd, tl.trans(grown), p)
            kf = tl.where(leaves[:, None], k * tl.exp2(behind) * b[:, None], 0.0)
            if x == 0:
                decayed = kd
            else:
                decayed_last = kd
            to = tile * (C * K) + x + (I * K + c[None, :])
            query = wq_ptr + tile * (C * K) + C * K + to
            # other documents' rows are zeroed by a second store: cheaper than selecting 16-bit
            # numbers, and a branch would move the loads behind it
            tl.store(query, qd, mask=enters[:, None])
            tl.store(query, none, mask=~enters[:, None])
            to = kf_ptr + of_parts * (C * K) + x + (I * K + c[None, :])
            store_parts(to, kf, tiles * (C * K), PARTS, LOW)
        bj = tl.load(beta_ptr + token + i * H, mask=valid, other=0.0).to(tl.float32)[None, :]
        if GATED:
            bj = tl.where(valid[None, :], opened(bj)[0], 0.0)
        square = of_parts * (C * C) + (I * C + J)
        store_parts(p_ptr + square, tl.where(see, -p * bj, 0.0), tiles * (C * C), PARTS, LOW)
        N = tl.where(see & (I > J), low * bj, 0.0)
        T = inverse(N, 3, HALF)
        Tr = tl.where(enters[None, :], T, 0.0).to(LOW)
        T = store_parts(inverse_ptr + square, T, tiles * (C * C), PARTS, LOW)
        for x in tl.static_range(0, K, BLOCK):
            if x == 0:
                w = tl.dot(Tr, decayed, input_precision="ieee")
            else:
                w = tl.dot(Tr, decayed_last, input_precision="ieee")
            to = tile * (C * K) + x + (I * K + c[None, :])
            tl.store(wq_ptr + tile * (C * K) + to, w.to(LOW))
        for x in tl.static_range(0, V, VBLOCK):
            at = token * V + x + (I * (H * V) + cv[None, :])
            v = tl.load(v_ptr + at, mask=here, other=0.0).to(LOW)
            u = tl.dot(T, v, input_precision="ieee")
            tl.store(u_ptr + tile * (C * V) + (x + cv[None, :]) * C + I, u.to(LOW))
