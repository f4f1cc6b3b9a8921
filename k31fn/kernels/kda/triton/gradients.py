# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""Gradients of q, k, g and beta of a tile, from the state that comes into it, the gradient of the
one that leaves it, Y and dV; tiles are independent.

With M = lower(dO Y^T) and H = strict(dV Y^T), within documents, G from the tile's first token, F =
G_end - G, and b = beta::

    row i     d(q_i e^(G_i)) = dO_i S^T + sum_j M_ij b_j k_j e^(-G_j)
              d(k_i e^(G_i)) = -dV_i S^T - sum_j H_ij b_j k_j e^(-G_j)
    column j  dk_j = b_j c_j      db_j = <c_j, k_j>
              c_j = e^(F_j) Y_j dS^T + e^(-G_j) sum_i (M_ij q_i - H_ij k_i) e^(G_i)

So neither L nor P is made again, and nothing is divided by b. The diagonal of M stands apart:
<q, k> is free of G. Each term of dg is added to exactly those tokens whose decay its exponent
contains, so no two large terms cancel: that of a pair (i, j) to the tokens up to i, and taken back
from those up to j. Both times it is the product of the same rounded factors, or what is left over
would add up in the gradients of a gate's parameters.

GATED: ``q k g beta`` are projections, as in :mod:`~.prepare`, which left the factors of the norms
in ``norm``; the gradients are those of what is made of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.kda.triton.shared import (
    log2_decay,
    opened,
    product,
    program_of,
    rate_of,
    readers,
    row_of,
    running,
    sums,
)

__all__ = ["kda_gradients"]


@triton.jit
def kda_gradients(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    ids_ptr,
    stop_ptr,
    rate_ptr,
    bias_ptr,
    norm_ptr,
    d_o_ptr,
    s_ptr,
    ds_ptr,
    y_ptr,
    d_v_ptr,
    d_q_ptr,
    d_k_ptr,
    d_g_ptr,
    part_ptr,
    tokens,
    first,
    tiles,
    rows,
    bound,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PER: tl.constexpr,
    STAGES: tl.constexpr,
    LEAST: tl.constexpr,
    LOW: tl.constexpr,
    HALF: tl.constexpr,
    GATED: tl.constexpr,
):
    """BLOCK features of PER tiles of one head. ``part``: of the gradient of beta, from these
    features alone.
    """
    block, line, start = program_of(tiles, K // BLOCK, PER)
    row, h, ids, stop = row_of(line, ids_ptr, stop_ptr, tokens, H)
    i = tl.arange(0, C)
    I = i[:, None]
    J = i[None, :]
    c = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.arange(0, V)
    none = tl.zeros([C, BLOCK], tl.float32)
    if GATED:
        rate = rate_of(tl.load(rate_ptr + line))[0]
        bias = tl.load(bias_ptr + line * K + c).to(tl.float32)
        bound *= 1.4426950408889634
    for n in tl.range(start, tl.minimum(start + PER, tiles), num_stages=STAGES):
        t0 = (first + n) * C
        token = (row.to(tl.int64) * tokens + t0) * H + h
        tile = line.to(tl.int64) * tiles + n
        valid, doc, enters, leaves, goes_on = readers(ids, t0, stop, C)
        here = valid[:, None]
        at = token * V + (I * (H * V) + x[None, :])
        d_o = tl.load(d_o_ptr + at, mask=here, other=0.0).to(LOW)
        nu = tl.load(d_v_ptr + at, mask=here, other=0.0).to(LOW)
        y = tl.load(y_ptr + tile * (C * V) + (I * V + x[None, :]))
        of_s = tile * (K * V) + (x[:, None] * K + c[None, :])
        s = tl.load(s_ptr + of_s)
        ds = tl.load(ds_ptr + of_s)
        at = token * K + (I * (H * K) + c[None, :])
        raw = tl.load(g_ptr + at, mask=here, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + at, mask=here, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + at, mask=here, other=0.0).to(tl.float32)
        b = tl.load(beta_ptr + token + i * H, mask=valid, other=0.0).to(tl.float32)[:, None]

        if GATED:
            of_norm = norm_ptr + tile * (2 * C) + I
            q *= tl.load(of_norm)
            k *= tl.load(of_norm + C)
            b = tl.where(here, opened(b)[0], 0.0)
        see = (doc[:, None] == doc[None, :]) & here
        m = tl.dot(d_o, tl.trans(y), input_precision="ieee")
        low = tl.dot(nu, tl.trans(y), input_precision="ieee")
        diagonal = tl.sum(tl.where(I == J, m, 0.0), 1)[:, None]
        m = tl.where(see & (I > J), m, 0.0).to(LOW)
        low = tl.where(see & (I > J), -low, 0.0).to(LOW)
        d_qd = tl.where(enters[:, None], tl.dot(d_o, s, input_precision="ieee"), 0.0)
        d_kd = tl.where(enters[:, None], -tl.dot(nu, s, input_precision="ieee"), 0.0)
        # minus: the scan keeps minus the gradient of the state
        column = tl.where(leaves[:, None], -tl.dot(y, ds, input_precision="ieee"), 0.0)
        overlap = -tl.sum(s.to(tl.float32) * ds.to(tl.float32), 0)

        if GATED:
            g = tl.where(here, opened(rate * (raw + bias[None, :]))[0] * bound, 0.0)
        else:
            g = log2_decay(raw, LEAST)
        G, behind, total = running(g, C, HALF)
        up = tl.exp2(G)
        down = tl.exp2(-G)
        column *= tl.exp2(behind)
        whole = tl.where(goes_on, overlap * tl.exp2(total), 0.0)
        # a sum of terms that nothing is taken from: rounded once
        d_g = product((I > J).to(LOW), (column * b * k).to(LOW), none + whole[None, :])
        right = (k * b * down).to(LOW)
        up_q = (q * up).to(LOW)
        up_k = (k * up).to(LOW)
        d_q = product(m, right, d_qd)
        d_k = product(low, right, d_kd)
        part = tl.dot(tl.trans(m), up_q, input_precision="ieee")
        part = product(tl.trans(low), up_k, part)
        pairs = d_q * up_q.to(tl.float32) + d_k * up_k.to(tl.float32)
        d_g = sums(I <= J, pairs - part * right.to(tl.float32), d_g, LOW)
        d_q *= up
        d_k *= up
        column += part * down + diagonal * q
        d_q += diagonal * b * k
        d_k += column * b
        if GATED:
            d_g = tl.where(here, d_g, 0.0)
        else:
            d_g = tl.where(here & (raw >= LEAST), d_g, 0.0)
        written = t0 + i < tokens
        tl.store(d_q_ptr + at, d_q.to(d_q_ptr.dtype.element_ty), mask=written[:, None])
        tl.store(d_k_ptr + at, d_k.to(d_k_ptr.dtype.element_ty), mask=written[:, None])
        tl.store(d_g_ptr + at, d_g.to(d_g_ptr.dtype.element_ty), mask=written[:, None])
        of_part = (block.to(tl.int64) * rows * tokens * H) + token + i * H
        tl.store(part_ptr + of_part, tl.sum(column * k, 1), mask=written)
