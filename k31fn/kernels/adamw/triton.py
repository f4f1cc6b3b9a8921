# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""AdamW in one pass: parameter, gradient and moments are read once and written once.

Of a bfloat16 parameter the rounding's bits are drawn in the same pass
(:mod:`k31fn.kernels.philox.triton`). An element's bits depend on no tile and no grid.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.kernels.adamw.reference import Constants, Moved
from k31fn.kernels.launch import Build, Tile, grid, grouped, programs
from k31fn.kernels.philox.reference import Draws
from k31fn.kernels.philox.triton.blocks import Blocks, places, rounded, words_of
from k31fn.kernels.philox.triton.blocks import accepts as accepts_draws

__all__ = ["accepts", "adamw_step", "builds"]

# per kind of device: elements at once, and blocks of four where the parameter is rounded
_TILES = {
    "cuda": (Tile(warps=4, per_core=16, columns=1024), Tile(warps=4, per_core=16, rows=256)),
    "npu": (Tile(per_core=2, columns=1024), Tile(per_core=2, rows=128)),
    "cpu": (Tile(columns=64), Tile(rows=16)),
}
_DTYPES = (torch.bfloat16, torch.float32)


@triton.jit
def _one_minus_power(t, log_beta):
    """``1 - beta^t``, to the last digits also where it is small."""
    x = t * log_beta
    near = tl.maximum(x, -0.5)  # the powers of what is far would overflow
    series = near * 0 + 1.0
    for n in tl.static_range(8):
        series = 1.0 + series * near / (9 - n)
    return tl.where(x > -0.5, -near * series, 1.0 - tl.exp(x))


@triton.jit
def _scalars(step_ptr, lr_ptr, scale_ptr, log1, log2, decay, SCALED: tl.constexpr):
    """What a step multiplies with: the gradient, the parameter, mu, and nu."""
    t = tl.load(step_ptr)
    lr = tl.load(lr_ptr)
    scale = t * 0 + 1.0
    if SCALED:
        scale = tl.load(scale_ptr)
    return scale, 1.0 - lr * decay, lr / _one_minus_power(t, log1), 1.0 / _one_minus_power(t, log2)


@triton.jit
def _tiles(total, skip_ptr, SIZE: tl.constexpr, SKIPS: tl.constexpr):
    """Tiles of so many elements; none where the step is skipped."""
    count = tl.cdiv(total, SIZE)
    if SKIPS:
        count = tl.where(tl.load(skip_ptr).to(tl.int32) != 0, 0, count)
    return count


@triton.jit
def _stepped(p, g, mu, nu, scale, shrunk, rate, inverse2, rest1, rest2, eps):
    # Each sum has one product, which a compiler may fuse with it: with two, one build fuses the one
    # and another the other, and a part would not have the bits of the whole.
    g = g.to(tl.float32) * scale
    mu = mu.to(tl.float32)
    nu = nu.to(tl.float32)
    mu = mu + rest1 * (g - mu)
    nu = nu + rest2 * (g * g - nu)
    p = shrunk * p.to(tl.float32) - rate * mu / (tl.sqrt(nu * inverse2) + eps)
    return p, mu, nu


@triton.jit
def adamw_plain(
    p_ptr,
    g_ptr,
    mu_ptr,
    nu_ptr,
    step_ptr,
    lr_ptr,
    scale_ptr,
    skip_ptr,
    rest1,
    log1,
    rest2,
    log2,
    eps,
    decay,
    total,
    SPAN: tl.constexpr,
    SCALED: tl.constexpr,
    SKIPS: tl.constexpr,
):
    scale, shrunk, rate, inverse2 = _scalars(step_ptr, lr_ptr, scale_ptr, log1, log2, decay, SCALED)
    at = tl.arange(0, SPAN)
    zero = tl.program_id(0).to(tl.int64) * 0
    for t in range(tl.program_id(0), _tiles(total, skip_ptr, SPAN, SKIPS), tl.num_programs(0)):
        base = (zero + t) * SPAN  # 64 bits: 2^31 elements are passed
        inside = base + at < total
        p = tl.load(p_ptr + base + at, mask=inside, other=0.0)
        g = tl.load(g_ptr + base + at, mask=inside, other=0.0)
        mu = tl.load(mu_ptr + base + at, mask=inside, other=0.0)
        nu = tl.load(nu_ptr + base + at, mask=inside, other=0.0)
        p, mu, nu = _stepped(p, g, mu, nu, scale, shrunk, rate, inverse2, rest1, rest2, eps)
        tl.store(p_ptr + base + at, p, mask=inside)
        tl.store(mu_ptr + base + at, mu.to(mu_ptr.dtype.element_ty), mask=inside)
        tl.store(nu_ptr + base + at, nu.to(nu_ptr.dtype.element_ty), mask=inside)


