# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The passes from tile to tile, each with the state [K V] held transposed, as [V K].

So it is the left operand and the accumulator of products with 64 rows, and never leaves the
registers. A program has a block of V; columns of V do not see each other. With the names of
:mod:`~.prepare` (W, Q~ = -R Q e^G, F = b K e^(G_end - G), P with b in it, d = e^(G_end))::

    Y  = U - W S           O = P Y - Q~ S         S <- d S + F^T Y
    dY = P^T dO + F dS     dV = T^T dY            dS <- d dS - W^T dY - Q~^T dO

Both are affine in the state. Where heads are few, a segment is cut into pieces of ``every`` tiles:
a first pass makes what each piece does to any state (FRESH), :mod:`~.relay` the states between the
pieces, and a second pass runs through all pieces side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.kda.triton.shared import product

__all__ = ["kda_adjoint", "kda_scan", "kda_states"]


@triton.jit
def kda_scan(
    wq_ptr,
    kf_ptr,
    u_ptr,
    p_ptr,
    d_ptr,
    state_ptr,
    after_ptr,
    o_ptr,
    tokens,
    first,
    tiles,
    every,
    pieces,
    line_step,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    STACKED: tl.constexpr,
    PARTS: tl.constexpr,
    LOW: tl.constexpr,
):
    """Outputs of a segment of tiles. ``state`` has the state before each piece, and gets the one
    after the last, as ``after [K V]`` does. ``line_step``: its elements from one head to the next.
    STACKED: W S and Q~ S are one product, which on CUDA saves a wait.
    """
    piece = tl.program_id(0) // (V // BLOCK) % pieces
    line = tl.program_id(0) // (V // BLOCK) // pieces
    x = (tl.program_id(0) % (V // BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    row = line // H
    h = line % H
    r = tl.arange(0, C)
    r2 = tl.arange(0, 2 * C)
    c = tl.arange(0, K)
    state_ptr += line.to(tl.int64) * line_step + piece * (K * V)
    state = c[None, :] * V + x[:, None]
    S = tl.load(state_ptr + state)
    base = line.to(tl.int64) * tiles
    wq_ptr += base * (2 * C * K)
    kf_ptr += base * (PARTS * C * K)
    u_ptr += base * (C * V)
    p_ptr += base * (PARTS * C * C)
    d_ptr += base * K
    o_ptr += (row.to(tl.int64) * tokens * H + h) * V
    start = piece * every
    for n in tl.range(start, tl.minimum(start + every, tiles), num_stages=STAGES):
        u = tl.load(u_ptr + n * (C * V) + x[:, None] * C + r[None, :])
        kf = tl.load(kf_ptr + (n * C + r)[:, None] * K + c[None, :])
        p = tl.load(p_ptr + (n * C + r)[:, None] * C + r[None, :])
        d = tl.load(d_ptr + n * K + c)
        low = S.to(LOW)
        if STACKED:
            # taking the product apart moves nothing between threads
            wq = tl.load(wq_ptr + (n * (2 * C) + r2)[:, None] * K + c[None, :])
            both = tl.dot(low, tl.trans(wq), input_precision="ieee")
            wS, qS = tl.split(tl.permute(tl.reshape(both, [BLOCK, 2, C]), (0, 2, 1)))
        else:
            w = tl.load(wq_ptr + (n * (2 * C) + r)[:, None] * K + c[None, :])
            q = tl.load(wq_ptr + (n * (2 * C) + C + r)[:, None] * K + c[None, :])
            wS = tl.dot(low, tl.trans(w), input_precision="ieee")
            qS = tl.dot(low, tl.trans(q), input_precision="ieee")
        y = (u.to(tl.float32) - wS).to(LOW)
        S = product(y, kf, S * d[None, :])
        o = tl.dot(y, tl.trans(p), input_precision="ieee")
        if PARTS == 2:
            kf = tl.load(kf_ptr + ((tiles + n) * C + r)[:, None] * K + c[None, :])
            p = tl.load(p_ptr + ((tiles + n) * C + r)[:, None] * C + r[None, :])
            S = product(y, kf, S)
            o = product(y, tl.trans(p), o)
        o -= qS
        t = (first + n) * C + r
        # int64: a row of tokens may have more than 2^31 elements
        to = t.to(tl.int64)[None, :] * (H * V) + x[:, None]
        tl.store(o_ptr + to, o.to(o_ptr.dtype.element_ty), mask=(t < tokens)[None, :])
    # the others end where the next piece began, in a state that the relay made
    if piece == pieces - 1:
        tl.store(state_ptr + K * V + state, S)
        tl.store(after_ptr + line.to(tl.int64) * (K * V) + state, S)


@triton.jit
def kda_states(
    wq_ptr,
    kf_ptr,
    u_ptr,
    d_ptr,
    state_ptr,
    transition_ptr,
    s_ptr,
    y_ptr,
    tiles,
    every,
    pieces,
    state_step,
    transition_step,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    WIDE: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    FRESH: tl.constexpr,
    INNER: tl.constexpr,
    PARTS: tl.constexpr,
    LOW: tl.constexpr,
):
    """N columns through a segment: those of V, then those in which no value is written, N - V.

    ``state [K WIDE]`` has the columns before each piece; ``s`` and ``y`` get the state that comes
    into each tile, and Y. FRESH: each piece begins with [0 | I] instead, and only its end is
    written: the first V columns to ``state`` after the piece, the others to ``transition [PARTS K
    K]``. INNER: the first piece begins with its ``state``, and neither its transition nor the last
    piece's state, which nobody asks for, are made.
    """
    blocks: tl.constexpr = N // BLOCK
    column = (tl.program_id(0) % blocks) * BLOCK
    piece = tl.program_id(0) // blocks % pieces
    line = tl.program_id(0) // blocks // pieces
    x = column + tl.arange(0, BLOCK)
    r = tl.arange(0, C)
    c = tl.arange(0, K)
    state_ptr += line.to(tl.int64) * state_step + piece * (K * WIDE)
    state = c[None, :] * WIDE + x[:, None]
    if INNER:
        known = tl.where(piece == 0, V, 0)
        S = tl.load(state_ptr + state, mask=(x < known)[:, None], other=0.0)
        S = tl.where(x[:, None] - V == c[None, :], 1.0, S)
    elif FRESH:
        S = tl.where(x[:, None] - V == c[None, :], 1.0, 0.0)
    else:
        S = tl.load(state_ptr + state)
    base = line.to(tl.int64) * tiles
    wq_ptr += base * (2 * C * K)
    kf_ptr += base * (PARTS * C * K)
    u_ptr += base * (C * V)
    d_ptr += base * K
    s_ptr += base * (K * N)
    y_ptr += base * (C * N)
    # not a mask, that would be false everywhere: Ascend's adapter then takes a negative size
    of_u = tl.where(column < V, column, 0) + tl.arange(0, BLOCK)
    start = piece * every
    end = tl.minimum(start + every, tiles)
    if INNER:
        needed = tl.where(column < V, piece < pieces - 1, piece > 0)
        end = tl.where(needed, end, start)
    for n in tl.range(start, end, num_stages=STAGES):
        u = tl.load(u_ptr + n * (C * V) + of_u[:, None] * C + r[None, :])
        if N > V:
            u = tl.where(column < V, u, 0.0)
        kf = tl.load(kf_ptr + (n * C + r)[:, None] * K + c[None, :])
        d = tl.load(d_ptr + n * K + c)
        w = tl.load(wq_ptr + (n * (2 * C) + r)[:, None] * K + c[None, :])
        low = S.to(LOW)
        if not FRESH:
            tl.store(s_ptr + n * (K * N) + (x[:, None] * K + c[None, :]), low)
        y = u.to(tl.float32) - tl.dot(low, tl.trans(w), input_precision="ieee")
        if not FRESH:
            tl.store(y_ptr + n * (C * N) + (r[None, :] * N + x[:, None]), y.to(LOW))
        y = y.to(LOW)
        S = product(y, kf, S * d[None, :])
        if PARTS == 2:
            kf = tl.load(kf_ptr + ((tiles + n) * C + r)[:, None] * K + c[None, :])
            S = product(y, kf, S)
    if FRESH:
        if column < V:
            if not INNER or piece < pieces - 1:
                tl.store(state_ptr + K * WIDE + state, S)
        else:
            transition_ptr += line.to(tl.int64) * transition_step + piece * (PARTS * K * K)
            to = transition_ptr + c[None, :] * K + (x - V)[:, None]
            high = S.to(LOW)
            tl.store(to, high)
            if PARTS == 2:
                tl.store(to + K * K, (S - high.to(tl.float32)).to(LOW))


@triton.jit
def kda_adjoint(
    wq_ptr,
    kf_ptr,
    p_ptr,
    inverse_ptr,
    d_ptr,
    d_o_ptr,
    stop_ptr,
    d_state_ptr,
    ds_ptr,
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
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    FRESH: tl.constexpr,
    PARTS: tl.constexpr,
    LOW: tl.constexpr,
):
    """Minus the gradient of the state that leaves each tile of a segment, and that of v; last tile
    first.

    ``d_state`` has that of the state after each piece, and its first becomes that of the segment's
    first state. FRESH: each piece but the first begins with 0, and ``d_state`` of the piece before
    it gets the end, and nothing else is written.
    """
    piece = tl.program_id(0) // (V // BLOCK) % pieces
    line = tl.program_id(0) // (V // BLOCK) // pieces
    if FRESH:
        piece = tl.program_id(0) // (V // BLOCK) % (pieces - 1) + 1
        line = tl.program_id(0) // (V // BLOCK) // (pieces - 1)
    x = (tl.program_id(0) % (V // BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    row = line // H
    h = line % H
    r = tl.arange(0, C)
    c = tl.arange(0, K)
    stop = tl.load(stop_ptr + row)
    d_state_ptr += line.to(tl.int64) * line_step + piece * (K * V)
    state = c[None, :] * V + x[:, None]
    # minus dS: then both products with it are added, and each is one chain of accumulators
    if FRESH:
        S = tl.zeros([BLOCK, K], tl.float32)
    else:
        S = -tl.load(d_state_ptr + state)
    base = line.to(tl.int64) * tiles
    wq_ptr += base * (2 * C * K)
    kf_ptr += base * (PARTS * C * K)
    p_ptr += base * (PARTS * C * C)
    inverse_ptr += base * (PARTS * C * C)
    d_ptr += base * K
    ds_ptr += base * (K * V)
    rows = ((row.to(tl.int64) * tokens + first * C) * H + h) * V
    d_o_ptr += rows
    d_v_ptr += rows
    start = piece * every
    end = tl.minimum(start + every, tiles)
    for back in tl.range(0, end - start, num_stages=STAGES):
        n = end - 1 - back
        kf = tl.load(kf_ptr + (n * C + r)[:, None] * K + c[None, :])
        p = tl.load(p_ptr + (n * C + r)[:, None] * C + r[None, :])
        d = tl.load(d_ptr + n * K + c)
        w = tl.load(wq_ptr + (n * (2 * C) + r)[:, None] * K + c[None, :])
        q = tl.load(wq_ptr + (n * (2 * C) + C + r)[:, None] * K + c[None, :])
        t = n * C + r
        d_o = tl.load(
            d_o_ptr + t[:, None] * (H * V) + x[None, :],
            mask=(first * C + t < stop)[:, None],
            other=0.0,
        ).to(LOW)
        low = S.to(LOW)
        if not FRESH:
            tl.store(ds_ptr + n * (K * V) + (x[:, None] * K + c[None, :]), low)
        from_o = tl.dot(tl.trans(d_o), p, input_precision="ieee")
        from_s = tl.dot(low, tl.trans(kf), input_precision="ieee")
        if PARTS == 2:
            kf = tl.load(kf_ptr + ((tiles + n) * C + r)[:, None] * K + c[None, :])
            from_s = product(low, tl.trans(kf), from_s)
        dy = (from_o - from_s).to(LOW)
        if not FRESH:
            inverse = tl.load(inverse_ptr + (n * C + r)[:, None] * C + r[None, :])
            nu = tl.dot(dy, inverse, input_precision="ieee")
            if PARTS == 2:
                to = inverse_ptr + ((tiles + n) * C + r)[:, None] * C + r[None, :]
                nu = product(dy, tl.load(to), nu)
            tl.store(
                d_v_ptr + t[None, :] * (H * V) + x[:, None],
                nu.to(d_v_ptr.dtype.element_ty),
                mask=(first * C + t < tokens)[None, :],
            )
        S = product(dy, w, S * d[None, :])
        S = product(tl.trans(d_o), q, S)
    if FRESH:
        tl.store(d_state_ptr - K * V + state, -S)
    elif piece == 0:
        tl.store(d_state_ptr + state, -S)
