# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""``rms_norm`` in one pass each way: ``x`` is read once, nothing but the inputs is kept.

First order only. The gradient of the weight is a sum over rows: each program sums ``CHUNK`` rows in
order, and torch adds the chunks, so its bits depend on the number of rows and on no device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.launch import Build, Tile, grouped, programs, step

__all__ = ["accepts", "builds", "rms_norm"]

CHUNK = 16
"""Rows that one partial sum of the weight's gradient covers."""

# Per kind of device: (forward, backward).
_TILES = {
    "cuda": (Tile(warps=8, per_core=8), Tile(warps=4, per_core=8)),
    "npu": (Tile(per_core=2), Tile()),
    "cpu": (Tile(), Tile()),
}
# A row is held in registers, or in the unified buffer.
_WIDEST = {"cuda": 16384, "npu": 4096, "cpu": 16384}


@triton.jit
def rms_norm_forward(
    x_ptr,
    weight_ptr,
    y_ptr,
    rows,
    per_group,
    x_group,
    weight_group,
    eps,
    D: tl.constexpr,
    PADDED: tl.constexpr,
):
    group = (tl.program_id(0) // per_group).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < D
    low = y_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + group * weight_group + column, mask=inside, other=0.0)
    weight = weight.to(low).to(tl.float32)
    for row in range(tl.program_id(0) % per_group, rows, per_group):
        first = (group * 0 + row) * D  # 64 bits
        x = tl.load(x_ptr + (group * x_group + first) + column, mask=inside, other=0.0)
        x = x.to(tl.float32)
        normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
        # Rounded before the weight, as the contract says.
        y = (normed.to(low).to(tl.float32) * weight).to(low)
        tl.store(y_ptr + (group * rows * D + first) + column, y, mask=inside)


