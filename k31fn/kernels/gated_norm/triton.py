# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""The gated norm in one pass each way: ``o`` and ``gate`` are read once, nothing else is kept.

First order only. A row is a token's head. The gradient of the weight is a sum over rows: each
program sums ``CHUNK`` rows in order, and torch adds the chunks, so its bits depend on the number
of rows and on no device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.launch import Build, Tile, grouped, programs, step
from k31fn.kernels.mhc_pre.triton.arithmetic import sigmoid

__all__ = ["accepts", "builds", "gated_norm"]

CHUNK = 512
"""Rows that one partial sum of the weight's gradient covers."""

# Per kind of device: (forward, backward).
_TILES = {
    "cuda": (Tile(warps=8, per_core=16, rows=16), Tile(warps=8, per_core=8, rows=16)),
    "npu": (Tile(per_core=2, rows=16), Tile(per_core=2, rows=8)),
    "cpu": (Tile(rows=4), Tile(rows=4)),
}
_WIDEST = 1024  # a row is held in registers


@triton.jit
def gated_norm_forward(
    o_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    rows,
    per_group,
    o_group,
    gate_group,
    weight_group,
    eps,
    V: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    group = (tl.program_id(0) // per_group).to(tl.int64)
    columns = tl.arange(0, PADDED)
    inside = columns < V
    weight = tl.load(weight_ptr + group * weight_group + columns, mask=inside, other=0.0)
    weight = weight.to(tl.float32)
    for t in range(tl.program_id(0) % per_group, tl.cdiv(rows, ROWS), per_group):
        first = group * 0 + t * ROWS  # 64 bits: all rows together pass 2^31 elements
        row = tl.arange(0, ROWS)
        here = (first + row < rows)[:, None] & inside[None, :]
        at = row[:, None] * V + columns[None, :]
        o = tl.load(o_ptr + (group * o_group + first * V) + at, mask=here, other=0.0)
        gate = tl.load(gate_ptr + (group * gate_group + first * V) + at, mask=here, other=0.0)
        o = o.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(o * o, axis=1) / V + eps)
        y = o * inverse[:, None] * sigmoid(gate.to(tl.float32)) * weight[None, :]
        out = y_ptr + (group * rows + first) * V
        tl.store(out + at, y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def gated_norm_backward(
    o_ptr,
    gate_ptr,
    weight_ptr,
    ct_ptr,
    d_o_ptr,
    d_gate_ptr,
    part_ptr,
    rows,
    chunks,
    per_group,
    o_group,
    gate_group,
    weight_group,
    ct_group,
    eps,
    V: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    group = (tl.program_id(0) // per_group).to(tl.int64)
    columns = tl.arange(0, PADDED)
    inside = columns < V
    weight = tl.load(weight_ptr + group * weight_group + columns, mask=inside, other=0.0)
    weight = weight.to(tl.float32)
    for chunk in range(tl.program_id(0) % per_group, chunks, per_group):
        d_weight = tl.zeros((ROWS, PADDED), dtype=tl.float32)
        for start in range(0, tl.minimum(CHUNK, rows - chunk * CHUNK), ROWS):
            first = group * 0 + chunk * CHUNK + start  # 64 bits
            row = tl.arange(0, ROWS)
            here = (first + row < rows)[:, None] & inside[None, :]
            at = row[:, None] * V + columns[None, :]
            o = tl.load(o_ptr + (group * o_group + first * V) + at, mask=here, other=0.0)
            gate = tl.load(gate_ptr + (group * gate_group + first * V) + at, mask=here, other=0.0)
            ct = tl.load(ct_ptr + (group * ct_group + first * V) + at, mask=here, other=0.0)
            o = o.to(tl.float32)
            inverse = tl.rsqrt(tl.sum(o * o, axis=1) / V + eps)[:, None]
            normed = o * inverse
            opened = sigmoid(gate.to(tl.float32))
            weighted = ct.to(tl.float32) * opened
            # Rows of a tile stay apart until the chunk ends: one sum across threads for all.
            d_weight += weighted * normed
            d_normed = weighted * weight[None, :]
            along = d_normed * normed
            mean = tl.sum(along, axis=1)[:, None] / V
            d_o = inverse * (d_normed - normed * mean)
            d_gate = along * (1.0 - opened)
            to = (group * rows + first) * V
            tl.store(d_o_ptr + to + at, d_o.to(d_o_ptr.dtype.element_ty), mask=here)
            tl.store(d_gate_ptr + to + at, d_gate.to(d_gate_ptr.dtype.element_ty), mask=here)
        part = part_ptr + (group * chunks + chunk) * V
        tl.store(part + columns, tl.sum(d_weight, axis=0), mask=inside)


def accepts(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> str:
    """Why :func:`gated_norm` cannot run, or nothing."""
    if o.ndim < 1 or gate.shape != o.shape or weight.shape != o.shape[-1:]:
        shapes = [list(x.shape) for x in (o, gate, weight)]
        return f"o and gate have one shape [... V] and weight is [V], got {shapes}"
    if not 1 <= o.shape[-1] <= _WIDEST:
        return f"a row has 1 to {_WIDEST} elements, got {o.shape[-1]}"
    return ""


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The op."""
    width = o.shape[-1]
    rows = (x.reshape(1, -1, width) for x in (o, gate))
    return _gated_norm(*rows, weight[None], eps).view(o.shape)


def _fwd(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    def launch(*operands: Tensor) -> tuple[Tensor, ...]:
        return (_launch_forward(eps, *operands),)

    (y,) = grouped(launch, o, gate, weight)
    return y, (o, gate, weight)


def _bwd(eps: float, residuals: tuple[Tensor, ...], ct: Tensor) -> tuple[Tensor, ...]:
    def launch(*operands: Tensor) -> tuple[Tensor, ...]:
        return _launch_backward(eps, *operands)

    return grouped(launch, *residuals, ct)


_gated_norm = custom_vjp(_fwd, _bwd, nondiff_argnums=(3,), opaque=True, name="gated_norm (triton)")


def _launch_forward(eps: float, *operands: Tensor) -> Tensor:
    o, gate, weight = (x.contiguous() for x in operands)
    groups = max(x.shape[0] for x in operands)
    _, rows, width = o.shape
    y = gate.new_empty((groups, rows, width))
    tile = _TILES[o.device.type][0]
    per_group = programs(o.device, groups, triton.cdiv(rows, tile.rows), tile.per_core)
    gated_norm_forward[(groups * per_group,)](
        o,
        gate,
        weight,
        y,
        rows,
        per_group,
        *map(step, (o, gate, weight)),
        eps,
        V=width,
        PADDED=triton.next_power_of_2(width),
        ROWS=tile.rows,
        num_warps=tile.warps,
    )
    return y


def _launch_backward(eps: float, *operands: Tensor) -> tuple[Tensor, ...]:
    o, gate, weight, ct = (x.contiguous() for x in operands)
    groups = max(x.shape[0] for x in operands)
    _, rows, width = o.shape
    d_o = o.new_empty((groups, rows, width))
    d_gate = gate.new_empty((groups, rows, width))
    chunks = triton.cdiv(rows, CHUNK)
    parts = weight.new_empty((groups, chunks, width), dtype=torch.float32)
    tile = _TILES[o.device.type][1]
    per_group = programs(o.device, groups, chunks, tile.per_core)
    gated_norm_backward[(groups * per_group,)](
        o,
        gate,
        weight,
        ct,
        d_o,
        d_gate,
        parts,
        rows,
        chunks,
        per_group,
        *map(step, (o, gate, weight, ct)),
        eps,
        V=width,
        PADDED=triton.next_power_of_2(width),
        ROWS=tile.rows,
        CHUNK=CHUNK,
        num_warps=tile.warps,
    )
    return d_o, d_gate, parts.sum(1).to(weight.dtype)


def builds(kind: str) -> list[Build]:
    """What is compiled for heads of 128 on a kind of device."""
    one, other = _TILES[kind]
    groups = ("o_group", "gate_group", "weight_group")
    found = []
    for dtype in ("bf16", "fp32"):
        operands = {"o_ptr": f"*{dtype}", "gate_ptr": f"*{dtype}", "weight_ptr": "*fp32"}
        sizes = dict.fromkeys(("rows", "per_group", *groups), "i32")
        forward = {**operands, "y_ptr": f"*{dtype}", **sizes, "eps": "fp32"}
        grads = {"d_o_ptr": f"*{dtype}", "d_gate_ptr": f"*{dtype}", "part_ptr": "*fp32"}
        sizes = dict.fromkeys(("rows", "chunks", "per_group", *groups, "ct_group"), "i32")
        backward = {**operands, "ct_ptr": f"*{dtype}", **grads, **sizes, "eps": "fp32"}
        cut = {"V": 128, "PADDED": 128}
        found += [
            Build(
                f"gated_norm_forward {dtype} V128",
                gated_norm_forward,
                forward,
                cut | {"ROWS": one.rows},
                "forward",
                one,
                groups,
            ),
            Build(
                f"gated_norm_backward {dtype} V128",
                gated_norm_backward,
                backward,
                cut | {"ROWS": other.rows, "CHUNK": CHUNK},
                "backward",
                other,
                (*groups, "ct_group"),
            ),
        ]
    return found
