# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The read of hyper-connected streams: products with ``phi``, coefficients, mix. Backward: two
kernels and sums.

The products are split along the streams too, so that a short sequence fills the device; the parts
are added in a fixed order. With bfloat16 streams ``phi`` is taken as a sum of three bfloat16
numbers, whose products are exact in float32: the result is that of a float32 product, on the matrix
units. Coefficients are few numbers and many dependent steps: some programs do them, for several
tokens at a time, beside those that mix, which need ``h_pre`` alone and have it of their own. First
order only.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.launch import Build, grid, grouped, programs, share, step
from k31fn.kernels.mhc_pre.reference import Pre
from k31fn.kernels.mhc_pre.triton.arithmetic import cut, forth, sigmoid, softmax
from k31fn.kernels.mhc_pre.triton.backward import (
    mhc_pre_backward_mix,
    mhc_pre_backward_streams,
    mhc_pre_backward_sums,
)
from k31fn.kernels.mhc_pre.triton.tiles import (
    MOST_SPLITS,
    TILES,
    accepts,
    dealt,
    filling,
    given,
    listed,
    of_streams,
)

__all__ = ["accepts", "builds", "mhc_pre"]

_TILES = TILES  # by kind of device


@triton.jit
def _product(a, b, acc, SPLIT: tl.constexpr, WIDE: tl.constexpr):
    """``acc + a b`` in float32 arithmetic. SPLIT: a is bfloat16 and b the sum of three; WIDE: the
    interpreter's dot.
    """
    if SPLIT:
        high, rest = cut(b)
        middle, rest = cut(rest)
        low, rest = cut(rest)
        if WIDE:
            a = a.to(tl.float32)
            high = high.to(tl.float32)
            middle = middle.to(tl.float32)
            low = low.to(tl.float32)
        # the smallest first, so that its digits are not lost beside the large sum
        acc = tl.dot(a, low, acc, input_precision="ieee")
        acc = tl.dot(a, middle, acc, input_precision="ieee")
        acc = tl.dot(a, high, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def mhc_pre_project(
    x_ptr,
    phi_ptr,
    part_ptr,
    square_ptr,
    tokens,
    flat,
    chunk,
    splits,
    per_group,
    x_group,
    phi_group,
    C: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FOLD: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Parts of the products ``x phi`` and of the squares' sum; a program has a tile of tokens, a
    range of features.
    """
    group = (tl.program_id(0) // per_group).to(tl.int64)
    coefficients = tl.arange(0, PADDED)  # C is 2 N + N N, which is no power of two
    # pieces of work, tokens outermost: programs side by side read the same tile of tokens
    for p in range(tl.program_id(0) % per_group, tl.cdiv(tokens, ROWS) * splits, per_group):
        first = group * 0 + (p // splits) * ROWS  # 64 bits
        split = p % splits
        rows = tl.arange(0, ROWS)
        here = rows < tokens - first
        products = tl.zeros((ROWS, PADDED), dtype=tl.float32)
        # sums of FOLD features each, added up once at the end of the range
        squares = tl.zeros((ROWS, BLOCK // FOLD), dtype=tl.float32)
        for start in range(split * chunk, tl.minimum(flat, split * chunk + chunk), BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(
                x_ptr + (group * x_group + first * flat) + rows[:, None] * flat + columns[None, :],
                mask=here[:, None] & (columns < flat)[None, :],
                other=0.0,
            )
            phi = tl.load(
                phi_ptr + group * phi_group + columns[:, None] * C + coefficients[None, :],
                mask=(columns < flat)[:, None] & (coefficients < C)[None, :],
                other=0.0,
            )
            # what lies past the streams is 0 in both factors, and adds nothing
            products = _product(x, phi, products, SPLIT, WIDE)
            wide = x.to(tl.float32)
            # x is in registers already: a kernel of its own would read the streams once more
            if FOLD == BLOCK:
                squares += tl.sum(wide * wide, axis=1)[:, None]
            else:
                squares += tl.sum(tl.reshape(wide * wide, [ROWS, BLOCK // FOLD, FOLD]), axis=2)
        part = (group * splits + split) * tokens + first
        tl.store(
            part_ptr + part * C + rows[:, None] * C + coefficients[None, :],
            products,
            mask=here[:, None] & (coefficients < C)[None, :],
        )
        tl.store(square_ptr + part + rows, tl.sum(squares, axis=1), mask=here)


@triton.jit
def mhc_pre_mix(
    x_ptr,
    part_ptr,
    square_ptr,
    scale_ptr,
    base_ptr,
    y_ptr,
    pre_ptr,
    post_ptr,
    res_ptr,
    z_ptr,
    rrms_ptr,
    tokens,
    width,
    iterations,
    per_group,
    apart,
    x_group,
    part_group,
    square_group,
    scale_group,
    base_group,
    norm_eps,
    N: tl.constexpr,
    C: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adds the parts. Coefficients and Sinkhorn for ROWS tokens at a time; then ``y``, for a token
    at a time.
    """
    group = (tl.program_id(0) // per_group).to(tl.int64)
    mine = tl.program_id(0) % per_group
    scale = scale_ptr + group * scale_group
    base = base_ptr + group * base_group
    streams = tl.arange(0, N)
    row = tl.arange(0, ROWS)
    of_pre = row[:, None] * C + streams[None, :]
    pair = streams[None, :, None] * N + streams[None, None, :]
    of_res = row[:, None, None] * C + 2 * N + pair
    flat = N * width
    # with many programs only the first `apart` have such a tile; the others begin to mix at once
    for p in range(mine, tl.cdiv(tokens, ROWS), per_group):
        first = group * 0 + p * ROWS  # 64 bits
        here = row < tokens - first
        there = here[:, None] & (streams >= 0)[None, :]
        everywhere = there[:, :, None] & (streams >= 0)[None, None, :]
        squares = tl.zeros((ROWS,), dtype=tl.float32)
        z_pre = tl.zeros((ROWS, N), dtype=tl.float32)
        z_post = tl.zeros((ROWS, N), dtype=tl.float32)
        z_res = tl.zeros((ROWS, N, N), dtype=tl.float32)
        # the parts in ascending order: the same bits whatever the grid
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
        # rrms and z are for the backward, which starts from them and not from the products
        tl.store(rrms_ptr + written + row, rrms, mask=here)
        tl.store(z_ptr + written * C + of_pre, z_pre, mask=there)
        tl.store(z_ptr + written * C + of_pre + N, z_post, mask=there)
        tl.store(z_ptr + written * C + of_res, z_res, mask=everywhere)

        h_pre = sigmoid(tl.load(scale) * z_pre + tl.load(base + streams)[None, :]) + EPS
        h_post = 2.0 * sigmoid(tl.load(scale + 1) * z_post + tl.load(base + N + streams)[None, :])
        bias = tl.load(base + 2 * N + streams[:, None] * N + streams[None, :])
        m = softmax(tl.load(scale + 2) * z_res + bias[None, :, :]) + EPS
        # the first iteration divides by columns alone: a softmax's rows sum to 1
        m = m * (1.0 / (tl.sum(m, axis=1) + EPS))[:, None, :]
        for _ in range(iterations - 1):
            m, _rows, _columns = forth(m, EPS)
        of_post = row[:, None] * N + streams[None, :]
        tl.store(pre_ptr + written * N + of_post, h_pre, mask=there)
        tl.store(post_ptr + written * N + of_post, h_post, mask=there)
        tl.store(
            res_ptr + written * (N * N) + row[:, None, None] * (N * N) + pair, m, mask=everywhere
        )

    # second kind of work: y, token by token, for which one program holds a piece of all streams
    split = tl.arange(0, SPLITS)
    bias_pre = tl.load(base + streams)
    scale_pre = tl.load(scale)
    for t in range(tl.where(mine < apart, tokens, mine - apart), tokens, per_group - apart):
        token = group * 0 + t  # 64 bits
        part = part_ptr + (group * part_group + token * C)
        # h_pre again, for this token: cheaper than to wait for the program that stores it
        products = tl.sum(tl.load(part + split[:, None] * (tokens * C) + streams[None, :]), axis=0)
        squares = tl.sum(
            tl.load(square_ptr + (group * square_group + token) + split * tokens), axis=0
        )
        h_pre = (
            sigmoid(scale_pre * (products * (1.0 / tl.sqrt(squares / flat + norm_eps))) + bias_pre)
            + EPS
        )
        for start in tl.range(0, width, BLOCK, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            tile = streams[:, None] * width + columns[None, :]
            x = tl.load(
                x_ptr + (group * x_group + token * N * width) + tile,
                mask=inside[None, :],
                other=0.0,
            )
            y = tl.sum(x.to(tl.float32) * h_pre[:, None], axis=0).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + (group * tokens + token) * width + columns, y, mask=inside)


def mhc_pre(
    x: Tensor, phi: Tensor, scale: Tensor, base: Tensor, eps: float, iterations: int
) -> Pre:
    """The op."""
    weights = [w.to(torch.float32)[None] for w in (phi, scale, base)]
    # [1 group, tokens, ...]: a vmap around it makes more groups
    flat = _pre(x.flatten(0, 1)[None], *weights, eps, iterations)
    return Pre(*(a.squeeze(0).unflatten(0, x.shape[:2]) for a in flat))


def _pre_fwd(
    x: Tensor, phi: Tensor, scale: Tensor, base: Tensor, eps: float, iterations: int
) -> tuple[Pre, tuple[Tensor, ...]]:
    # two launches: the sum over the whole token has to be there before any coefficient
    parts = grouped(_launch_project, x, phi)
    mix = functools.partial(_launch_mix, eps, iterations)
    y, h_post, h_res, *residuals = grouped(mix, x, *parts, scale, base)
    # x is a result too: its cotangent comes here, and one kernel adds it to this op's gradient
    return Pre(y, x, h_post, h_res), (x, phi, scale, base, *residuals)


def _pre_bwd(
    eps: float, iterations: int, residuals: tuple[Tensor, ...], ct: Pre
) -> tuple[Tensor, ...]:
    del eps  # it is in rrms
    x, phi, scale, base, pre, z, rrms = residuals
    mix = functools.partial(_launch_backward_mix, iterations)
    # three launches: coefficients, streams and phi, and the sums over the programs of both
    *per_token, sums = grouped(mix, x, ct.y, ct.h_post, ct.h_res, z, rrms, scale, base)
    d_x, parts = grouped(_launch_streams, x, phi, ct.y, ct.x, pre, *per_token)
    d_phi, total = grouped(_launch_sums, parts, sums)
    d_base, d_scale = total.split((base.shape[-1], 3), -1)
    return d_x, d_phi, d_scale, d_base


_pre = custom_vjp(_pre_fwd, _pre_bwd, nondiff_argnums=(4, 5), opaque=True, name="mhc_pre (triton)")


def _groups(operands: tuple[Tensor, ...]) -> int:
    """Samples under ``vmap``; an operand that they share has a group of 1."""
    return max(a.shape[0] for a in operands)


def _launch_project(*operands: Tensor) -> tuple[Tensor, ...]:
    x, phi = map(Tensor.contiguous, operands)
    groups = _groups(operands)
    _, tokens, n, width = x.shape
    c = phi.shape[-1]
    flat = n * width
    tile = _TILES[x.device.type].project
    row_tiles = triton.cdiv(tokens, tile.rows)
    # programs that the tiles of tokens leave idle take a part of the features each
    free = share(
        x.device, groups * max(1, row_tiles), triton.cdiv(flat, tile.columns), tile.per_core
    )
    # a power of two, as the kernel that adds the parts takes them as a tile
    splits = min(MOST_SPLITS, 1 << (free.bit_length() - 1))
    chunk = triton.cdiv(triton.cdiv(flat, splits), tile.columns) * tile.columns
    per_group = programs(x.device, groups, row_tiles * splits, tile.per_core)
    parts = phi.new_empty((groups, splits, tokens, c))
    squares = phi.new_empty((groups, splits, tokens))
    mhc_pre_project[(groups * per_group,)](
        x,
        phi,
        parts,
        squares,
        tokens,
        flat,
        chunk,
        splits,
        per_group,
        step(x),
        step(phi),
        **given(mhc_pre_project, tile, x, n),
        num_stages=tile.stages,
    )
    return parts, squares


def _launch_mix(eps: float, iterations: int, *operands: Tensor) -> tuple[Tensor, ...]:
    x, parts, squares, scale, base = map(Tensor.contiguous, operands)
    groups = _groups(operands)
    _, tokens, n, width = x.shape
    tile = _TILES[x.device.type].mix
    y = x.new_empty((groups, tokens, width))
    h_post = base.new_empty((groups, tokens, n))
    h_res = base.new_empty((groups, tokens, n, n))
    pre = base.new_empty((groups, tokens, n))
    z = base.new_empty((groups, tokens, base.shape[-1]))
    rrms = base.new_empty((groups, tokens))
    per_group, apart = dealt(tile, x, groups)
    mhc_pre_mix[(groups * per_group,)](
        x,
        parts,
        squares,
        scale,
        base,
        y,
        pre,
        h_post,
        h_res,
        z,
        rrms,
        tokens,
        width,
        iterations,
        per_group,
        apart,
        *map(step, (x, parts, squares, scale, base)),
        eps,
        **given(mhc_pre_mix, tile, x, n, splits=parts.shape[1]),
    )
    return y, h_post, h_res, pre, z, rrms


def _launch_backward_mix(iterations: int, *operands: Tensor) -> tuple[Tensor, ...]:
    x, ct, ct_post, ct_res, z, rrms, scale, base = map(Tensor.contiguous, operands)
    groups = _groups(operands)
    _, tokens, n, width = x.shape
    c = base.shape[-1]
    tile = _TILES[x.device.type].backward_mix
    constants = given(mhc_pre_backward_mix, tile, x, n, iterations)
    d_product = x.new_empty((groups, tokens, constants["HALVES"] * constants["PADDED"]))
    per_group, apart = dealt(tile, x, groups)
    shrink = base.new_empty((groups, tokens, 2))
    sums = base.new_empty((groups, c + 3, per_group))  # of base and the three scales
    mhc_pre_backward_mix[(groups * per_group,)](
        x,
        ct,
        ct_post,
        ct_res,
        z,
        rrms,
        scale,
        base,
        d_product,
        shrink,
        sums,
        tokens,
        width,
        iterations,
        per_group,
        apart,
        *map(step, (x, ct, ct_post, ct_res, z, rrms, scale, base)),
        **constants,
    )
    return d_product, shrink, sums


def _launch_streams(*operands: Tensor) -> tuple[Tensor, ...]:
    x, phi, ct, ct_x, pre = map(Tensor.contiguous, operands[:5])
    groups = _groups(operands)
    _, tokens, n, width = x.shape
    c = phi.shape[-1]
    # these have no step from group to group in the kernel, so each group has its own
    d_product, shrink = (a.expand(groups, *a.shape[1:]).contiguous() for a in operands[5:])
    tile = of_streams(x.device.type, x.itemsize)
    pieces = triton.cdiv(width, tile.columns)
    splits = filling(tile, x, groups * n * pieces)
    d_x = x.new_empty((groups, tokens, n, width))
    parts = phi.new_empty((groups, splits, n * width, c))
    mhc_pre_backward_streams[grid(groups * splits * n * pieces, groups)](
        x,
        phi,
        ct,
        ct_x,
        pre,
        d_product,
        shrink,
        d_x,
        parts,
        tokens,
        width,
        pieces,
        splits,
        *map(step, (x, phi, ct, ct_x, pre)),
        **given(mhc_pre_backward_streams, tile, x, n),
    )
    return d_x, parts


def _launch_sums(*operands: Tensor) -> tuple[Tensor, ...]:
    groups = _groups(operands)
    parts, sums = (a.expand(groups, *a.shape[1:]).contiguous() for a in operands)
    d_phi = parts.new_empty((groups, *parts.shape[2:]))
    total = sums.new_empty(sums.shape[:2])
    tile = _TILES[parts.device.type].sums
    size = parts[0, 0].numel()
    pieces = triton.cdiv(size, tile.columns)
    per_group = programs(parts.device, groups, pieces + sums.shape[1], tile.per_core)
    mhc_pre_backward_sums[(groups * per_group,)](
        parts,
        sums,
        d_phi,
        total,
        size,
        pieces,
        *sums.shape[1:],
        per_group,
        **given(mhc_pre_backward_sums, tile, parts, 0, splits=parts.shape[1]),
    )
    return d_phi, total


def builds(kind: str) -> list[Build]:
    """Kernels to compile for 4 streams of width 5120 and 20 iterations on a kind of device."""
    forward = (mhc_pre_project, mhc_pre_mix)
    backward = (mhc_pre_backward_mix, mhc_pre_backward_streams, mhc_pre_backward_sums)
    return listed(kind, forward, backward)