@triton.jit
def rms_norm_backward(
    x_ptr,
    weight_ptr,
    ct_ptr,
    d_x_ptr,
    part_ptr,
    rows,
    chunks,
    per_group,
    x_group,
    weight_group,
    ct_group,
    eps,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    group = (tl.program_id(0) // per_group).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < D
    low = d_x_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + group * weight_group + column, mask=inside, other=0.0)
    weight = weight.to(low).to(tl.float32)
    for chunk in range(tl.program_id(0) % per_group, chunks, per_group):
        d_weight = tl.zeros((PADDED,), dtype=tl.float32)
        for i in range(0, tl.minimum(CHUNK, rows - chunk * CHUNK)):
            first = (group * 0 + chunk * CHUNK + i) * D  # 64 bits
            x = tl.load(x_ptr + (group * x_group + first) + column, mask=inside, other=0.0)
            ct = tl.load(ct_ptr + (group * ct_group + first) + column, mask=inside, other=0.0)
            x = x.to(tl.float32)
            ct = ct.to(tl.float32)
            inverse = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
            normed = x * inverse
            d_weight += ct * normed.to(low).to(tl.float32)
            d_normed = ct * weight
            mean = tl.sum(d_normed * normed, axis=0) / D
            d_x = inverse * (d_normed - normed * mean)
            tl.store(d_x_ptr + (group * rows * D + first) + column, d_x.to(low), mask=inside)
        part = part_ptr + (group * chunks + chunk) * D
        tl.store(part + column, d_weight, mask=inside)


def accepts(x: Tensor, weight: Tensor, eps: float) -> str:
    """Why :func:`rms_norm` cannot run, or nothing."""
    del eps
    if x.ndim < 1 or weight.shape != x.shape[-1:] or weight.dtype == torch.float64:
        return (
            f"x is [... D] and weight [D], at most float32, got {list(x.shape)} and "
            f"{list(weight.shape)} of {weight.dtype}"
        )
    widest = _WIDEST[x.device.type]
    if not 1 <= x.shape[-1] <= widest:
        return f"a row has 1 to {widest} elements, got {x.shape[-1]}"
    return ""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The op; contract in :mod:`k31fn.kernels.norm`."""
    return _rms_norm(x.reshape(1, -1, x.shape[-1]), weight[None], eps).view(x.shape)


def _fwd(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Any]:
    def launch(*operands: Tensor) -> tuple[Tensor, ...]:
        return (_launch_forward(eps, *operands),)

    return grouped(launch, x, weight)[0], (x, weight)


def _bwd(eps: float, residuals: Any, ct: Tensor) -> tuple[Tensor, ...]:
    def launch(*operands: Tensor) -> tuple[Tensor, ...]:
        return _launch_backward(eps, *operands)

    return grouped(launch, *residuals, ct)


_rms_norm = custom_vjp(_fwd, _bwd, nondiff_argnums=(2,), opaque=True, name="rms_norm (triton)")


def _launch_forward(eps: float, *operands: Tensor) -> Tensor:
    x, weight = (a.contiguous() for a in operands)
    groups = max(a.shape[0] for a in operands)
    _, rows, width = x.shape
    y = x.new_empty((groups, rows, width))
    tile = _TILES[x.device.type][0]
    per_group = programs(x.device, groups, rows, tile.per_core)
    rms_norm_forward[(groups * per_group,)](
        x,
        weight,
        y,
        rows,
        per_group,
        *map(step, (x, weight)),
        eps,
        **_constants(width),
        num_warps=_warps(tile, width),
    )
    return y


def _launch_backward(eps: float, *operands: Tensor) -> tuple[Tensor, ...]:
    x, weight, ct = (a.contiguous() for a in operands)
    groups = max(a.shape[0] for a in operands)
    _, rows, width = x.shape
    d_x = x.new_empty((groups, rows, width))
    chunks = triton.cdiv(rows, CHUNK)
    parts = weight.new_empty((groups, chunks, width), dtype=torch.float32)
    tile = _TILES[x.device.type][1]
    per_group = programs(x.device, groups, chunks, tile.per_core)
    rms_norm_backward[(groups * per_group,)](
        x,
        weight,
        ct,
        d_x,
        parts,
        rows,
        chunks,
        per_group,
        *map(step, (x, weight, ct)),
        eps,
        **_constants(width),
        CHUNK=CHUNK,
        num_warps=_warps(tile, width),
    )
    return d_x, parts.sum(1).to(weight.dtype)


def _constants(width: int) -> dict[str, int]:
    return {"D": width, "PADDED": triton.next_power_of_2(width)}


def _warps(tile: Tile, width: int) -> int:
    # In a narrow row most threads of many warps would have nothing to read.
    return min(tile.warps, max(1, triton.next_power_of_2(width) // 512))


def builds(kind: str) -> list[Build]:
    """What is compiled for widths of K3.1 Pro on a kind of device: the stream's where it fits, the
    experts' latent, and that of keys and values.
    """
    listed: list[Build] = []
    for low in ("bf16", "fp32"):
        for width in [w for w in (7168, 3584, 512) if w <= _WIDEST[kind]]:
            for kernel, tile, direction in zip(
                (rms_norm_forward, rms_norm_backward),
                _TILES[kind],
                ("forward", "backward"),
                strict=True,
            ):
                constants = _constants(width)
                if direction == "backward":
                    constants |= {"CHUNK": CHUNK}
                names = [name for name in kernel.arg_names if name not in constants]
                types = {name: _type(name, low) for name in names}
                cut = tile._replace(warps=_warps(tile, width))
                aligned = tuple(n for n in names if n.endswith("_group"))
                title = f"{kernel.__name__} {low} D{width}"
                listed.append(Build(title, kernel, types, constants, direction, cut, aligned))
    return listed


def _type(name: str, low: str) -> str:
    """Triton's type of an argument, as layers call the op."""
    if not name.endswith("_ptr"):
        return "fp32" if name == "eps" else "i32"
    return "*fp32" if name in ("weight_ptr", "part_ptr") else f"*{low}"
