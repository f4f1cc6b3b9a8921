# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
"""SiTU in one pass each way, with the weight of each row inside where rows are expert rows.

First order only. The three functions share one reciprocal; near 0, where 1 - exp cancels, tanh is
its series. The gradient of a row's weight is a sum over the row, its columns in one order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.launch import Build, Tile, grouped, programs

__all__ = ["ActivationGrads", "accepts", "activation", "activation_grads", "builds", "situ_glu"]

# Per kind of device: (forward, backward).
_TILES = {
    "cuda": (
        Tile(warps=4, per_core=64, rows=2, columns=1024),
        Tile(warps=1, per_core=32, rows=1, columns=256),
    ),
    # One row a step ends Ascend's compiler where its weight's gradient is stored.
    "npu": (Tile(per_core=2, rows=1, columns=2048), Tile(rows=2, columns=512)),
    "cpu": (Tile(rows=4, columns=64), Tile(rows=4, columns=64)),
}


_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh(a):
    """Numerator and denominator of ``tanh(a)``; ``1 - tanh(a)^2`` times the latter's square."""
    # exp2, here and below: on CUDA exp takes four instructions more, for results below 2^-126.
    e = tl.exp2(tl.abs(a) * (-2.0 * _LOG2_E))
    small = tl.abs(a) < 0.125
    z = a * a
    # The next term is 17/315 z^3: 2e-7 of the value at 1/8.
    series = a * (1.0 + z * (-0.33333333 + z * 0.13333333))
    far = tl.where(a >= 0.0, 1.0 - e, e - 1.0)
    top = tl.where(small, series, far)
    # Not 1 - tanh^2, which cancels far from 0.
    return top, tl.where(small, 1.0, 1.0 + e), tl.where(small, 1.0 - top * top, 4.0 * e)


@triton.jit
def _sigmoid(a):
    """Numerators of ``1 / (1 + exp(-a))`` and of what it lacks to 1, between them their
    denominator.
    """
    e = tl.exp2(tl.abs(a) * (-_LOG2_E))
    return tl.where(a >= 0.0, 1.0, e), 1.0 + e, tl.where(a >= 0.0, e, 1.0)


@triton.jit
def _reciprocal(a):
    """``1 / a`` of a moderate positive ``a``: a division takes twice as many instructions."""
    root = tl.rsqrt(a)
    near = root * root
    return near * (2.0 - a * near)


