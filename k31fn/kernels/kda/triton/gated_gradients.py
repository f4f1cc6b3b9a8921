# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Gradients of the projections that queries, keys, log-decays and beta are made of.

The equations and names are those of :mod:`~.gradients`; tiles are independent. What that kernel has
at its end is taken back through the norms and gates here: the gradients of normalised q and k, and
of g, are never written. With r the factor of a norm, s the length that it gives, and V_i the value
of token i::

    d(projection of q)_i = r (dq_i - q_i <q_i, dq_i> / s^2)
    <q_i, dq_i> = <o_i, dO_i>      <k_i, dk_i> = <2 y_i - V_i, dV_i>      b_i db_i = <y_i, dV_i>

So a program may have some features only: these dots, of all features, are taken over values. The
last needs no division by b, since a sigmoid's gradient is ``b (1 - b) db``.

A kernel of its own beside :mod:`~.gradients`: its sums over values go in steps, which leaves
registers for norms and gates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.kda.triton.shared import documents, opened, product, running, sums

__all__ = ["kda_gated_gradients"]


@triton.jit
def kda_gated_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    z_ptr,
    beta_ptr,
    ids_ptr,
    stop_ptr,
    rate_ptr,
    bias_ptr,
    norm_ptr,
    o_ptr,
    d_o_ptr,
    s_ptr,
    ds_ptr,
    y_ptr,
    d_v_ptr,
    d_q_ptr,
    d_k_ptr,
    d_z_ptr,
    d_beta_ptr,
    d_rate_ptr,
    d_bias_ptr,
    tokens,
    first,
    tiles,
    ahead,
    all_programs,
    bound,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PER: tl.constexpr,
    STAGES: tl.constexpr,
    LOW: tl.constexpr,
    HALF: tl.constexpr,
):
    """BLOCK features of PER tiles of one head; STEP divides V. ``d_rate`` and ``d_bias``: those of
    A_log and dt_bias from this program alone, one of ``all_programs`` of a head, ``ahead`` of which
    are before this segment. ``norm``: the factors of the norms, from :mod:`~.prepare`.
    """
    programs = tl.cdiv(tiles, PER)
    block = tl.program_id(0) % (K // BLOCK)
    program = tl.program_id(0) // (K // BLOCK)
    start = program % programs * PER
    line = program // programs
    row = line // H
    h = line % H
    stop = tl.load(stop_ptr + row)
    ids = ids_ptr + row.to(tl.int64) * tokens
    i = tl.arange(0, C)
    I = i[:, None]
    J = i[None, :]
    c = block * BLOCK + tl.arange(0, BLOCK)
    none = tl.zeros([C, BLOCK], tl.float32)
    square = tl.zeros([C, C], tl.float32)
    rate = tl.exp(tl.load(rate_ptr + line).to(tl.float32))
    bias = tl.load(bias_ptr + line * K + c).to(tl.float32)
    of_rate = tl.zeros([BLOCK], tl.float32)
    of_bias = tl.zeros([BLOCK], tl.float32)
    for n in tl.range(start, tl.minimum(start + PER, tiles), num_stages=STAGES):
        t0 = (first + n) * C
        token = (row.to(tl.int64) * tokens + t0) * H + h
        tile = line.to(tl.int64) * tiles + n
        valid = t0 + i < stop
        here = valid[:, None]
        at = token * K + (I * (H * K) + c[None, :])
        z = tl.load(z_ptr + at, mask=here, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + at, mask=here, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + at, mask=here, other=0.0).to(tl.float32)
        b = tl.load(beta_ptr + token + i * H, mask=valid, other=0.0).to(tl.float32)[:, None]
        doc = tl.load(ids + t0 + i, mask=valid, other=0)
        came, goes = documents(ids, t0, stop, C)

        m = square
        low = square
        q_dots = square
        k_dots = square
        d_qd = none
        d_kd = none
        column = none  # of the state that leaves the tile
        overlap = tl.zeros([16, BLOCK], tl.float32)
        for x in tl.range(0, V, STEP, num_stages=STAGES):
            cv = x + tl.arange(0, STEP)
            of_v = token * V + (I * (H * V) + cv[None, :])
            of_s = tile * (K * V) + (cv[:, None] * K + c[None, :])
            d_o = tl.load(d_o_ptr + of_v, mask=here, other=0.0).to(LOW)
            nu = tl.load(d_v_ptr + of_v, mask=here, other=0.0).to(LOW)
            y = tl.load(y_ptr + tile * (C * V) + (I * V + cv[None, :]))
            s = tl.load(s_ptr + of_s)
            ds = tl.load(ds_ptr + of_s)
            # sums of rows and of columns by products too: else the operands would lie in shared
            # memory as neither these sums nor the products can read them fast
            both = (s.to(tl.float32) * ds.to(tl.float32)).to(LOW)
            overlap = product(tl.full([16, STEP], 0.0625, LOW), both, overlap)
            o = tl.load(o_ptr + of_v, mask=here, other=0.0).to(LOW)
            v = tl.load(v_ptr + of_v, mask=here, other=0.0).to(LOW)
            q_dots = product(d_o, tl.trans(o), q_dots)
            k_dots = product(nu, tl.trans(v), k_dots)
            m = product(d_o, tl.trans(y), m)
            low = product(nu, tl.trans(y), low)
            # the wide ones last: the compiler cuts all products as the last
            d_qd = product(d_o, s, d_qd)
            d_kd = product(nu, s, d_kd)
            column = product(y, ds, column)

        see = (doc[:, None] == doc[None, :]) & here & (I > J)
        diagonal = tl.sum(tl.where(I == J, m, 0.0), 1)[:, None]
        q_norm = tl.load(norm_ptr + tile * (2 * C) + I)
        k_norm = tl.load(norm_ptr + tile * (2 * C) + C + I)
        along_q = tl.sum(tl.where(I == J, q_dots, 0.0), 1)[:, None] / (scale * scale)
        along_k = tl.sum(tl.where(I == J, 2.0 * low - k_dots, 0.0), 1)[:, None]
        of_update = tl.sum(tl.where(I == J, low, 0.0), 1)[:, None]
        m = tl.where(see, m, 0.0).to(LOW)
        low = tl.where(see, -low, 0.0).to(LOW)
        enters = ((doc == came) & valid)[:, None]
        d_qd = tl.where(enters, d_qd, 0.0)
        d_kd = tl.where(enters, -d_kd, 0.0)
        # minus: the scan keeps minus the gradient of the state
        column = tl.where(((doc == goes) & valid)[:, None], -column, 0.0)

        q *= q_norm
        k *= k_norm
        b, closed = opened(b)
        b = tl.where(here, b, 0.0)
        gate, shut = opened(rate * (z + bias[None, :]))
        g = tl.where(here, gate * (bound * 1.4426950408889634), 0.0)
        slope = tl.where(here, gate * shut * (bound * rate), 0.0)
        G, behind, total = running(g, C, HALF)
        up = tl.exp2(G)
        down = tl.exp2(-G)
        column *= tl.exp2(behind)
        whole = tl.where(goes == came, -tl.sum(overlap, 0) * tl.exp2(total), 0.0)
        d_g = sums(I > J, column * b * k, none + whole[None, :], LOW)
        right = (k * b * down).to(LOW)
        d_q = tl.dot(m, right, input_precision="ieee") * up + d_qd * up
        d_k = tl.dot(low, right, input_precision="ieee") * up + d_kd * up
        part = tl.dot(tl.trans(m), (q * up).to(LOW), input_precision="ieee")
        part = product(tl.trans(low), (k * up).to(LOW), part) * down
        d_g = sums(I <= J, d_q * q + (d_k - part * b) * k, d_g, LOW)
        column += part + diagonal * q
        d_q += diagonal * b * k
        d_k += column * b
        d_q = q_norm * (d_q - q * along_q)
        d_k = k_norm * (d_k - k * along_k)
        d_z = d_g * slope
        of_bias += tl.sum(d_z, 0)
        of_rate += tl.sum(d_z * (z + bias[None, :]), 0)
        d_b = tl.sum(tl.where(here, of_update * closed, 0.0), 1)
        written = (t0 + i < tokens)[:, None]
        tl.store(d_q_ptr + at, d_q.to(d_q_ptr.dtype.element_ty), mask=written)
        tl.store(d_k_ptr + at, d_k.to(d_k_ptr.dtype.element_ty), mask=written)
        tl.store(d_z_ptr + at, d_z.to(d_z_ptr.dtype.element_ty), mask=written)
        tl.store(
            d_beta_ptr + token + i * H,
            d_b.to(d_beta_ptr.dtype.element_ty),
            mask=t0 + i < tl.where(block == 0, tokens, 0),  # the first block's
        )
    part = line * all_programs + ahead + program % programs
    tl.store(d_bias_ptr + part.to(tl.int64) * K + c, of_bias)
    tl.store(d_rate_ptr + part * (K // BLOCK) + block, tl.sum(of_rate, 0))
