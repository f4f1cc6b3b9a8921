# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The read of hyper-connected streams in two kernels: the products with ``phi``, and all that follows from them.

The products are split along the streams too, so that a short sequence fills the device; the parts are added in a fixed
order. With bfloat16 streams ``phi`` is taken as a sum of three bfloat16 numbers, whose products are exact in float32:
the result is that of a float32 product, on the matrix units. The backward has a kernel for the coefficients (through
Sinkhorn, undone step by step from its row and column sums) and one for the streams and ``phi``. First order only.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff import custom_vjp
from k31fn.kernels.launch import INTERPRETED, Build, Tile, grouped, programs, step
from k31fn.kernels.mhc_pre.reference import SINKHORN_EPS, Pre

__all__ = ["builds", "mhc_pre", "mhc_pre_accepts"]

_MOST_ITERATIONS = 64
_MOST_SPLITS = 16


class _Tiles(NamedTuple):
    """One per kernel, for bfloat16; ``streams`` takes half the columns of float32, whose product needs more registers.

    ``rows`` of ``project`` and ``streams`` are at least 16: they are sides of a product.
    """

    project: Tile
    mix: Tile
    scores: Tile
    streams: Tile


_TILES = {
    "cuda": _Tiles(
        project=Tile(warps=4, per_core=2, rows=64, columns=64, stages=3),
        mix=Tile(warps=4, per_core=8, columns=1024),
        scores=Tile(warps=4, per_core=8, columns=1024),
        streams=Tile(warps=8, per_core=4, rows=32, columns=128, stages=2),
    ),
    "npu": _Tiles(
        project=Tile(rows=64, columns=128),
        mix=Tile(per_core=2, rows=8, columns=256),
        scores=Tile(per_core=2, rows=4, columns=256),
        streams=Tile(rows=32, columns=128),
    ),
    "cpu": _Tiles(
        project=Tile(rows=16, columns=16),
        mix=Tile(rows=4, columns=16),
        scores=Tile(rows=4, columns=16),
        streams=Tile(rows=16, columns=32),
    ),
}


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
def mhc_pre_project(
    x_ptr, phi_ptr, part_ptr, square_ptr,
    tokens, flat, chunk, splits, per_group, x_group, phi_group,
    C: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
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
        squares = tl.zeros((ROWS,), dtype=tl.float32)
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
            squares += tl.sum(wide * wide, axis=1)
        part = (group * splits + split) * tokens + first
        tl.store(
            part_ptr + part * C + rows[:, None] * C + coefficients[None, :], products,
            mask=here[:, None] & (coefficients < C)[None, :])  # fmt: skip
        tl.store(square_ptr + part + rows, squares, mask=here)


@triton.jit
def _sigmoid(a):
    e = tl.exp(-tl.abs(a))
    return tl.where(a >= 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def _softmax(a):
    e = tl.exp(a - tl.max(a, axis=2)[:, :, None])
    return e / tl.sum(e, axis=2)[:, :, None]


@triton.jit
def mhc_pre_mix(
    x_ptr, part_ptr, square_ptr, scale_ptr, base_ptr, y_ptr, post_ptr, res_ptr, z_ptr, rrms_ptr,
    tokens, width, iterations, per_group, x_group, part_group, square_group, scale_group, base_group, norm_eps,
    N: tl.constexpr, C: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) // per_group).to(tl.int64)
    scale = scale_ptr + group * scale_group
    base = base_ptr + group * base_group
    streams = tl.arange(0, N)
    row = tl.arange(0, ROWS)[:, None]
    of_pre = row * C + streams[None, :]
    of_res = row[:, :, None] * C + 2 * N + streams[None, :, None] * N + streams[None, None, :]
    for p in range(tl.program_id(0) % per_group, tl.cdiv(tokens, ROWS), per_group):
        first = group * 0 + p * ROWS  # 64 bits
        here = tl.arange(0, ROWS) < tokens - first
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
            squares += tl.load(square + tl.arange(0, ROWS), mask=here, other=0.0)
        rrms = 1.0 / tl.sqrt(squares / (N * width) + norm_eps)
        z_pre = z_pre * rrms[:, None]
        z_post = z_post * rrms[:, None]
        z_res = z_res * rrms[:, None, None]
        written = group * tokens + first
        tl.store(rrms_ptr + written + tl.arange(0, ROWS), rrms, mask=here)
        tl.store(z_ptr + written * C + of_pre, z_pre, mask=there)
        tl.store(z_ptr + written * C + of_pre + N, z_post, mask=there)
        tl.store(z_ptr + written * C + of_res, z_res, mask=everywhere)

        h_pre = _sigmoid(tl.load(scale) * z_pre + tl.load(base + streams)[None, :]) + EPS
        h_post = 2.0 * _sigmoid(tl.load(scale + 1) * z_post + tl.load(base + N + streams)[None, :])
        bias = tl.load(base + 2 * N + streams[:, None] * N + streams[None, :])
        m = _softmax(tl.load(scale + 2) * z_res + bias[None, :, :]) + EPS
        m = m / (tl.sum(m, axis=1) + EPS)[:, None, :]
        for _ in range(iterations - 1):
            m = m / (tl.sum(m, axis=2) + EPS)[:, :, None]
            m = m / (tl.sum(m, axis=1) + EPS)[:, None, :]
        tl.store(post_ptr + written * N + row * N + streams[None, :], h_post, mask=there)
        of_m = row[:, :, None] * (N * N) + streams[None, :, None] * N + streams[None, None, :]
        tl.store(res_ptr + written * (N * N) + of_m, m, mask=everywhere)

        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            x = tl.load(
                x_ptr + (group * x_group + first * N * width)
                + row[:, :, None] * (N * width) + streams[None, :, None] * width + columns[None, None, :],
                mask=there[:, :, None] & inside[None, None, :], other=0.0).to(tl.float32)  # fmt: skip
            y = tl.sum(x * h_pre[:, :, None], axis=1)
            tl.store(
                y_ptr + written * width + row * width + columns[None, :], y.to(y_ptr.dtype.element_ty),
                mask=here[:, None] & inside[None, :])  # fmt: skip


@triton.jit
def mhc_pre_backward_scores(
    x_ptr, ct_ptr, ct_post_ptr, ct_res_ptr, z_ptr, rrms_ptr, scale_ptr, base_ptr,
    pre_ptr, d_product_ptr, shrink_ptr, d_base_ptr, d_scale_ptr,
    tokens, width, iterations, per_group,
    x_group, ct_group, ct_post_group, ct_res_group, z_group, rrms_group, scale_group, base_group,
    N: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) // per_group).to(tl.int64)
    scale = scale_ptr + group * scale_group
    base = base_ptr + group * base_group
    scale_pre = tl.load(scale)
    scale_post = tl.load(scale + 1)
    scale_res = tl.load(scale + 2)
    streams = tl.arange(0, N)
    row = tl.arange(0, ROWS)[:, None]
    of_pre = row * C + streams[None, :]
    of_res = row[:, :, None] * C + 2 * N + streams[None, :, None] * N + streams[None, None, :]
    number = tl.arange(0, SUMS)[None, :, None]
    sum_pre = tl.zeros((N,), dtype=tl.float32)
    sum_post = tl.zeros((N,), dtype=tl.float32)
    sum_res = tl.zeros((N, N), dtype=tl.float32)
    d_scale_pre = 0.0
    d_scale_post = 0.0
    d_scale_res = 0.0
    for p in range(tl.program_id(0) % per_group, tl.cdiv(tokens, ROWS), per_group):
        first = group * 0 + p * ROWS  # 64 bits
        here = tl.arange(0, ROWS) < tokens - first
        there = here[:, None] & (streams >= 0)[None, :]
        everywhere = there[:, :, None] & (streams >= 0)[None, None, :]
        d_pre = tl.zeros((ROWS, N), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            x = tl.load(
                x_ptr + (group * x_group + first * N * width)
                + row[:, :, None] * (N * width) + streams[None, :, None] * width + columns[None, None, :],
                mask=there[:, :, None] & inside[None, None, :], other=0.0).to(tl.float32)  # fmt: skip
            ct = tl.load(
                ct_ptr + (group * ct_group + first * width) + row * width + columns[None, :],
                mask=here[:, None] & inside[None, :], other=0.0).to(tl.float32)  # fmt: skip
            d_pre += tl.sum(x * ct[:, None, :], axis=2)

        z = z_ptr + (group * z_group + first * C)
        z_pre = tl.load(z + of_pre, mask=there, other=0.0)
        z_post = tl.load(z + of_pre + N, mask=there, other=0.0)
        z_res = tl.load(z + of_res, mask=everywhere, other=0.0)
        rrms = tl.load(rrms_ptr + (group * rrms_group + first) + tl.arange(0, ROWS), mask=here, other=0.0)
        of_post = row * N + streams[None, :]
        d_post = tl.load(ct_post_ptr + (group * ct_post_group + first * N) + of_post, mask=there, other=0.0)
        of_m = row[:, :, None] * (N * N) + streams[None, :, None] * N + streams[None, None, :]
        d_m = tl.load(ct_res_ptr + (group * ct_res_group + first * N * N) + of_m, mask=everywhere, other=0.0)

        s_pre = _sigmoid(scale_pre * z_pre + tl.load(base + streams)[None, :])
        s_post = _sigmoid(scale_post * z_post + tl.load(base + N + streams)[None, :])
        bias = tl.load(base + 2 * N + streams[:, None] * N + streams[None, :])
        soft = _softmax(scale_res * z_res + bias[None, :, :])
        m = soft + EPS
        of_columns = tl.zeros((ROWS, SUMS, N), dtype=tl.float32)
        of_rows = tl.zeros((ROWS, SUMS, N), dtype=tl.float32)
        sums = tl.sum(m, axis=1) + EPS
        of_columns = tl.where(number == 0, sums[:, None, :], of_columns)
        m = m / sums[:, None, :]
        for k in range(1, iterations):
            sums = tl.sum(m, axis=2) + EPS
            of_rows = tl.where(number == k, sums[:, None, :], of_rows)
            m = m / sums[:, :, None]
            sums = tl.sum(m, axis=1) + EPS
            of_columns = tl.where(number == k, sums[:, None, :], of_columns)
            m = m / sums[:, None, :]
        for k in range(1, iterations):  # undone, the last first
            back = number == iterations - k
            sums = tl.sum(tl.where(back, of_columns, 0.0), axis=1)
            d_m = (d_m - tl.sum(d_m * m, axis=1)[:, None, :]) / sums[:, None, :]
            m = m * sums[:, None, :]
            sums = tl.sum(tl.where(back, of_rows, 0.0), axis=1)
            d_m = (d_m - tl.sum(d_m * m, axis=2)[:, :, None]) / sums[:, :, None]
            m = m * sums[:, :, None]
        sums = tl.sum(tl.where(number == 0, of_columns, 0.0), axis=1)
        d_m = (d_m - tl.sum(d_m * m, axis=1)[:, None, :]) / sums[:, None, :]

        a_pre = tl.where(there, d_pre * s_pre * (1.0 - s_pre), 0.0)
        a_post = tl.where(there, 2.0 * d_post * s_post * (1.0 - s_post), 0.0)
        a_res = tl.where(everywhere, soft * (d_m - tl.sum(d_m * soft, axis=2)[:, :, None]), 0.0)
        along_pre = tl.sum(a_pre * z_pre, axis=1)
        along_post = tl.sum(a_post * z_post, axis=1)
        along_res = tl.sum(tl.sum(a_res * z_res, axis=2), axis=1)
        shrink = scale_pre * along_pre + scale_post * along_post + scale_res * along_res
        shrink = -shrink * rrms * rrms / (N * width)
        written = group * tokens + first
        tl.store(shrink_ptr + written + tl.arange(0, ROWS), shrink, mask=here)
        tl.store(pre_ptr + written * N + of_post, s_pre + EPS, mask=there)
        d_product = d_product_ptr + written * C
        tl.store(d_product + of_pre, scale_pre * a_pre * rrms[:, None], mask=there)
        tl.store(d_product + of_pre + N, scale_post * a_post * rrms[:, None], mask=there)
        tl.store(d_product + of_res, scale_res * a_res * rrms[:, None, None], mask=everywhere)
        sum_pre += tl.sum(a_pre, axis=0)
        sum_post += tl.sum(a_post, axis=0)
        sum_res += tl.sum(a_res, axis=0)
        d_scale_pre += tl.sum(along_pre, axis=0)
        d_scale_post += tl.sum(along_post, axis=0)
        d_scale_res += tl.sum(along_res, axis=0)
    d_base = d_base_ptr + tl.program_id(0) * C
    tl.store(d_base + streams, sum_pre)
    tl.store(d_base + N + streams, sum_post)
    tl.store(d_base + 2 * N + streams[:, None] * N + streams[None, :], sum_res)
    d_scale = d_scale_ptr + tl.program_id(0) * 3
    tl.store(d_scale, d_scale_pre)
    tl.store(d_scale + 1, d_scale_post)
    tl.store(d_scale + 2, d_scale_res)


@triton.jit
def mhc_pre_backward_streams(
    x_ptr, phi_ptr, ct_ptr, ct_x_ptr, pre_ptr, d_product_ptr, shrink_ptr, d_x_ptr, d_phi_ptr,
    tokens, width, pieces, splits, x_group, phi_group, ct_group, ct_x_group,
    N: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) // (splits * N * pieces)).to(tl.int64)
    split = (tl.program_id(0) // (N * pieces)) % splits
    stream = (tl.program_id(0) // pieces) % N
    columns = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    coefficients = tl.arange(0, PADDED)
    phi = tl.load(
        phi_ptr + group * phi_group + (stream * width + columns)[None, :] * C + coefficients[:, None],
        mask=inside[None, :] & (coefficients < C)[:, None], other=0.0)  # fmt: skip
    d_phi = tl.zeros((BLOCK, PADDED), dtype=tl.float32)
    row = tl.arange(0, ROWS)
    for p in range(split, tl.cdiv(tokens, ROWS), splits):
        first = group * 0 + p * ROWS  # 64 bits
        here = row < tokens - first
        both = here[:, None] & inside[None, :]
        written = group * tokens + first
        tile = row[:, None] * (N * width) + stream * width + columns[None, :]
        x = tl.load(x_ptr + (group * x_group + first * N * width) + tile, mask=both, other=0.0)
        ct_x = tl.load(ct_x_ptr + (group * ct_x_group + first * N * width) + tile, mask=both, other=0.0).to(tl.float32)
        of_y = (group * ct_group + first * width) + row[:, None] * width + columns[None, :]
        ct = tl.load(ct_ptr + of_y, mask=both, other=0.0).to(tl.float32)
        d_product = tl.load(
            d_product_ptr + written * C + row[:, None] * C + coefficients[None, :],
            mask=here[:, None] & (coefficients < C)[None, :], other=0.0)  # fmt: skip
        h_pre = tl.load(pre_ptr + written * N + row * N + stream, mask=here, other=0.0)
        shrink = tl.load(shrink_ptr + written + row, mask=here, other=0.0)
        d_x = ct_x + h_pre[:, None] * ct + shrink[:, None] * x.to(tl.float32)
        if SPLIT:
            high = d_product.to(tl.bfloat16)
            low = (d_product - high.to(tl.float32)).to(tl.bfloat16)
            d_x = _product(high, phi, d_x, SPLIT, WIDE)
            d_x = _product(low, phi, d_x, SPLIT, WIDE)
        else:
            d_x = _product(d_product, phi, d_x, SPLIT, WIDE)
        tl.store(d_x_ptr + written * (N * width) + tile, d_x.to(d_x_ptr.dtype.element_ty), mask=both)
        d_phi = _product(tl.trans(x), d_product, d_phi, SPLIT, WIDE)
    tl.store(
        d_phi_ptr + (((group * splits + split) * N + stream) * width) * C + columns[:, None] * C
        + coefficients[None, :], d_phi, mask=inside[:, None] & (coefficients < C)[None, :])  # fmt: skip


def mhc_pre_accepts(x: Tensor, phi: Tensor, scale: Tensor, base: Tensor, eps: float, iterations: int) -> str:
    """Why :func:`mhc_pre` cannot run, or nothing."""
    del scale, base, eps
    if x.shape[-2] not in (2, 4, 8):
        return f"it has 2, 4 or 8 streams, got {x.shape[-2]}"
    if not 1 <= iterations <= _MOST_ITERATIONS:
        return f"it keeps the sums of 1 to {_MOST_ITERATIONS} iterations, got {iterations}"
    if phi.shape[0] != x.shape[-2] * x.shape[-1]:
        return f"phi {list(phi.shape)} is not that of streams {list(x.shape)}"
    return ""


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
    y, h_post, h_res, z, rrms = grouped(functools.partial(_launch_mix, eps, iterations), x, parts, squares, scale, base)
    return Pre(y, x, h_post, h_res), (x, phi, scale, base, z, rrms)


def _pre_bwd(eps: float, iterations: int, residuals: tuple[Tensor, ...], ct: Pre) -> tuple[Tensor, ...]:
    del eps  # it is in rrms
    x, phi, scale, base, z, rrms = residuals
    scores = functools.partial(_launch_scores, iterations)
    *per_token, d_base, d_scale = grouped(scores, x, ct.y, ct.h_post, ct.h_res, z, rrms, scale, base)
    d_x, d_phi = grouped(_launch_streams, x, phi, ct.y, ct.x, *per_token)
    return d_x, d_phi, d_scale, d_base


_pre = custom_vjp(_pre_fwd, nondiff_argnums=(4, 5), opaque=True, name="mhc_pre (triton)").defvjp(_pre_fwd, _pre_bwd)


def _launch_project(*operands: Tensor) -> tuple[Tensor, ...]:
    x, phi = (a.contiguous() for a in operands)
    groups, (_, tokens, n, width), c = max(a.shape[0] for a in operands), x.shape, phi.shape[-1]
    tile, flat = _TILES[x.device.type].project, n * width
    row_tiles = triton.cdiv(tokens, tile.rows)
    free = programs(x.device, groups * max(1, row_tiles), triton.cdiv(flat, tile.columns), tile.per_core)
    splits = min(_MOST_SPLITS, 1 << (free.bit_length() - 1))
    chunk = triton.cdiv(triton.cdiv(flat, splits), tile.columns) * tile.columns
    per_group = programs(x.device, groups, row_tiles * splits, tile.per_core)
    parts = phi.new_empty((groups, splits, tokens, c))
    squares = phi.new_empty((groups, splits, tokens))
    mhc_pre_project[(groups * per_group,)](
        x, phi, parts, squares, tokens, flat, chunk, splits, per_group, step(x), step(phi),
        **_constants(x.dtype is torch.bfloat16, c), **_cut(tile), num_stages=tile.stages)  # fmt: skip
    return parts, squares


def _launch_mix(eps: float, iterations: int, *operands: Tensor) -> tuple[Tensor, ...]:
    x, parts, squares, scale, base = (a.contiguous() for a in operands)
    groups, (_, tokens, n, width) = max(a.shape[0] for a in operands), x.shape
    tile, (splits, _, c) = _TILES[x.device.type].mix, parts.shape[1:]
    y = x.new_empty((groups, tokens, width))
    h_post, h_res, z = (base.new_empty((groups, tokens, *rest)) for rest in ((n,), (n, n), (c,)))
    rrms = base.new_empty((groups, tokens))
    per_group = programs(x.device, groups, triton.cdiv(tokens, tile.rows), tile.per_core)
    mhc_pre_mix[(groups * per_group,)](
        x, parts, squares, scale, base, y, h_post, h_res, z, rrms, tokens, width, iterations, per_group,
        *map(step, (x, parts, squares, scale, base)), eps,
        N=n, C=c, SPLITS=splits, EPS=SINKHORN_EPS, **_cut(tile))  # fmt: skip
    return y, h_post, h_res, z, rrms


def _launch_scores(iterations: int, *operands: Tensor) -> tuple[Tensor, ...]:
    x, ct, ct_post, ct_res, z, rrms, scale, base = (a.contiguous() for a in operands)
    groups, (_, tokens, n, width), c = max(a.shape[0] for a in operands), x.shape, base.shape[-1]
    tile = _TILES[x.device.type].scores
    pre, d_product = (base.new_empty((groups, tokens, k)) for k in (n, c))
    shrink = base.new_empty((groups, tokens))
    per_group = programs(x.device, groups, triton.cdiv(tokens, tile.rows), tile.per_core)
    d_base, d_scale = (base.new_empty((groups, per_group, k)) for k in (c, 3))
    mhc_pre_backward_scores[(groups * per_group,)](
        x, ct, ct_post, ct_res, z, rrms, scale, base, pre, d_product, shrink, d_base, d_scale,
        tokens, width, iterations, per_group, *map(step, (x, ct, ct_post, ct_res, z, rrms, scale, base)),
        N=n, C=c, SUMS=triton.next_power_of_2(iterations), EPS=SINKHORN_EPS, **_cut(tile))  # fmt: skip
    return pre, d_product, shrink, d_base.sum(1), d_scale.sum(1)


def _launch_streams(*operands: Tensor) -> tuple[Tensor, ...]:
    x, phi, ct, ct_x = (a.contiguous() for a in operands[:4])
    groups, (_, tokens, n, width), c = max(a.shape[0] for a in operands), x.shape, phi.shape[-1]
    pre, d_product, shrink = (a.expand(groups, *a.shape[1:]).contiguous() for a in operands[4:])
    tile = _of_streams(x.device.type, x.itemsize)
    pieces = triton.cdiv(width, tile.columns)
    splits = programs(x.device, groups * n * pieces, triton.cdiv(tokens, tile.rows), tile.per_core)
    d_x = x.new_empty((groups, tokens, n, width))
    d_phi = phi.new_empty((groups, splits, n * width, c))
    mhc_pre_backward_streams[(groups * splits * n * pieces,)](
        x, phi, ct, ct_x, pre, d_product, shrink, d_x, d_phi,
        tokens, width, pieces, splits, *map(step, (x, phi, ct, ct_x)),
        N=n, **_constants(x.dtype is torch.bfloat16, c), **_cut(tile), num_stages=tile.stages)  # fmt: skip
    return d_x, d_phi.sum(1)


def _of_streams(kind: str, itemsize: int) -> Tile:
    tile = _TILES[kind].streams
    return tile._replace(columns=tile.columns * 2 // itemsize)


def _cut(tile: Tile) -> dict[str, int]:
    return {"ROWS": tile.rows, "BLOCK": tile.columns, "num_warps": tile.warps}


def _constants(split: bool, columns: int) -> dict[str, int]:
    return {"C": columns, "PADDED": max(16, triton.next_power_of_2(columns)), "SPLIT": split, "WIDE": INTERPRETED}


_ALIGNED = ("width", "flat", "chunk", "x_group", "phi_group", "ct_group", "ct_x_group")


def builds(kind: str) -> list[Build]:
    """What is compiled for 4 streams of width 5120 and 20 iterations on a kind of device."""
    tiles, found = _TILES[kind], []
    for dtype, itemsize in (("bf16", 2), ("fp32", 4)):

        def add(direction: Any, kernel: Any, tile: Tile, dtype: str = dtype) -> None:
            given = {**_constants(dtype == "bf16", 24), "ROWS": tile.rows, "BLOCK": tile.columns}
            given |= {"N": 4, "SPLITS": _MOST_SPLITS, "SUMS": 32, "EPS": SINKHORN_EPS}
            constants = {k: v for k, v in given.items() if k in kernel.arg_names}
            signature = {k: _type(k, dtype) for k in kernel.arg_names if k not in constants}
            name = f"{kernel.__name__} {dtype} N4 D5120"
            found.append(Build(name, kernel, signature, constants, direction, tile, _ALIGNED))

        add("forward", mhc_pre_project, tiles.project)
        add("forward", mhc_pre_mix, tiles.mix)
        add("backward", mhc_pre_backward_scores, tiles.scores)
        add("backward", mhc_pre_backward_streams, _of_streams(kind, itemsize))
    return found


def _type(name: str, dtype: str) -> str:
    """Streams and what the sublayer reads are in the model's dtype; all else is float32, or an integer."""
    if name in ("x_ptr", "y_ptr", "ct_ptr", "ct_x_ptr", "d_x_ptr"):
        return f"*{dtype}"
    return "*fp32" if name.endswith("_ptr") else "fp32" if name == "norm_eps" else "i32"
