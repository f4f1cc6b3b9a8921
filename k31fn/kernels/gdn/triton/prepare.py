# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The factors of every tile of C tokens, which need no state. With E the decays between two tokens
of a document, G and F those from the tile's first token and to its last, d that of all, b = beta::

    L, P = E * K K^T, E * Q K^T         lower        T = (I + strict(L) diag(b))^-1
    W, U = T R diag(G) K, T V        -R diag(G) Q        P diag(b)        diag(b F) K        d

R keeps the rows of the document that the incoming state belongs to. They are what KDA's scans take
(:mod:`k31fn.kernels.kda.triton.scans`), so d is stored once per channel, and in bfloat16 T, P
diag(b) and diag(b F) K are two numbers each (PARTS, see :mod:`k31fn.kernels.kda.triton.prepare`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.gdn.triton.shared import decays
from k31fn.kernels.kda.triton.shared import inverse, program_of, readers, row_of, store_parts

__all__ = ["gdn_prepare"]


@triton.jit
def gdn_prepare(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    ids_ptr,
    stop_ptr,
    wq_ptr,
    kf_ptr,
    u_ptr,
    p_ptr,
    inverse_ptr,
    d_ptr,
    tokens,
    first,
    tiles,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    VBLOCK: tl.constexpr,
    PER: tl.constexpr,
    STAGES: tl.constexpr,
    LOW: tl.constexpr,
    HALF: tl.constexpr,
    PARTS: tl.constexpr,
):
    """PER tiles of one head; VBLOCK divides V. ``first``: the tile that the segment begins with;
    C is 2^(DOUBLINGS + 1).
    """
    _, line, start = program_of(tiles, 1, PER)
    row, h, ids, stop = row_of(line, ids_ptr, stop_ptr, tokens, H)
    i = tl.arange(0, C)
    I = i[:, None]
    J = i[None, :]
    c = tl.arange(0, K)
    cv = tl.arange(0, VBLOCK)
    for n in tl.range(start, tl.minimum(start + PER, tiles), num_stages=STAGES):
        t0 = (first + n) * C
        valid, doc, enters, leaves, goes_on = readers(ids, t0, stop, C)
        here = valid[:, None]
        token = (row.to(tl.int64) * tokens + t0) * H + h
        tile = line.to(tl.int64) * tiles + n
        of_parts = line.to(tl.int64) * (PARTS * tiles) + n
        at = token * K + (I * (H * K) + c[None, :])
        k = tl.load(k_ptr + at, mask=here, other=0.0).to(LOW)
        q = tl.load(q_ptr + at, mask=here, other=0.0).to(LOW)
        g = tl.load(g_ptr + token + i * H, mask=valid, other=0.0).to(tl.float32)
        b = tl.load(beta_ptr + token + i * H, mask=valid, other=0.0).to(tl.float32)
        same = (doc[:, None] == doc[None, :]) & here & valid[None, :]
        between, to_token, to_end, all_of = decays(g, same, C, HALF)
        to_token = tl.where(enters, to_token, 0.0)
        to_end = tl.where(leaves, to_end, 0.0)
        d = tl.zeros([K], tl.float32) + tl.where(goes_on, all_of, 0.0)
        tl.store(d_ptr + tile * K + c, d)
        between *= b[None, :]
        square = of_parts * (C * C) + (I * C + J)
        p = tl.dot(q, tl.trans(k), input_precision="ieee") * between
        store_parts(p_ptr + square, p, tiles * (C * C), PARTS, LOW)
        N = tl.dot(k, tl.trans(k), input_precision="ieee")
        T = inverse(tl.where(I > J, N * between, 0.0), DOUBLINGS, HALF)
        reads = (T * to_token[None, :]).to(LOW)
        T = store_parts(inverse_ptr + square, T, tiles * (C * C), PARTS, LOW)
        to = tile * (C * K) + (I * K + c[None, :])
        wq = wq_ptr + tile * (C * K) + to
        tl.store(wq, tl.dot(reads, k, input_precision="ieee").to(LOW))
        # negated: the scan subtracts it
        tl.store(wq + C * K, (q.to(tl.float32) * -to_token[:, None]).to(LOW))
        kf = k.to(tl.float32) * (b * to_end)[:, None]
        to = kf_ptr + of_parts * (C * K) + (I * K + c[None, :])
        store_parts(to, kf, tiles * (C * K), PARTS, LOW)
        for x in tl.static_range(0, V, VBLOCK):
            at = token * V + x + (I * (H * V) + cv[None, :])
            v = tl.load(v_ptr + at, mask=here, other=0.0).to(LOW)
            u = tl.dot(T, v, input_precision="ieee")
            tl.store(u_ptr + tile * (C * V) + (x + cv[None, :]) * C + I, u.to(LOW))
