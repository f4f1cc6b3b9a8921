# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""The read of hyper-connected streams: the products with ``phi``, the coefficients, and the mix, each way.

The products are split along the streams too, so that a short sequence fills the device; the parts are added in a fixed
order. With bfloat16 streams ``phi`` is taken as a sum of three bfloat16 numbers, whose products are exact in float32:
the result is that of a float32 product, on the matrix units. Coefficients are few numbers and many dependent steps, so
they have kernels of their own, whose programs hold several tokens. Their backward undoes Sinkhorn step by step from its
row and column sums; the last kernel gives the gradients of the streams and of ``phi`` in one pass. First order only.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff import custom_vjp
from k31fn.kernels.launch import Build, grouped, programs, step
from k31fn.kernels.mhc_pre.reference import Pre
from k31fn.kernels.mhc_pre.tiles import MOST_SPLITS, TILES, given, listed, num_streams, of_streams

__all__ = ["builds", "mhc_pre"]

_TILES = TILES  # by kind of device


@triton.jit
def _product(a, b, acc, SPLIT: tl.constexpr, WIDE: tl.constexpr):
    """``acc + a b`` in float32 arithmetic. SPLIT: a is bfloat16 and b the sum of three; WIDE: the interpreter's dot."""
    if SPLIT:
        high = b.to(tl.bfloat16)
        rest = b - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        if WIDE:
            a = a.to(tl.float32)
            high = high.to(tl.float32)
            middle = middle.to(tl.float32)
            low = low.to(tl.float32)
        acc = tl.dot(a, low, acc, input_precision="ieee")
        acc = tl.dot(a, middle, acc, input_precision="ieee")
        acc = tl.dot(a, high, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _store_halves(pointers, a, mask, PADDED: tl.constexpr, HALVES: tl.constexpr):
    """a, or two bfloat16 numbers whose sum it is but for 2^-17; the second PADDED elements after the first."""
    first = a.to(pointers.dtype.element_ty)
    tl.store(pointers, first, mask=mask)
    if HALVES == 2:
        tl.store(pointers + PADDED, (a - first.to(tl.float32)).to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def mhc_pre_project(
    x_ptr, phi_ptr, part_ptr, square_ptr,
    tokens, flat, chunk, splits, per_group, x_group, phi_group,
    C: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FOLD: tl.constexpr,
    SPLIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) // per_group).to(tl.int64)
    coefficients = tl.arange(0, PADDED)
    for p in range(tl.program_id(0) % per_group, tl.cdiv(tokens, ROWS) * splits, per_group):
        first = group * 0 + (p // splits) * ROWS  # 64 bits
        split = p % splits
        rows = tl.arange(0, ROWS)
        here = rows < tokens - first
        products = tl.zeros((ROWS, PADDED), dtype=tl.float32)
        squares = tl.zeros((ROWS, BLOCK // FOLD), dtype=tl.float32)
        for start in range(split * chunk, tl.minimum(flat, split * chunk + chunk), BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(
                x_ptr + (group * x_group + first * flat) + rows[:, None] * flat + columns[None, :],
                mask=here[:, None] & (columns < flat)[None, :], other=0.0)  # fmt: skip
            phi = tl.load(
                phi_ptr + group * phi_group + columns[:, None] * C + coefficients[None, :],
                mask=(columns < flat)[:, None] & (coefficients < C)[None, :], other=0.0)  # fmt: skip
            products = _product(x, phi, products, SPLIT, WIDE)
            wide = x.to(tl.float32)
            if FOLD == BLOCK:
                squares += tl.sum(wide * wide, axis=1)[:, None]
            else:
                squares += tl.sum(tl.reshape(wide * wide, [ROWS, BLOCK // FOLD, FOLD]), axis=2)
        part = (group * splits + split) * tokens + first
        tl.store(
            part_ptr + part * C + rows[:, None] * C + coefficients[None, :], products,
            mask=here[:, None] & (coefficients < C)[None, :])  # fmt: skip
        tl.store(square_ptr + part + rows, tl.sum(squares, axis=1), mask=here)


@triton.jit
def _sigmoid(a):
    e = tl.exp(-tl.abs(a))
    return tl.where(a >= 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def _softmax(a):
    e = tl.exp(a - tl.max(a, axis=2)[:, :, None])
    return e / tl.sum(e, axis=2)[:, :, None]


@triton.jit
def mhc_pre_coefficients(
    part_ptr, square_ptr, scale_ptr, base_ptr, pre_ptr, post_ptr, res_ptr, z_ptr, rrms_ptr,
    tokens, flat, iterations, per_group, part_group, square_group, scale_group, base_group, norm_eps,
    N: tl.constexpr, C: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) // per_group).to(tl.int64)
    scale = scale_ptr + group * scale_group
    base = base_ptr + group * base_group
    streams = tl.arange(0, N)
    row = tl.arange(0, ROWS)
    of_pre = row[:, None] * C + streams[None, :]
    pair = streams[None, :, None] * N + streams[None, None, :]
    of_res = row[:, None, None] * C + 2 * N + pair
    for p in range(tl.program_id(0) % per_group, tl.cdiv(tokens, ROWS), per_group):
        first = group * 0 + p * ROWS  # 64 bits
        here = row < tokens - first
        there = here[:, None] & (streams >= 0)[None, :]
        everywhere = there[:, :, None] & (streams >= 0)[None, None, :]
        squares = tl.zeros((ROWS,), dtype=tl.float32)
        z_pre = tl.zeros((ROWS, N), dtype=tl.float32)
        z_post = tl.zeros((ROWS, N), dtype=tl.float32)
        z_res = tl.zeros((ROWS, N, N), dtype=tl.float32)
        for s in tl.static_range(SPLITS):
            part = part_ptr + (group * part_group + (s * tokens + first) * C)
            z_pre += tl.load(part + of_pre, mask=there, other=0.0)
            z_post += tl.load(part + of_pre + N, mask=there, other=0.0)
            z_res += tl.load(part + of_res, mask=everywhere, other=0.0)
            square = square_ptr + (group * square_group + s * tokens + first)
            squares += tl.load(square + row, mask=here, other=0.0)
        rrms = 1.0 / tl.sqrt(squares / flat + norm_eps)
        z_pre = z_pre * rrms[:, None]
        z_post = z_post * rrms[:, None]
        z_res = z_res * rrms[:, None, None]
        written = group * tokens + first
        tl.store(rrms_ptr + written + row, rrms, mask=here)
        tl.store(z_ptr + written * C + of_pre, z_pre, mask=there)
        tl.store(z_ptr + written * C + of_pre + N, z_post, mask=there)
        tl.store(z_ptr + written * C + of_res, z_res, mask=everywhere)

        h_pre = _sigmoid(tl.load(scale) * z_pre + tl.load(base + streams)[None, :]) + EPS
        h_post = 2.0 * _sigmoid(tl.load(scale + 1) * z_post + tl.load(base + N + streams)[None, :])
        bias = tl.load(base + 2 * N + streams[:, None] * N + streams[None, :])
        m = _softmax(tl.load(scale + 2) * z_res + bias[None, :, :]) + EPS
        m = m * (1.0 / (tl.sum(m, axis=1) + EPS))[:, None, :]
        for _ in range(iterations - 1):
            m, _rows, _columns = _forth(m, EPS)
        of_post = row[:, None] * N + streams[None, :]
        tl.store(pre_ptr + written * N + of_post, h_pre, mask=there)
        tl.store(post_ptr + written * N + of_post, h_post, mask=there)
        tl.store(res_ptr + written * (N * N) + row[:, None, None] * (N * N) + pair, m, mask=everywhere)


@triton.jit
def _forth(m, EPS: tl.constexpr):
    """An iteration of Sinkhorn, and the sums by which it divided."""
    rows = tl.sum(m, axis=2) + EPS
    m = m * (1.0 / rows)[:, :, None]
    columns = tl.sum(m, axis=1) + EPS
    return m * (1.0 / columns)[:, None, :], rows, columns


@triton.jit
def _back(m, d_m, rows, columns):
    """An iteration undone, and its transpose."""
    d_m = (d_m - tl.sum(d_m * m, axis=1)[:, None, :]) * (1.0 / columns)[:, None, :]
    m = m * columns[:, None, :]
    d_m = (d_m - tl.sum(d_m * m, axis=2)[:, :, None]) * (1.0 / rows)[:, :, None]
    return m * rows[:, :, None], d_m


@triton.jit
def mhc_pre_mix(
    x_ptr, pre_ptr, y_ptr, tokens, width, pieces, per_group, x_group, pre_group,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) // per_group).to(tl.int64)
    streams = tl.arange(0, N)
    for p in range(tl.program_id(0) % per_group, tokens * pieces, per_group):
        token = group * 0 + p // pieces  # 64 bits
        columns = (p % pieces) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        tile = streams[:, None] * width + columns[None, :]
        x = tl.load(x_ptr + (group * x_group + token * N * width) + tile, mask=inside[None, :], other=0.0)
        pre = tl.load(pre_ptr + (group * pre_group + token * N) + streams)
        y = tl.sum(x.to(tl.float32) * pre[:, None], axis=0).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + (group * tokens + token) * width + columns, y, mask=inside)


@triton.jit
def mhc_pre_backward_mix(
    x_ptr, ct_ptr, d_pre_ptr, tokens, width, per_group, x_group, ct_group,
    N: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) // per_group).to(tl.int64)
    streams = tl.arange(0, N)
    for t in range(tl.program_id(0) % per_group, tokens, per_group):
        token = group * 0 + t  # 64 bits
        products = tl.zeros((N, BLOCK), dtype=tl.float32)
        for start in tl.range(0, width, BLOCK, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            tile = streams[:, None] * width + columns[None, :]
            x = tl.load(x_ptr + (group * x_group + token * N * width) + tile, mask=inside[None, :], other=0.0)
            ct = tl.load(ct_ptr + (group * ct_group + token * width) + columns, mask=inside, other=0.0)
            products += x.to(tl.float32) * ct.to(tl.float32)[None, :]
        tl.store(d_pre_ptr + (group * tokens + token) * N + streams, tl.sum(products, axis=1))


@triton.jit
def mhc_pre_backward_coefficients(
    d_pre_ptr, ct_post_ptr, ct_res_ptr, z_ptr, rrms_ptr, scale_ptr, base_ptr, d_product_ptr, shrink_ptr, sum_ptr,
    tokens, flat, iterations, per_group,
    d_pre_group, ct_post_group, ct_res_group, z_group, rrms_group, scale_group, base_group,
    N: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr, HALVES: tl.constexpr,
    ROWS: tl.constexpr, SUMS: tl.constexpr, UNROLLED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) // per_group).to(tl.int64)
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
    sum_pre = tl.zeros((ROWS, N), dtype=tl.float32)
    sum_post = tl.zeros((ROWS, N), dtype=tl.float32)
    sum_res = tl.zeros((ROWS, N, N), dtype=tl.float32)
    d_scale_pre = tl.zeros((ROWS,), dtype=tl.float32)
    d_scale_post = tl.zeros((ROWS,), dtype=tl.float32)
    d_scale_res = tl.zeros((ROWS,), dtype=tl.float32)
    for p in range(tl.program_id(0) % per_group, tl.cdiv(tokens, ROWS), per_group):
        first = group * 0 + p * ROWS  # 64 bits
        here = row < tokens - first
        there = here[:, None] & (streams >= 0)[None, :]
        everywhere = there[:, :, None] & (streams >= 0)[None, None, :]
        z = z_ptr + (group * z_group + first * C)
        z_pre = tl.load(z + of_pre, mask=there, other=0.0)
        z_post = tl.load(z + of_pre + N, mask=there, other=0.0)
        z_res = tl.load(z + of_res, mask=everywhere, other=0.0)
        rrms = tl.load(rrms_ptr + (group * rrms_group + first) + row, mask=here, other=0.0)
        d_pre = tl.load(d_pre_ptr + (group * d_pre_group + first * N) + of_post, mask=there, other=0.0)
        d_post = tl.load(ct_post_ptr + (group * ct_post_group + first * N) + of_post, mask=there, other=0.0)
        ct_res = ct_res_ptr + (group * ct_res_group + first * N * N)
        d_m = tl.load(ct_res + row[:, None, None] * (N * N) + pair, mask=everywhere, other=0.0)

        s_pre = _sigmoid(scale_pre * z_pre + tl.load(base + streams)[None, :])
        s_post = _sigmoid(scale_post * z_post + tl.load(base + N + streams)[None, :])
        soft = _softmax(scale_res * z_res + bias[None, :, :])
        once = tl.sum(soft + EPS, axis=1) + EPS
        m = (soft + EPS) * (1.0 / once)[:, None, :]
        if UNROLLED > 0:  # the sums stay in registers
            kept = ()
            for _ in tl.static_range(1, UNROLLED):
                m, rows, columns = _forth(m, EPS)
                kept += (rows, columns)
            for k in tl.static_range(1, UNROLLED):
                m, d_m = _back(m, d_m, kept[2 * (UNROLLED - k) - 2], kept[2 * (UNROLLED - k) - 1])
        else:
            number = tl.arange(0, SUMS)[None, :, None]
            of_columns = tl.zeros((ROWS, SUMS, N), dtype=tl.float32)
            of_rows = tl.zeros((ROWS, SUMS, N), dtype=tl.float32)
            for k in range(1, iterations):
                m, rows, columns = _forth(m, EPS)
                of_rows = tl.where(number == k, rows[:, None, :], of_rows)
                of_columns = tl.where(number == k, columns[:, None, :], of_columns)
            for k in range(1, iterations):
                back = number == iterations - k
                rows = tl.sum(tl.where(back, of_rows, 0.0), axis=1)
                m, d_m = _back(m, d_m, rows, tl.sum(tl.where(back, of_columns, 0.0), axis=1))
        d_m = (d_m - tl.sum(d_m * m, axis=1)[:, None, :]) * (1.0 / once)[:, None, :]

        a_pre = tl.where(there, d_pre * s_pre * (1.0 - s_pre), 0.0)
        a_post = tl.where(there, 2.0 * d_post * s_post * (1.0 - s_post), 0.0)
        a_res = tl.where(everywhere, soft * (d_m - tl.sum(d_m * soft, axis=2)[:, :, None]), 0.0)
        along_pre = tl.sum(a_pre * z_pre, axis=1)
        along_post = tl.sum(a_post * z_post, axis=1)
        along_res = tl.sum(tl.sum(a_res * z_res, axis=2), axis=1)
        shrink = scale_pre * along_pre + scale_post * along_post + scale_res * along_res
        written = group * tokens + first
        tl.store(shrink_ptr + written + row, -shrink * rrms * rrms / flat, mask=here)
        product = d_product_ptr + written * (HALVES * PADDED)
        of_product = row[:, None] * (HALVES * PADDED) + streams[None, :]
        of_pairs = row[:, None, None] * (HALVES * PADDED) + 2 * N + pair
        _store_halves(product + of_product, scale_pre * a_pre * rrms[:, None], there, PADDED, HALVES)
        _store_halves(product + of_product + N, scale_post * a_post * rrms[:, None], there, PADDED, HALVES)
        _store_halves(product + of_pairs, scale_res * a_res * rrms[:, None, None], everywhere, PADDED, HALVES)
        sum_pre += a_pre
        sum_post += a_post
        sum_res += a_res
        d_scale_pre += along_pre
        d_scale_post += along_post
        d_scale_res += along_res
    sums = sum_ptr + tl.program_id(0) * (C + 3)
    tl.store(sums + streams, tl.sum(sum_pre, axis=0))
    tl.store(sums + N + streams, tl.sum(sum_post, axis=0))
    tl.store(sums + 2 * N + streams[:, None] * N + streams[None, :], tl.sum(sum_res, axis=0))
    tl.store(sums + C, tl.sum(d_scale_pre, axis=0))
    tl.store(sums + C + 1, tl.sum(d_scale_post, axis=0))
    tl.store(sums + C + 2, tl.sum(d_scale_res, axis=0))


@triton.jit
def mhc_pre_backward_streams(
    x_ptr, phi_ptr, ct_ptr, ct_x_ptr, pre_ptr, d_product_ptr, shrink_ptr, d_x_ptr, d_phi_ptr,
    tokens, width, pieces, splits, x_group, phi_group, ct_group, ct_x_group, pre_group,
    N: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr, HALVES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) // (splits * N * pieces)).to(tl.int64)
    split = (tl.program_id(0) // (N * pieces)) % splits
    stream = (tl.program_id(0) // pieces) % N
    columns = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    both_halves = tl.arange(0, HALVES * PADDED)
    coefficients = both_halves % PADDED
    phi = tl.load(
        phi_ptr + group * phi_group + (stream * width + columns)[None, :] * C + coefficients[:, None],
        mask=inside[None, :] & (coefficients < C)[:, None], other=0.0)  # fmt: skip
    if SPLIT:  # d_product phi = (d_high + d_low) high + d_high low, but for 2^-16 of it
        high = phi.to(tl.bfloat16)
        low = tl.where(both_halves[:, None] < PADDED, phi - high.to(tl.float32), 0.0).to(tl.bfloat16)
        if WIDE:
            low = low.to(tl.float32)
            high = high.to(tl.float32)
    else:
        high = phi
    d_phi = tl.zeros((BLOCK, HALVES * PADDED), dtype=tl.float32)
    row = tl.arange(0, ROWS)
    for p in tl.range(split, tl.cdiv(tokens, ROWS), splits, num_stages=STAGES):
        first = group * 0 + p * ROWS  # 64 bits
        here = row < tokens - first
        both = here[:, None] & inside[None, :]
        written = group * tokens + first
        tile = row[:, None] * (N * width) + stream * width + columns[None, :]
        x = tl.load(x_ptr + (group * x_group + first * N * width) + tile, mask=both, other=0.0)
        ct_x = tl.load(ct_x_ptr + (group * ct_x_group + first * N * width) + tile, mask=both, other=0.0)
        of_y = (group * ct_group + first * width) + row[:, None] * width + columns[None, :]
        ct = tl.load(ct_ptr + of_y, mask=both, other=0.0)
        d_product = tl.load(
            d_product_ptr + (written + row)[:, None] * (HALVES * PADDED) + both_halves[None, :],
            mask=here[:, None] & (coefficients < C)[None, :], other=0.0)  # fmt: skip
        h_pre = tl.load(pre_ptr + (group * pre_group + first * N) + row * N + stream, mask=here, other=0.0)
        shrink = tl.load(shrink_ptr + written + row, mask=here, other=0.0)
        turned = tl.trans(x)
        if WIDE:
            turned = turned.to(tl.float32)
            d_product = d_product.to(tl.float32)
        d_phi = tl.dot(turned, d_product, d_phi, input_precision="ieee")
        d_x = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        if SPLIT:
            d_x = tl.dot(d_product, low, d_x, input_precision="ieee")
        d_x = tl.dot(d_product, high, d_x, input_precision="ieee")
        d_x += ct_x.to(tl.float32) + h_pre[:, None] * ct.to(tl.float32) + shrink[:, None] * x.to(tl.float32)
        tl.store(d_x_ptr + written * (N * width) + tile, d_x.to(d_x_ptr.dtype.element_ty), mask=both)
    if HALVES == 2:
        d_phi = tl.sum(tl.reshape(d_phi, [BLOCK, 2, PADDED]), axis=1)
    coefficients = tl.arange(0, PADDED)
    tl.store(
        d_phi_ptr + (((group * splits + split) * N + stream) * width) * C + columns[:, None] * C
        + coefficients[None, :], d_phi, mask=inside[:, None] & (coefficients < C)[None, :])  # fmt: skip


def mhc_pre(x: Tensor, phi: Tensor, scale: Tensor, base: Tensor, eps: float, iterations: int) -> Pre:
    """The op."""
    weights = (w.to(torch.float32)[None] for w in (phi, scale, base))
    y, streams, h_post, h_res = _pre(x.flatten(0, 1)[None], *weights, eps, iterations)
    rows = x.shape[:2]
    return Pre(*(a[0].unflatten(0, rows) for a in (y, streams, h_post, h_res)))


def _pre_fwd(
    x: Tensor, phi: Tensor, scale: Tensor, base: Tensor, eps: float, iterations: int
) -> tuple[Pre, tuple[Tensor, ...]]:
    parts, squares = grouped(_launch_project, x, phi)
    coefficients = functools.partial(_launch_coefficients, eps, iterations, x.shape[-2] * x.shape[-1])
    pre, h_post, h_res, z, rrms = grouped(coefficients, parts, squares, scale, base)
    (y,) = grouped(_launch_mix, x, pre)
    return Pre(y, x, h_post, h_res), (x, phi, scale, base, pre, z, rrms)


def _pre_bwd(eps: float, iterations: int, residuals: tuple[Tensor, ...], ct: Pre) -> tuple[Tensor, ...]:
    del eps  # it is in rrms
    x, phi, scale, base, pre, z, rrms = residuals
    (d_pre,) = grouped(_launch_backward_mix, x, ct.y)
    coefficients = functools.partial(_launch_backward_coefficients, x, iterations)
    *per_token, sums = grouped(coefficients, d_pre, ct.h_post, ct.h_res, z, rrms, scale, base)
    d_x, d_phi = grouped(_launch_streams, x, phi, ct.y, ct.x, pre, *per_token)
    d_base, d_scale = sums.split((base.shape[-1], 3), -1)
    return d_x, d_phi, d_scale, d_base


_pre = custom_vjp(_pre_fwd, nondiff_argnums=(4, 5), opaque=True, name="mhc_pre (triton)").defvjp(_pre_fwd, _pre_bwd)


def _launch_project(*operands: Tensor) -> tuple[Tensor, ...]:
    x, phi = (a.contiguous() for a in operands)
    groups, (_, tokens, n, width), c = max(a.shape[0] for a in operands), x.shape, phi.shape[-1]
    tile, flat = _TILES[x.device.type].project, n * width
    row_tiles = triton.cdiv(tokens, tile.rows)
    free = programs(x.device, groups * max(1, row_tiles), triton.cdiv(flat, tile.columns), tile.per_core)
    splits = min(MOST_SPLITS, 1 << (free.bit_length() - 1))
    chunk = triton.cdiv(triton.cdiv(flat, splits), tile.columns) * tile.columns
    per_group = programs(x.device, groups, row_tiles * splits, tile.per_core)
    parts, squares = phi.new_empty((groups, splits, tokens, c)), phi.new_empty((groups, splits, tokens))
    mhc_pre_project[(groups * per_group,)](
        x, phi, parts, squares, tokens, flat, chunk, splits, per_group, step(x), step(phi),
        **given(mhc_pre_project, tile, x, n), num_stages=tile.stages)  # fmt: skip
    return parts, squares


def _launch_coefficients(eps: float, iterations: int, flat: int, *operands: Tensor) -> tuple[Tensor, ...]:
    parts, squares, scale, base = (a.contiguous() for a in operands)
    groups, (_, splits, tokens, c) = max(a.shape[0] for a in operands), parts.shape
    tile, n = _TILES[base.device.type].coefficients, num_streams(c)
    shapes = ((n,), (n,), (n, n), (c,), ())
    pre, h_post, h_res, z, rrms = (base.new_empty((groups, tokens, *rest)) for rest in shapes)
    per_group = programs(base.device, groups, triton.cdiv(tokens, tile.rows), tile.per_core)
    mhc_pre_coefficients[(groups * per_group,)](
        parts, squares, scale, base, pre, h_post, h_res, z, rrms, tokens, flat, iterations, per_group,
        *map(step, (parts, squares, scale, base)), eps,
        **given(mhc_pre_coefficients, tile, base, n, splits=splits))  # fmt: skip
    return pre, h_post, h_res, z, rrms


def _launch_mix(*operands: Tensor) -> tuple[Tensor, ...]:
    x, pre = (a.contiguous() for a in operands)
    groups, (_, tokens, n, width) = max(a.shape[0] for a in operands), x.shape
    tile, y = _TILES[x.device.type].mix, x.new_empty((groups, tokens, width))
    pieces = triton.cdiv(width, tile.columns)
    per_group = programs(x.device, groups, tokens * pieces, tile.per_core)
    mhc_pre_mix[(groups * per_group,)](
        x, pre, y, tokens, width, pieces, per_group, step(x), step(pre), **given(mhc_pre_mix, tile, x, n)
    )
    return (y,)


def _launch_backward_mix(*operands: Tensor) -> tuple[Tensor, ...]:
    x, ct = (a.contiguous() for a in operands)
    groups, (_, tokens, n, width) = max(a.shape[0] for a in operands), x.shape
    tile, d_pre = _TILES[x.device.type].backward_mix, x.new_empty((groups, tokens, n), dtype=torch.float32)
    per_group = programs(x.device, groups, tokens, tile.per_core)
    mhc_pre_backward_mix[(groups * per_group,)](
        x, ct, d_pre, tokens, width, per_group, step(x), step(ct), **given(mhc_pre_backward_mix, tile, x, n)
    )
    return (d_pre,)


def _launch_backward_coefficients(like: Tensor, iterations: int, *operands: Tensor) -> tuple[Tensor, ...]:
    d_pre, ct_post, ct_res, z, rrms, scale, base = (a.contiguous() for a in operands)
    groups, (_, tokens, n), c = max(a.shape[0] for a in operands), d_pre.shape, base.shape[-1]
    tile = _TILES[base.device.type].backward_coefficients
    constants = given(mhc_pre_backward_coefficients, tile, like, n, iterations)
    d_product = base.new_empty((groups, tokens, constants["HALVES"] * constants["PADDED"]), dtype=like.dtype)
    per_group = programs(base.device, groups, triton.cdiv(tokens, tile.rows), tile.per_core)
    shrink, sums = base.new_empty((groups, tokens)), base.new_empty((groups, per_group, c + 3))
    mhc_pre_backward_coefficients[(groups * per_group,)](
        d_pre, ct_post, ct_res, z, rrms, scale, base, d_product, shrink, sums,
        tokens, n * like.shape[-1], iterations, per_group,
        *map(step, (d_pre, ct_post, ct_res, z, rrms, scale, base)), **constants)  # fmt: skip
    return d_product, shrink, sums.sum(1)


def _launch_streams(*operands: Tensor) -> tuple[Tensor, ...]:
    x, phi, ct, ct_x, pre = (a.contiguous() for a in operands[:5])
    groups, (_, tokens, n, width), c = max(a.shape[0] for a in operands), x.shape, phi.shape[-1]
    d_product, shrink = (a.expand(groups, *a.shape[1:]).contiguous() for a in operands[5:])
    tile = of_streams(x.device.type, x.itemsize)
    pieces = triton.cdiv(width, tile.columns)
    splits = programs(x.device, groups * n * pieces, triton.cdiv(tokens, tile.rows), tile.per_core)
    d_x, d_phi = x.new_empty((groups, tokens, n, width)), phi.new_empty((groups, splits, n * width, c))
    mhc_pre_backward_streams[(groups * splits * n * pieces,)](
        x, phi, ct, ct_x, pre, d_product, shrink, d_x, d_phi,
        tokens, width, pieces, splits, *map(step, (x, phi, ct, ct_x, pre)),
        **given(mhc_pre_backward_streams, tile, x, n))  # fmt: skip
    return d_x, d_phi[:, 0] if splits == 1 else d_phi.sum(1)


def builds(kind: str) -> list[Build]:
    """What is compiled for 4 streams of width 5120 and 20 iterations on a kind of device."""
    forward = (mhc_pre_project, mhc_pre_coefficients, mhc_pre_mix)
    backward = (mhc_pre_backward_mix, mhc_pre_backward_coefficients, mhc_pre_backward_streams)
    return listed(kind, forward, backward)