@triton.jit
def adamw_rounded(
    p_ptr,
    g_ptr,
    mu_ptr,
    nu_ptr,
    step_ptr,
    lr_ptr,
    scale_ptr,
    skip_ptr,
    rest1,
    log1,
    rest2,
    log2,
    eps,
    decay,
    key_ptr,
    total,
    per_row,
    width,
    lead,
    first_block,
    first_row,
    inner,
    inner_whole,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    CUT: tl.constexpr,
    SCALED: tl.constexpr,
    SKIPS: tl.constexpr,
):
    scale, shrunk, rate, inverse2 = _scalars(step_ptr, lr_ptr, scale_ptr, log1, log2, decay, SCALED)
    for t in range(tl.program_id(0), _tiles(total, skip_ptr, BLOCKS, SKIPS), tl.num_programs(0)):
        base, at, inside, row, block = places(t, total, per_row, width, lead, BLOCKS, WHOLE)
        p = tl.load(p_ptr + base + at, mask=inside, other=0.0)
        g = tl.load(g_ptr + base + at, mask=inside, other=0.0)
        mu = tl.load(mu_ptr + base + at, mask=inside, other=0.0)
        nu = tl.load(nu_ptr + base + at, mask=inside, other=0.0)
        words = words_of(row, block, key_ptr, first_block, first_row, inner, inner_whole, CUT)
        p, mu, nu = _stepped(p, g, mu, nu, scale, shrunk, rate, inverse2, rest1, rest2, eps)
        tl.store(p_ptr + base + at, rounded(p, words), mask=inside)
        tl.store(mu_ptr + base + at, mu.to(mu_ptr.dtype.element_ty), mask=inside)
        tl.store(nu_ptr + base + at, nu.to(nu_ptr.dtype.element_ty), mask=inside)


def accepts(
    p: Tensor,
    g: Tensor,
    mu: Tensor,
    nu: Tensor,
    step: Tensor,
    lr: float | Tensor,
    constants: Constants,
    scale: Tensor | None = None,
    skip: Tensor | None = None,
    draws: Draws | None = None,
) -> str:
    """Why :func:`adamw_step` cannot run, or nothing."""
    del step, lr, constants, scale, skip
    if not all(x.is_contiguous() for x in (p, mu, nu)):
        return "p, mu and nu, which are written in place, must be contiguous"
    if any(x.dtype not in _DTYPES for x in (g, mu, nu)):
        return f"g, mu and nu are bfloat16 or float32, got {[str(x.dtype) for x in (g, mu, nu)]}"
    if p.dtype != torch.bfloat16:
        return ""
    if draws is None:
        return "a bfloat16 parameter has draws, by which it is rounded"
    return accepts_draws(tuple(p.shape), draws)


def adamw_step(
    p: Tensor,
    g: Tensor,
    mu: Tensor,
    nu: Tensor,
    step: Tensor,
    lr: float | Tensor,
    constants: Constants,
    scale: Tensor | None = None,
    skip: Tensor | None = None,
    draws: Draws | None = None,
) -> Moved:
    """The op."""
    rate = _on_device(lr, p.device)
    # a pointer that is not read: the constants say so
    factor = step if scale is None else scale.to(torch.float32)
    skipped = step if skip is None else skip.view(torch.uint8)
    numbers = _floats(constants)
    flags = {"SCALED": scale is not None, "SKIPS": skip is not None}
    plain, narrow = _TILES[p.device.type]

    def launch(*operands: Tensor) -> tuple[Tensor, ...]:
        pointers = (*operands, step, rate, factor, skipped)
        if p.dtype != torch.bfloat16 or draws is None:
            count = programs(p.device, 1, triton.cdiv(p.numel(), plain.columns), plain.per_core)
            adamw_plain[grid(count, 1)](
                *pointers,
                *numbers,
                p.numel(),
                SPAN=plain.columns,
                **flags,
                num_warps=plain.warps,
            )
            return operands
        blocks = Blocks.of(tuple(p.shape), draws)
        count = programs(p.device, 1, triton.cdiv(blocks.total, narrow.rows), narrow.per_core)
        adamw_rounded[grid(count, 1)](
            *pointers,
            *numbers,
            draws.key,
            *blocks,
            BLOCKS=narrow.rows,
            **blocks.constants,
            **flags,
            num_warps=narrow.warps,
        )
        return operands

    grouped(launch, p.detach(), g.contiguous(), mu, nu)
    return p, mu, nu


def _on_device(lr: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(lr, Tensor):
        return lr.to(device, torch.float32)
    return torch.full((), lr, dtype=torch.float32, device=device)


def _floats(constants: Constants) -> tuple[float, ...]:
    beta1, beta2, eps, decay = constants
    numbers: list[float] = []
    for beta in (beta1, beta2):
        # of 0 a finite number whose power is 0 too
        numbers += [1 - beta, math.log(beta) if beta else -1e4]
    return (*numbers, eps, decay)


def builds(kind: str) -> list[Build]:
    """What is compiled for a clipped step that may be skipped, on a kind of device."""
    plain, narrow = _TILES[kind]
    floats = ("rest1", "log1", "rest2", "log2", "eps", "decay")
    numbers = {"step_ptr": "*fp32", "lr_ptr": "*fp32", "scale_ptr": "*fp32", "skip_ptr": "*u8"}
    numbers |= dict.fromkeys(floats, "fp32")
    flags = {"SCALED": True, "SKIPS": True}
    listed = []
    for gradient, state in (("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")):
        moments = {"g_ptr": f"*{gradient}", "mu_ptr": f"*{state}", "nu_ptr": f"*{state}"}
        listed.append(
            Build(
                f"adamw_plain g {gradient} moments {state}",
                adamw_plain,
                {"p_ptr": "*fp32", **moments, **numbers, "total": "i32"},
                {"SPAN": plain.columns, **flags},
                "forward",
                plain,
                ("total",),
            )
        )
        for whole, cut in ((True, False), (False, True)):
            sizes = dict.fromkeys(Blocks._fields, "i32")
            listed.append(
                Build(
                    f"adamw_rounded g {gradient} moments {state} {'whole' if whole else 'part'}",
                    adamw_rounded,
                    {"p_ptr": "*bf16", **moments, **numbers, "key_ptr": "*i64", **sizes},
                    {"BLOCKS": narrow.rows, "WHOLE": whole, "CUT": cut, **flags},
                    "forward",
                    narrow,
                    ("width",),
                )
            )
    return listed
