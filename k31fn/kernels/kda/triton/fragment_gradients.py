# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Gradients of a fragment: those of :mod:`~.scans` and :mod:`~.gradients` without outputs, over
the N = V + K columns of [state | transition].

No value is written to the last K columns, so that their Y and dV are those of U = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.kda.triton.shared import (
    log2_decay,
    product,
    program_of,
    readers,
    row_of,
    running,
    sums,
)

__all__ = ["kda_fragment_adjoint", "kda_fragment_gradients"]


@triton.jit
def kda_fragment_adjoint(
    wq_ptr,
    kf_ptr,
    inverse_ptr,
    d_ptr,
    d_state_ptr,
    ds_ptr,
    nu_ptr,
    d_v_ptr,
    tokens,
    first,
    tiles,
    every,
    pieces,
    line_step,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    LOW: tl.constexpr,
):
    """Minus the gradient of the columns that leave each tile, and dV of all of them, ``nu``; last
    tile of a piece first. ``d_state [K N]`` has the gradient after each piece.
    """
    piece = tl.program_id(0) // (N // BLOCK) % pieces
    line = tl.program_id(0) // (N // BLOCK) // pieces
    column = (tl.program_id(0) % (N // BLOCK)) * BLOCK
    x = column + tl.arange(0, BLOCK)
    row = line // H
    h = line % H
    r = tl.arange(0, C)
    c = tl.arange(0, K)
    d_state_ptr += line.to(tl.int64) * line_step + piece * (K * N)
    S = -tl.load(d_state_ptr + (c[None, :] * N + x[:, None]))
    base = line.to(tl.int64) * tiles
    wq_ptr += base * (2 * C * K)
    kf_ptr += base * (PARTS * C * K)
    inverse_ptr += base * (PARTS * C * C)
    d_ptr += base * K
    ds_ptr += base * (K * N)
    nu_ptr += base * (C * N)
    d_v_ptr += ((row.to(tl.int64) * tokens + first * C) * H + h) * V
    start = piece * every
    end = tl.minimum(start + every, tiles)
    for back in tl.range(0, end - start, num_stages=STAGES):
        n = end - 1 - back
        kf = tl.load(kf_ptr + (n * C + r)[:, None] * K + c[None, :])
        inverse = tl.load(inverse_ptr + (n * C + r)[:, None] * C + r[None, :])
        d = tl.load(d_ptr + n * K + c)
        w = tl.load(wq_ptr + (n * (2 * C) + r)[:, None] * K + c[None, :])
        low = S.to(LOW)
        tl.store(ds_ptr + n * (K * N) + (x[:, None] * K + c[None, :]), low)
        from_s = tl.dot(low, tl.trans(kf), input_precision="ieee")
        if PARTS == 2:
            kf = tl.load(kf_ptr + ((tiles + n) * C + r)[:, None] * K + c[None, :])
            from_s = product(low, tl.trans(kf), from_s)
        dy = (-from_s).to(LOW)
        nu = tl.dot(dy, inverse, input_precision="ieee")
        if PARTS == 2:
            to = inverse_ptr + ((tiles + n) * C + r)[:, None] * C + r[None, :]
            nu = product(dy, tl.load(to), nu)
        tl.store(nu_ptr + n * (C * N) + (r[None, :] * N + x[:, None]), nu.to(LOW))
        t = n * C + r
        if column < V:
            tl.store(
                d_v_ptr + t[None, :] * (H * V) + x[:, None],
                nu.to(d_v_ptr.dtype.element_ty),
                mask=(first * C + t < tokens)[None, :],
            )
        S = product(dy, w, S * d[None, :])


@triton.jit
def kda_fragment_gradients(
    k_ptr,
    g_ptr,
    beta_ptr,
    ids_ptr,
    stop_ptr,
    s_ptr,
    ds_ptr,
    y_ptr,
    nu_ptr,
    d_k_ptr,
    d_g_ptr,
    part_ptr,
    tokens,
    first,
    tiles,
    rows,
    H: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PER: tl.constexpr,
    STAGES: tl.constexpr,
    LEAST: tl.constexpr,
    LOW: tl.constexpr,
    HALF: tl.constexpr,
):
    """BLOCK features of PER tiles of one head; STEP divides N. ``part``: of the gradient of beta,
    from these features alone.
    """
    block, line, start = program_of(tiles, K // BLOCK, PER)
    row, h, ids, stop = row_of(line, ids_ptr, stop_ptr, tokens, H)
    i = tl.arange(0, C)
    I = i[:, None]
    J = i[None, :]
    c = block * BLOCK + tl.arange(0, BLOCK)
    none = tl.zeros([C, BLOCK], tl.float32)
    for n in tl.range(start, tl.minimum(start + PER, tiles), num_stages=STAGES):
        t0 = (first + n) * C
        token = (row.to(tl.int64) * tokens + t0) * H + h
        tile = line.to(tl.int64) * tiles + n
        valid, doc, enters, leaves, goes_on = readers(ids, t0, stop, C)
        here = valid[:, None]
        at = token * K + (I * (H * K) + c[None, :])
        raw = tl.load(g_ptr + at, mask=here, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + at, mask=here, other=0.0).to(tl.float32)
        b = tl.load(beta_ptr + token + i * H, mask=valid, other=0.0).to(tl.float32)[:, None]
        low = tl.zeros([C, C], tl.float32)
        d_kd = none
        column = none
        overlap = tl.zeros([BLOCK], tl.float32)
        for of_x in tl.static_range(0, N, STEP):
            x = of_x + tl.arange(0, STEP)
            of_y = tile * (C * N) + (I * N + x[None, :])
            nu = tl.load(nu_ptr + of_y)
            y = tl.load(y_ptr + of_y)
            of_s = tile * (K * N) + (x[:, None] * K + c[None, :])
            s = tl.load(s_ptr + of_s)
            ds = tl.load(ds_ptr + of_s)
            d_kd = product(nu, s, d_kd)
            column = product(y, ds, column)
            low = product(nu, tl.trans(y), low)
            overlap += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 0)

        see = (doc[:, None] == doc[None, :]) & here & (I > J)
        low = tl.where(see, -low, 0.0).to(LOW)
        d_kd = tl.where(enters[:, None], -d_kd, 0.0)
        # minus: the scan keeps minus the gradient of the state
        column = tl.where(leaves[:, None], -column, 0.0)
        G, behind, total = running(log2_decay(raw, LEAST), C, HALF)
        up = tl.exp2(G)
        down = tl.exp2(-G)
        column *= tl.exp2(behind)
        whole = tl.where(goes_on, -overlap * tl.exp2(total), 0.0)
        from_ends = column * b * k
        right = (k * b * down).to(LOW)
        up_k = (k * up).to(LOW)
        d_k = product(low, right, d_kd)
        part = tl.dot(tl.trans(low), up_k, input_precision="ieee")
        pairs = d_k * up_k.to(tl.float32) - part * right.to(tl.float32)
        # in this order: Ascend's compiler finds no tiles for the other
        d_g = sums(I <= J, pairs, none + whole[None, :], LOW)
        d_g = sums(I > J, from_ends, d_g, LOW)
        d_k *= up
        column += part * down
        d_k += column * b
        d_g = tl.where(here & (raw >= LEAST), d_g, 0.0)
        written = t0 + i < tokens
        tl.store(d_k_ptr + at, d_k.to(d_k_ptr.dtype.element_ty), mask=written[:, None])
        tl.store(d_g_ptr + at, d_g.to(d_g_ptr.dtype.element_ty), mask=written[:, None])
        of_part = (block.to(tl.int64) * rows * tokens * H) + token + i * H
        tl.store(part_ptr + of_part, tl.sum(column * k, 1), mask=written)
