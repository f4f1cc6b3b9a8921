# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Gradients of q, k, g and beta of a tile, from the state that comes into it, the gradient of the
one that leaves it, Y and dV; tiles are independent.

With M = E * dO Y^T, H = strict(E) * dV Y^T, the decays E, F and G of :mod:`~.prepare`, b = beta::

    row i     dq_i = G_i dO_i S^T + sum_j M_ij b_j k_j
              dk_i = -G_i dV_i S^T - sum_j H_ij b_j k_j
    column j  dk_j = b_j c_j      db_j = <c_j, k_j>
              c_j = F_j Y_j dS^T + sum_i (M_ij q_i - H_ij k_i)

So neither the inverse nor P is needed, and nothing is divided by b. Each term of dg is added to
exactly those tokens whose decay its exponent contains, so no two large terms cancel: that of a pair
(i, j) to the tokens behind j and up to i.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.gdn.triton.shared import decays
from k31fn.kernels.kda.triton.shared import product, program_of, readers, row_of, sums

__all__ = ["gdn_gradients"]


@triton.jit
def gdn_gradients(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    ids_ptr,
    stop_ptr,
    d_o_ptr,
    s_ptr,
    ds_ptr,
    y_ptr,
    d_v_ptr,
    d_q_ptr,
    d_k_ptr,
    d_beta_ptr,
    d_g_ptr,
    tokens,
    first,
    tiles,
    rows,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PER: tl.constexpr,
    STAGES: tl.constexpr,
    LOW: tl.constexpr,
    HALF: tl.constexpr,
):
    """BLOCK features of PER tiles of one head. The gradients of beta and of g are from these
    features alone.
    """
    block, line, start = program_of(tiles, K // BLOCK, PER)
    row, h, ids, stop = row_of(line, ids_ptr, stop_ptr, tokens, H)
    i = tl.arange(0, C)
    I = i[:, None]
    J = i[None, :]
    c = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.arange(0, V)
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
        k = tl.load(k_ptr + at, mask=here, other=0.0).to(LOW)
        q = tl.load(q_ptr + at, mask=here, other=0.0).to(LOW)
        g = tl.load(g_ptr + token + i * H, mask=valid, other=0.0).to(tl.float32)
        b = tl.load(beta_ptr + token + i * H, mask=valid, other=0.0).to(tl.float32)
        same = (doc[:, None] == doc[None, :]) & here & valid[None, :]
        between, to_token, to_end, all_of = decays(g, same, C, HALF)
        to_token = tl.where(enters, to_token, 0.0)[:, None]
        to_end = tl.where(leaves, to_end, 0.0)[:, None]

        m = tl.dot(d_o, tl.trans(y), input_precision="ieee") * between
        low = tl.dot(nu, tl.trans(y), input_precision="ieee")
        low = tl.where(I > J, low * -between, 0.0)
        # what a pair's decay is multiplied with, summed over the i from t on: [t, j]
        pair = tl.where(I > J, m, 0.0) * tl.dot(q, tl.trans(k), input_precision="ieee")
        pair += low * tl.dot(k, tl.trans(k), input_precision="ieee")
        pair = sums(I <= J, pair * b[None, :], tl.zeros([C, C], tl.float32), LOW)
        m = m.to(LOW)
        low = low.to(LOW)
        d_q = tl.dot(d_o, s, input_precision="ieee") * to_token
        d_k = tl.dot(nu, s, input_precision="ieee") * -to_token
        # minus: the scan keeps minus the gradient of the state
        column = tl.dot(y, ds, input_precision="ieee") * -to_end
        wide_k = k.to(tl.float32)
        read = tl.sum(d_q * q.to(tl.float32) + d_k * wide_k, 1)
        written = tl.sum(column * wide_k, 1) * b
        whole = -tl.sum(s.to(tl.float32) * ds.to(tl.float32)) * tl.where(goes_on, all_of, 0.0)
        d_g = tl.sum(tl.where(I > J, pair, 0.0), 1) + whole
        d_g += tl.sum(tl.where(same & (I <= J), read[None, :], 0.0), 1)
        d_g += tl.sum(tl.where(same & (I > J), written[None, :], 0.0), 1)
        right = (wide_k * b[:, None]).to(LOW)
        d_q = product(m, right, d_q)
        d_k = product(low, right, d_k)
        column = product(tl.trans(m), q, column)
        column = product(tl.trans(low), k, column)
        d_k += column * b[:, None]
        there = t0 + i < tokens
        tl.store(d_q_ptr + at, d_q.to(d_q_ptr.dtype.element_ty), mask=there[:, None])
        tl.store(d_k_ptr + at, d_k.to(d_k_ptr.dtype.element_ty), mask=there[:, None])
        of_part = block.to(tl.int64) * rows * tokens * H + token + i * H
        tl.store(d_beta_ptr + of_part, tl.sum(column * wide_k, 1), mask=there)
        tl.store(d_g_ptr + of_part, tl.where(valid, d_g, 0.0), mask=there)