@triton.jit
def situ_forward(
    gate_ptr,
    up_ptr,
    weight_ptr,
    order_ptr,
    y_ptr,
    rows,
    width,
    cuts,
    pieces,
    beta,
    linear_beta,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``y``, with WEIGHTED times ``weight[order]`` of each row."""
    r = tl.arange(0, ROWS)
    for p in range(tl.program_id(0), pieces, tl.num_programs(0)):
        first = (p // cuts) * ROWS
        column = (p % cuts) * BLOCK + tl.arange(0, BLOCK)
        there = r < rows - first
        here = there[:, None] & (column < width)[None, :]
        base = first.to(tl.int64) * width
        at = r[:, None] * width + column[None, :]
        gate = tl.load(gate_ptr + base + at, mask=here, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + base + at, mask=here, other=0.0).to(tl.float32)
        top_g, under_g, _ = _tanh(gate * (1.0 / beta))
        top_s, under_s, _ = _sigmoid(gate)
        top_u, under_u, _ = _tanh(up * (1.0 / linear_beta))
        over = _reciprocal(under_g * under_s * under_u)
        y = (top_g * top_s * top_u) * (over * (beta * linear_beta))
        if WEIGHTED:
            copy = tl.load(order_ptr + first + r, mask=there, other=0)
            y *= tl.load(weight_ptr + copy, mask=there, other=0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + base + at, y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def situ_backward(
    gate_ptr,
    up_ptr,
    weight_ptr,
    order_ptr,
    ct_ptr,
    d_gate_ptr,
    d_up_ptr,
    y_ptr,
    d_weight_ptr,
    rows,
    width,
    pieces,
    beta,
    linear_beta,
    WEIGHTED: tl.constexpr,
    AGAIN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of gate and up; with WEIGHTED of the rows' weights; with AGAIN ``y`` too."""
    r = tl.arange(0, ROWS)
    for p in range(tl.program_id(0), pieces, tl.num_programs(0)):
        first = p * ROWS
        there = r < rows - first
        base = first.to(tl.int64) * width
        copy = r
        weight = tl.full((ROWS,), 1.0, dtype=tl.float32)
        if WEIGHTED:
            copy = tl.load(order_ptr + first + r, mask=there, other=0)
            weight = tl.load(weight_ptr + copy, mask=there, other=0.0).to(tl.float32)
        along = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            here = there[:, None] & (column < width)[None, :]
            at = r[:, None] * width + column[None, :]
            gate = tl.load(gate_ptr + base + at, mask=here, other=0.0).to(tl.float32)
            up = tl.load(up_ptr + base + at, mask=here, other=0.0).to(tl.float32)
            ct = tl.load(ct_ptr + base + at, mask=here, other=0.0).to(tl.float32)
            top_g, under_g, rest_g = _tanh(gate * (1.0 / beta))
            top_s, under_s, rest_s = _sigmoid(gate)
            top_u, under_u, rest_u = _tanh(up * (1.0 / linear_beta))
            gated = under_g * under_s
            over = _reciprocal(gated * under_u)
            over_u = over * gated
            over_g = over * under_u * under_s
            over_s = over * under_u * under_g
            tanh_u = top_u * over_u
            tanh_g = top_g * over_g
            opened = top_s * over_s
            cut = ct * weight[:, None]
            slope = rest_g * over_g * over_g + beta * tanh_g * (rest_s * over_s)
            d_gate = cut * (linear_beta * tanh_u) * (opened * slope)
            d_up = cut * (beta * tanh_g) * (opened * (rest_u * over_u * over_u))
            tl.store(d_gate_ptr + base + at, d_gate.to(d_gate_ptr.dtype.element_ty), mask=here)
            tl.store(d_up_ptr + base + at, d_up.to(d_up_ptr.dtype.element_ty), mask=here)
            y = tanh_g * opened * tanh_u * (beta * linear_beta)
            if WEIGHTED:
                along += ct * y
            if AGAIN:
                y = (y * weight[:, None]).to(y_ptr.dtype.element_ty)
                tl.store(y_ptr + base + at, y, mask=here)
        if WEIGHTED:
            tl.store(d_weight_ptr + copy, tl.sum(along, axis=1), mask=there)


def accepts(gate: Tensor, up: Tensor, beta: float = 4.0, linear_beta: float = 25.0) -> str:
    """Why :func:`situ_glu` cannot run, or nothing."""
    del beta, linear_beta
    if gate.ndim < 1 or up.shape != gate.shape or up.dtype != gate.dtype:
        return (
            f"gate and up have one shape and dtype, got {list(gate.shape)} {gate.dtype} and "
            f"{list(up.shape)} {up.dtype}"
        )
    return ""


def situ_glu(gate: Tensor, up: Tensor, beta: float = 4.0, linear_beta: float = 25.0) -> Tensor:
    """The op; keeps its inputs."""
    width = gate.shape[-1]
    rows = (x.reshape(1, -1, width) for x in (gate, up))
    return _situ_glu(*rows, beta, linear_beta).view(gate.shape)


def _fwd(gate: Tensor, up: Tensor, *bounds: float) -> tuple[Tensor, Any]:
    return grouped(functools.partial(_launch_forward, bounds), gate, up)[0], (gate, up)


def _bwd(beta: float, linear_beta: float, residuals: Any, ct: Tensor) -> tuple[Tensor, ...]:
    launch = functools.partial(_launch_backward, (beta, linear_beta), False)
    return grouped(launch, *residuals, ct)


_situ_glu = custom_vjp(_fwd, _bwd, nondiff_argnums=(2, 3), opaque=True, name="situ_glu (triton)")


class ActivationGrads(NamedTuple):
    """Gradients of :func:`activation`, and its value again.

    Attributes:
        gate: ``[R F]``.
        up: likewise.
        weights: ``[N G]``; () where there are none.
        value: ``[R F]``.
    """

    gate: Tensor
    up: Tensor
    weights: Tensor | tuple[()]
    value: Tensor


def activation(
    gate: Tensor,
    up: Tensor,
    weights: Tensor | tuple[()],
    order: Tensor,
    bounds: tuple[float, float],
) -> Tensor:
    """``weights[order[r]] situ_glu(gate[r], up[r])``, rounded once; it has no gradient of its own.

    Args:
        gate: ``[R F]``.
        up: likewise.
        weights: of the copies, ``[N G]``; (): all 1.
        order: the copy in each row, ``[R]``.
        bounds: ``beta`` and ``linear_beta``.
    """
    given = [gate, up, *((weights, order) if isinstance(weights, Tensor) else ())]
    launch = functools.partial(_launch_forward, bounds)
    return grouped(launch, *(x[None] for x in given))[0].squeeze(0)


def activation_grads(
    gate: Tensor,
    up: Tensor,
    weights: Tensor | tuple[()],
    order: Tensor,
    ct: Tensor,
    bounds: tuple[float, float],
) -> ActivationGrads:
    """The gradients of :func:`activation`, for a cotangent ``ct [R F]``."""
    given = [gate, up, ct, *((weights, order) if isinstance(weights, Tensor) else ())]
    launch = functools.partial(_launch_backward, bounds, True)
    results = [x.squeeze(0) for x in grouped(launch, *(x[None] for x in given))]
    d_gate, d_up, value = results[:3]
    return ActivationGrads(d_gate, d_up, results[3] if len(results) > 3 else (), value)


def _whole(operands: tuple[Tensor, ...]) -> list[Tensor]:
    """Operands of each group; what samples share under vmap is copied for each."""
    groups = max(x.shape[0] for x in operands)
    return [x.expand(groups, *x.shape[1:]).contiguous() for x in operands]


def _launch_forward(bounds: tuple[float, float], *operands: Tensor) -> tuple[Tensor, ...]:
    """Of gate and up and, for one group, weights and order."""
    given = _whole(operands)
    gate, up = given[:2]
    weights, order = given[2:] or (gate, gate)  # not read
    y = torch.empty_like(gate)
    groups, count, width = gate.shape
    rows = groups * count
    tile = _TILES[gate.device.type][0]
    cuts = triton.cdiv(width, tile.columns)
    pieces = triton.cdiv(rows, tile.rows) * cuts
    situ_forward[(programs(gate.device, 1, pieces, tile.per_core),)](
        gate,
        up,
        weights,
        order,
        y,
        rows,
        width,
        cuts,
        pieces,
        *bounds,
        **_constants(tile, len(given) > 2),
        num_warps=tile.warps,
    )
    return (y,)


def _launch_backward(
    bounds: tuple[float, float], again: bool, *operands: Tensor
) -> tuple[Tensor, ...]:
    """Of gate, up and a cotangent and, for one group, weights and order."""
    given = _whole(operands)
    gate, up, ct = given[:3]
    has_weights = len(given) > 3
    weights, order = given[3:] or (gate, gate)  # not read
    d_gate = torch.empty_like(gate)
    d_up = torch.empty_like(up)
    # Where it is not asked for, what stands in its place is not written.
    y = torch.empty_like(gate) if again else d_gate
    d_weights = torch.zeros_like(weights, dtype=torch.float32) if has_weights else d_gate
    groups, count, width = gate.shape
    rows = groups * count
    tile = _TILES[gate.device.type][1]
    pieces = triton.cdiv(rows, tile.rows)
    situ_backward[(programs(gate.device, 1, pieces, tile.per_core),)](
        gate,
        up,
        weights,
        order,
        ct,
        d_gate,
        d_up,
        y,
        d_weights,
        rows,
        width,
        pieces,
        *bounds,
        **_constants(tile, has_weights),
        AGAIN=again,
        num_warps=tile.warps,
    )
    found = [d_gate, d_up, *((y,) if again else ())]
    return (*found, *((d_weights.to(weights.dtype),) if has_weights else ()))


def _constants(tile: Tile, has_weights: bool) -> dict[str, Any]:
    return {"WEIGHTED": has_weights, "ROWS": tile.rows, "BLOCK": tile.columns}


def builds(kind: str) -> list[Build]:
    """What is compiled on a kind of device: for layers, and for experts with weights."""
    listed: list[Build] = []
    one, other = _TILES[kind]
    for low in ("bf16", "fp32"):
        for has_weights in (False, True):
            shared = _constants(one, has_weights)
            listed.append(_build(situ_forward, low, shared, one))
            shared = {**_constants(other, has_weights), "AGAIN": has_weights}
            listed.append(_build(situ_backward, low, shared, other))
    return listed


def _build(kernel: Any, low: str, constants: dict[str, Any], tile: Tile) -> Build:
    names = [name for name in kernel.arg_names if name not in constants]
    types = {name: _type(name, low) for name in names}
    title = f"{kernel.__name__} {low}{' weighted' if constants['WEIGHTED'] else ''}"
    direction = "forward" if kernel is situ_forward else "backward"
    return Build(title, kernel, types, constants, direction, tile, ("width",))


def _type(name: str, low: str) -> str:
    """Triton's type of an argument, as layers and experts call it."""
    if not name.endswith("_ptr"):
        return "fp32" if name in ("beta", "linear_beta") else "i32"
    if name == "order_ptr":
        return "*i64"
    return "*fp32" if name in ("weight_ptr", "d_weight_ptr") else f"*{low}"
