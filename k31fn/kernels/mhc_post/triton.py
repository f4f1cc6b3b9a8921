# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""The update of hyper-connected streams: every stream is read once and written once, each way.

First order only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.launch import Build, Tile, grouped, programs, step

__all__ = ["builds", "mhc_post", "mhc_post_accepts"]

# chosen by measurement on an H200 (benchmarks/mhc.py --tune); on Ascend by its memory.
# per device kind: (forward, backward)
_TILES = {
    "cuda": (
        Tile(warps=2, per_core=32, columns=512, stages=1),
        Tile(warps=2, per_core=16, columns=512, stages=3),
    ),
    "npu": (Tile(per_core=2, columns=1024, stages=1), Tile(per_core=2, columns=1024, stages=1)),
    "cpu": (Tile(columns=16), Tile(columns=16)),
}

_ALIGNED = ("width", "x_group", "f_group", "post_group", "res_group")


@triton.jit
def mhc_post_forward(
    x_ptr,
    f_ptr,
    post_ptr,
    res_ptr,
    out_ptr,
    tokens,
    width,
    pieces,
    per_group,
    x_group,
    f_group,
    post_group,
    res_group,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    group = (tl.program_id(0) // per_group).to(tl.int64)
    streams = tl.arange(0, N)
    for p in tl.range(tl.program_id(0) % per_group, tokens * pieces, per_group, num_stages=STAGES):
        token = group * 0 + p // pieces  # 64 bits
        columns = (p % pieces) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        tile = streams[:, None] * width + columns[None, :]
        x = tl.load(
            x_ptr + (group * x_group + token * N * width) + tile, mask=inside[None, :], other=0.0
        )
        x = x.to(tl.float32)
        f = tl.load(f_ptr + (group * f_group + token * width) + columns, mask=inside, other=0.0).to(
            tl.float32
        )
        res = res_ptr + (group * res_group + token * N * N)
        post = post_ptr + (group * post_group + token * N)
        out = out_ptr + (group * tokens + token) * N * width
        # a result at a time: N results of a piece at once would take N times the registers
        for j in tl.static_range(N):
            weights = tl.load(res + streams * N + j)
            y = tl.load(post + j) * f + tl.sum(weights[:, None] * x, axis=0)
            tl.store(out + j * width + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def mhc_post_backward(
    x_ptr,
    f_ptr,
    post_ptr,
    res_ptr,
    ct_ptr,
    d_x_ptr,
    d_f_ptr,
    d_post_ptr,
    d_res_ptr,
    tokens,
    width,
    per_group,
    x_group,
    f_group,
    post_group,
    res_group,
    ct_group,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    FOLD: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    group = (tl.program_id(0) // per_group).to(tl.int64)
    streams = tl.arange(0, N)
    for t in range(tl.program_id(0) % per_group, tokens, per_group):
        token = group * 0 + t  # 64 bits
        written = group * tokens + token
        res = res_ptr + (group * res_group + token * N * N)
        post = post_ptr + (group * post_group + token * N)
        # a token's coefficients are loaded once, before the pieces of its features; on Ascend with
        # each piece
        if AHEAD:
            of_x = ()
            of_f = ()
            for j in tl.static_range(N):
                of_x += (tl.load(res + streams * N + j),)
                of_f += (tl.load(post + j),)
        # sums of a few features each, folded at the end: a sum over a piece is exchanged between
        # all threads
        d_post = tl.zeros((N, BLOCK // FOLD), dtype=tl.float32)
        d_res = tl.zeros((N, N, BLOCK // FOLD), dtype=tl.float32)
        for start in tl.range(0, width, BLOCK, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            tile = streams[:, None] * width + columns[None, :]
            x = tl.load(
                x_ptr + (group * x_group + token * N * width) + tile,
                mask=inside[None, :],
                other=0.0,
            )
            x = x.to(tl.float32)
            f = tl.load(
                f_ptr + (group * f_group + token * width) + columns, mask=inside, other=0.0
            ).to(tl.float32)
            d_x = tl.zeros((N, BLOCK), dtype=tl.float32)
            d_f = tl.zeros((BLOCK,), dtype=tl.float32)
            # a cotangent's stream at a time, while the N streams of x stay in registers
            for j in tl.static_range(N):
                row = ct_ptr + (group * ct_group + (token * N + j) * width)
                ct = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
                if AHEAD:
                    d_x += of_x[j][:, None] * ct[None, :]
                    d_f += of_f[j] * ct
                else:
                    weights = tl.load(res + streams * N + j)
                    d_x += weights[:, None] * ct[None, :]
                    d_f += tl.load(post + j) * ct
                if FOLD == BLOCK:
                    along_f = tl.sum(ct * f, axis=0)
                    along_x = tl.sum(x * ct[None, :], axis=1)[:, None]
                    d_post = tl.where(streams[:, None] == j, d_post + along_f, d_post)
                else:
                    along_f = tl.sum(tl.reshape(ct * f, [BLOCK // FOLD, FOLD]), axis=1)
                    along_x = tl.sum(tl.reshape(x * ct[None, :], [N, BLOCK // FOLD, FOLD]), axis=2)
                    d_post = tl.where(streams[:, None] == j, d_post + along_f[None, :], d_post)
                d_res = tl.where(streams[None, :, None] == j, d_res + along_x[:, None, :], d_res)
            tl.store(
                d_x_ptr + written * N * width + tile,
                d_x.to(d_x_ptr.dtype.element_ty),
                mask=inside[None, :],
            )
            tl.store(
                d_f_ptr + written * width + columns, d_f.to(d_f_ptr.dtype.element_ty), mask=inside
            )
        tl.store(d_post_ptr + written * N + streams, tl.sum(d_post, axis=1))
        tl.store(
            d_res_ptr + written * N * N + streams[:, None] * N + streams[None, :],
            tl.sum(d_res, axis=2),
        )


def mhc_post_accepts(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> str:
    """Why :func:`mhc_post` cannot run, or nothing."""
    if x.ndim != 4 or not x.shape[-1]:
        return f"streams are [B, T, N, D], got {list(x.shape)}"
    *tokens, n, width = x.shape
    shapes = [list(a.shape) for a in (f, h_post, h_res)]
    wanted = [[*tokens, width], [*tokens, n], [*tokens, n, n]]
    if shapes != wanted:
        return f"f, h_post and h_res must be {wanted} for streams {list(x.shape)}, got {shapes}"
    if n not in (2, 4, 8):
        return f"it has 2, 4 or 8 streams, got {x.shape[-2]}"
    if f.dtype != x.dtype:
        return f"streams and the sublayer's output have one dtype, got {x.dtype} and {f.dtype}"
    return ""


def mhc_post(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """The op."""
    # [1 group, tokens, ...]: a vmap around it makes more groups
    flat = [a.flatten(0, 1)[None] for a in (x, f, h_post, h_res)]
    return _post(*flat).view(x.shape)


def _post_fwd(*args: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    (out,) = grouped(_launch_forward, *args)
    return out, args  # the inputs alone: the update is linear in each of them


def _post_bwd(residuals: tuple[Tensor, ...], ct: Tensor) -> tuple[Tensor, ...]:
    return grouped(_launch_backward, *residuals, ct)


_post = custom_vjp(_post_fwd, _post_bwd, opaque=True, name="mhc_post (triton)")


def _launch_forward(*operands: Tensor) -> tuple[Tensor, ...]:
    x, f, post, res = map(Tensor.contiguous, operands)
    groups = max(a.shape[0] for a in operands)
    _, tokens, n, width = x.shape
    out = x.new_empty((groups, tokens, n, width))
    tile = _TILES[x.device.type][0]
    pieces = triton.cdiv(width, tile.columns)
    # pieces of tokens are independent here; the backward sums along a token, and takes it whole
    per_group = programs(x.device, groups, tokens * pieces, tile.per_core)
    mhc_post_forward[(groups * per_group,)](
        x,
        f,
        post,
        res,
        out,
        tokens,
        width,
        pieces,
        per_group,
        *map(step, (x, f, post, res)),
        N=n,
        BLOCK=tile.columns,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return (out,)


def _launch_backward(*operands: Tensor) -> tuple[Tensor, ...]:
    x, f, post, res, ct = map(Tensor.contiguous, operands)
    groups = max(a.shape[0] for a in operands)
    _, tokens, n, width = x.shape
    # the kernel writes all of them, so nothing is set first
    grads = [a.new_empty((groups, *a.shape[1:])) for a in (x, f, post, res)]
    tile = _TILES[x.device.type][1]
    per_group = programs(x.device, groups, tokens, tile.per_core)
    mhc_post_backward[(groups * per_group,)](
        x,
        f,
        post,
        res,
        ct,
        *grads,
        tokens,
        width,
        per_group,
        *map(step, (x, f, post, res, ct)),
        N=n,
        **_cut(x.device.type, tile, x.itemsize),
        num_warps=tile.warps,
    )
    return tuple(grads)


def _cut(kind: str, tile: Tile, itemsize: int) -> dict[str, int]:
    """Constants of the kernels. On Ascend each piece is summed at once; elsewhere a thread keeps
    sums of the 16 bytes that it loads.
    """
    # 16 bytes are one load of a thread, so these sums need no exchange between threads
    return {
        "BLOCK": tile.columns,
        "FOLD": tile.columns if kind == "npu" else 16 // itemsize,
        "STAGES": tile.stages,
        "AHEAD": kind != "npu",
    }


def builds(kind: str) -> list[Build]:
    """Kernels to compile for 4 streams of width 5120 on a kind of device."""
    one, other = _TILES[kind]
    listed = []
    for dtype, itemsize in (("bf16", 2), ("fp32", 4)):
        for kernel, direction, tile in (
            (mhc_post_forward, "forward", one),
            (mhc_post_backward, "backward", other),
        ):
            constants: dict[str, int] = {"N": 4}
            for name, value in _cut(kind, tile, itemsize).items():
                if name in kernel.arg_names:
                    constants[name] = value
            signature = {}
            for name in kernel.arg_names:
                if name not in constants:
                    signature[name] = _type(name, dtype)
            name = f"{kernel.__name__} {dtype} N4 D5120"
            listed.append(Build(name, kernel, signature, constants, direction, tile, _ALIGNED))
    return listed


def _type(name: str, dtype: str) -> str:
    """Coefficients and their gradients are float32, other tensors in the model's dtype."""
    if not name.endswith("_ptr"):
        return "i32"
    return "*fp32" if name.removesuffix("_ptr").endswith(("post", "res")) else f"*{dtype}"
