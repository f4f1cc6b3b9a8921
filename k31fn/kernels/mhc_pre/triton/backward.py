# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""Gradients of the coefficients, of the streams and of ``phi``.

As in the forward, some programs undo Sinkhorn, step by step from its row and column sums, beside
those that sum the gradient of ``h_pre`` along a token. The gradients of the streams and of ``phi``
are one pass over the streams, whose programs hold a piece of ``phi``; a last kernel adds their
parts in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.mhc_pre.triton.arithmetic import back, cut, forth, sigmoid, softmax

__all__ = ["mhc_pre_backward_mix", "mhc_pre_backward_streams", "mhc_pre_backward_sums"]


@triton.jit
def _store_halves(pointers, a, mask, PADDED: tl.constexpr, HALVES: tl.constexpr):
    """a, or two bfloat16 numbers whose sum it is but for 2^-17; the second PADDED elements after
    the first.
    """
    # one bfloat16 would cost the gradient of the streams 2^-9, and float32 the matrix units
    first = a.to(pointers.dtype.element_ty)
    tl.store(pointers, first, mask=mask)
    if HALVES == 2:
        tl.store(
            pointers + PADDED, (a - first.to(tl.float32)).to(pointers.dtype.element_ty), mask=mask
        )


@triton.jit
def mhc_pre_backward_mix(
    x_ptr,
    ct_ptr,
    ct_post_ptr,
    ct_res_ptr,
    z_ptr,
    rrms_ptr,
    scale_ptr,
    base_ptr,
    d_product_ptr,
    shrink_ptr,
    sum_ptr,
    tokens,
    width,
    iterations,
    per_group,
    apart,
    x_group,
    ct_group,
    ct_post_group,
    ct_res_group,
    z_group,
    rrms_group,
    scale_group,
    base_group,
    N: tl.constexpr,
    C: tl.constexpr,
    PADDED: tl.constexpr,
    HALVES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
    UNROLLED: tl.constexpr,
    EPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of ``x phi`` and, per program, of scale and base: of Sinkhorn's part, then of
    ``h_pre``'s.

    The forward's steps are taken again from ``z``: to keep them would be an N x N matrix for each
    iteration; ``back`` recovers each from the sums by which it was divided. ``h_pre``'s part goes
    token by token, since it needs a sum along the whole token. ``shrink`` is the way through the
    norm, along the streams themselves. Scale and base get a column of parts per program, which the
    last kernel adds in order: no atomics.
    """
    group = (tl.program_id(0) // per_group).to(tl.int64)
    mine = tl.program_id(0) % per_group
    scale = scale_ptr + group * scale_group
    base = base_ptr + group * base_group
    scale_pre = tl.load(scale)
    scale_post = tl.load(scale + 1)
    scale_res = tl.load(scale + 2)
    streams = tl.arange(0, N)
    row = tl.arange(0, ROWS)
    of_pre = row[:, None] * C + streams[None, :]
    of_post = row[:, None] * N + streams[None, :]
    pair = streams[None, :, None] * N + streams[None, None, :]
    of_res = row[:, None, None] * C + 2 * N + pair
    bias = tl.load(base + 2 * N + streams[:, None] * N + streams[None, :])
    flat = N * width
    sum_post = tl.zeros((ROWS, N), dtype=tl.float32)
    sum_res = tl.zeros((ROWS, N, N), dtype=tl.float32)
    d_scale_post = tl.zeros((ROWS,), dtype=tl.float32)
    d_scale_res = tl.zeros((ROWS,), dtype=tl.float32)
    for p in range(mine, tl.cdiv(tokens, ROWS), per_group):
        first = group * 0 + p * ROWS  # 64 bits
        here = row < tokens - first
        there = here[:, None] & (streams >= 0)[None, :]
        everywhere = there[:, :, None] & (streams >= 0)[None, None, :]
        z = z_ptr + (group * z_group + first * C)
        z_post = tl.load(z + of_pre + N, mask=there, other=0.0)
        z_res = tl.load(z + of_res, mask=everywhere, other=0.0)
        rrms = tl.load(rrms_ptr + (group * rrms_group + first) + row, mask=here, other=0.0)
        d_post = tl.load(
            ct_post_ptr + (group * ct_post_group + first * N) + of_post, mask=there, other=0.0
        )
        ct_res = ct_res_ptr + (group * ct_res_group + first * N * N)
        d_m = tl.load(ct_res + row[:, None, None] * (N * N) + pair, mask=everywhere, other=0.0)

        s_post = sigmoid(scale_post * z_post + tl.load(base + N + streams)[None, :])
        soft = softmax(scale_res * z_res + bias[None, :, :])
        once = tl.sum(soft + EPS, axis=1) + EPS
        m = (soft + EPS) * (1.0 / once)[:, None, :]
        if UNROLLED > 0:  # the sums stay in registers
            kept = ()
            for _ in tl.static_range(1, UNROLLED):
                m, rows, columns = forth(m, EPS)
                kept += (rows, columns)
            for k in tl.static_range(1, UNROLLED):
                m, d_m = back(m, d_m, kept[2 * (UNROLLED - k) - 2], kept[2 * (UNROLLED - k) - 1])
        else:
            number = tl.arange(0, SUMS)[None, :, None]
            of_columns = tl.zeros((ROWS, SUMS, N), dtype=tl.float32)
            of_rows = tl.zeros((ROWS, SUMS, N), dtype=tl.float32)
            for k in range(1, iterations):
                m, rows, columns = forth(m, EPS)
                of_rows = tl.where(number == k, rows[:, None, :], of_rows)
                of_columns = tl.where(number == k, columns[:, None, :], of_columns)
            for k in range(1, iterations):
                now = number == iterations - k
                rows = tl.sum(tl.where(now, of_rows, 0.0), axis=1)
                m, d_m = back(m, d_m, rows, tl.sum(tl.where(now, of_columns, 0.0), axis=1))
        d_m = (d_m - tl.sum(d_m * m, axis=1)[:, None, :]) * (1.0 / once)[:, None, :]

        a_post = tl.where(there, 2.0 * d_post * s_post * (1.0 - s_post), 0.0)
        a_res = tl.where(everywhere, soft * (d_m - tl.sum(d_m * soft, axis=2)[:, :, None]), 0.0)
        along_post = tl.sum(a_post * z_post, axis=1)
        along_res = tl.sum(tl.sum(a_res * z_res, axis=2), axis=1)
        written = group * tokens + first
        shrink = scale_post * along_post + scale_res * along_res
        tl.store(shrink_ptr + (written + row) * 2 + 1, -shrink * rrms * rrms / flat, mask=here)
        product = d_product_ptr + written * (HALVES * PADDED)
        of_product = row[:, None] * (HALVES * PADDED) + streams[None, :]
        of_pairs = row[:, None, None] * (HALVES * PADDED) + 2 * N + pair
        _store_halves(
            product + of_product + N, scale_post * a_post * rrms[:, None], there, PADDED, HALVES
        )
        _store_halves(
            product + of_pairs, scale_res * a_res * rrms[:, None, None], everywhere, PADDED, HALVES
        )
        sum_post += a_post
        sum_res += a_res
        d_scale_post += along_post
        d_scale_res += along_res

    bias_pre = tl.load(base + streams)
    sum_pre = tl.zeros((N,), dtype=tl.float32)
    d_scale_pre = tl.zeros((N,), dtype=tl.float32)
    for t in range(tl.where(mine < apart, tokens, mine - apart), tokens, per_group - apart):
        token = group * 0 + t  # 64 bits
        products = tl.zeros((N, BLOCK), dtype=tl.float32)
        for start in tl.range(0, width, BLOCK, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            tile = streams[:, None] * width + columns[None, :]
            x = tl.load(
                x_ptr + (group * x_group + token * N * width) + tile,
                mask=inside[None, :],
                other=0.0,
            )
            ct = tl.load(
                ct_ptr + (group * ct_group + token * width) + columns, mask=inside, other=0.0
            )
            products += x.to(tl.float32) * ct.to(tl.float32)[None, :]
        z_pre = tl.load(z_ptr + (group * z_group + token * C) + streams)
        rrms = tl.load(rrms_ptr + (group * rrms_group + token))
        s_pre = sigmoid(scale_pre * z_pre + bias_pre)
        a_pre = tl.sum(products, axis=1) * s_pre * (1.0 - s_pre)
        shrink = scale_pre * tl.sum(a_pre * z_pre, axis=0)
        written = group * tokens + token
        tl.store(shrink_ptr + written * 2, -shrink * rrms * rrms / flat)
        product = d_product_ptr + written * (HALVES * PADDED) + streams
        _store_halves(product, scale_pre * a_pre * rrms, streams >= 0, PADDED, HALVES)
        sum_pre += a_pre
        d_scale_pre += a_pre * z_pre
    sums = sum_ptr + group * (C + 3) * per_group + mine
    tl.store(sums + streams * per_group, sum_pre)
    tl.store(sums + (N + streams) * per_group, tl.sum(sum_post, axis=0))
    tl.store(
        sums + (2 * N + streams[:, None] * N + streams[None, :]) * per_group,
        tl.sum(sum_res, axis=0),
    )
    tl.store(sums + C * per_group, tl.sum(d_scale_pre, axis=0))
    tl.store(sums + (C + 1) * per_group, tl.sum(d_scale_post, axis=0))
    tl.store(sums + (C + 2) * per_group, tl.sum(d_scale_res, axis=0))


@triton.jit
def mhc_pre_backward_streams(
    x_ptr,
    phi_ptr,
    ct_ptr,
    ct_x_ptr,
    pre_ptr,
    d_product_ptr,
    shrink_ptr,
    d_x_ptr,
    part_ptr,
    tokens,
    width,
    pieces,
    splits,
    x_group,
    phi_group,
    ct_group,
    ct_x_group,
    pre_group,
    N: tl.constexpr,
    C: tl.constexpr,
    PADDED: tl.constexpr,
    HALVES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Gradient of the streams, and of ``phi`` from a split's tokens."""
    group = (tl.program_id(0) // (splits * N * pieces)).to(tl.int64)
    split = (tl.program_id(0) // (N * pieces)) % splits
    stream = tl.program_id(0) % N
    columns = ((tl.program_id(0) // N) % pieces) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    coefficients = tl.arange(0, PADDED)
    phi = tl.load(
        phi_ptr
        + group * phi_group
        + (stream * width + columns)[None, :] * C
        + coefficients[:, None],
        mask=inside[None, :] & (coefficients < C)[:, None],
        other=0.0,
    )
    if SPLIT:  # d_product phi = (d_high + d_low) high + d_high low, but for 2^-15 of it
        high, phi = cut(phi)
        low = phi.to(tl.bfloat16)
        if WIDE:
            low = low.to(tl.float32)
            high = high.to(tl.float32)
    else:
        high = phi
    row = tl.arange(0, ROWS)
    # a program keeps its piece of phi and of phi's gradient, and walks over a split's tokens
    d_phi = tl.zeros((BLOCK, PADDED), dtype=tl.float32)
    for p in tl.range(split, tl.cdiv(tokens, ROWS), splits, num_stages=STAGES):
        first = group * 0 + p * ROWS  # 64 bits
        here = row < tokens - first
        both = here[:, None] & inside[None, :]
        written = group * tokens + first
        tile = row[:, None] * (N * width) + stream * width + columns[None, :]
        x = tl.load(x_ptr + (group * x_group + first * N * width) + tile, mask=both, other=0.0)
        ct_x = tl.load(
            ct_x_ptr + (group * ct_x_group + first * N * width) + tile, mask=both, other=0.0
        )
        of_y = (group * ct_group + first * width) + row[:, None] * width + columns[None, :]
        ct = tl.load(ct_ptr + of_y, mask=both, other=0.0)
        product = (
            d_product_ptr + (written + row)[:, None] * (HALVES * PADDED) + coefficients[None, :]
        )
        known = here[:, None] & (coefficients < C)[None, :]
        d_product = tl.load(product, mask=known, other=0.0)
        h_pre = tl.load(
            pre_ptr + (group * pre_group + first * N) + row * N + stream, mask=here, other=0.0
        )
        shrink = tl.load(shrink_ptr + (written + row) * 2, mask=here, other=0.0)
        shrink += tl.load(shrink_ptr + (written + row) * 2 + 1, mask=here, other=0.0)
        # three of the four ways to the streams: handed through, read by h_pre, and the norm
        d_x = (
            ct_x.to(tl.float32)
            + h_pre[:, None] * ct.to(tl.float32)
            + shrink[:, None] * x.to(tl.float32)
        )
        x = tl.trans(x)
        if WIDE:
            x = x.to(tl.float32)
            d_product = d_product.to(tl.float32)
        # of its own: it is done before its operands are overwritten
        part = tl.zeros((BLOCK, PADDED), dtype=tl.float32)
        # the fourth way, through the products; the small parts first
        if HALVES == 2:
            d_low = tl.load(product + PADDED, mask=known, other=0.0)
            if WIDE:
                d_low = d_low.to(tl.float32)
            d_x = tl.dot(d_low, high, d_x, input_precision="ieee")
            d_x = tl.dot(d_product, low, d_x, input_precision="ieee")
            part = tl.dot(x, d_low, part, input_precision="ieee")
        d_x = tl.dot(d_product, high, d_x, input_precision="ieee")
        d_phi += tl.dot(x, d_product, part, input_precision="ieee")
        tl.store(
            d_x_ptr + written * (N * width) + tile, d_x.to(d_x_ptr.dtype.element_ty), mask=both
        )
    tl.store(
        part_ptr
        + (((group * splits + split) * N + stream) * width) * C
        + columns[:, None] * C
        + coefficients[None, :],
        d_phi,
        mask=inside[:, None] & (coefficients < C)[None, :],
    )


@triton.jit
def mhc_pre_backward_sums(
    part_ptr,
    sum_ptr,
    d_phi_ptr,
    total_ptr,
    size,
    pieces,
    sums,
    summed,
    per_group,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the parts of the gradients of ``phi``, and of scale and base; with these the last
    programs begin.
    """
    group = (tl.program_id(0) // per_group).to(tl.int64)
    mine = tl.program_id(0) % per_group
    # few and long, so they go to the programs that have the fewest pieces of phi
    for k in range(per_group - 1 - mine, sums, per_group):
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, summed, BLOCK):
            place = start + tl.arange(0, BLOCK)
            total += tl.load(
                sum_ptr + (group * sums + k) * summed + place, mask=place < summed, other=0.0
            )
        # BLOCK sums side by side, then one tree: the order depends on nothing but the grid
        tl.store(total_ptr + group * sums + k, tl.sum(total, axis=0))
    for p in range(mine, pieces, per_group):
        place = p * BLOCK + tl.arange(0, BLOCK)
        d_phi = tl.zeros((BLOCK,), dtype=tl.float32)
        # in ascending order, whichever program was first
        for split in tl.static_range(SPLITS):
            d_phi += tl.load(
                part_ptr + (group * SPLITS + split) * size + place, mask=place < size, other=0.0
            )
        tl.store(d_phi_ptr + group * size + place, d_phi, mask=place < size)
