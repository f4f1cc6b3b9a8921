# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
"""``combine``: a token's rows times their weights, added; and the gradients of both in one pass.

First order only.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.experts.triton.copies import build, build_of_sum, launch_sum, unfit
from k31fn.kernels.launch import Build, Tile, grouped, programs, step

__all__ = ["accepts", "builds", "combine"]

_TILES = {
    "cuda": Tile(warps=4, per_core=32, columns=1024),
    "npu": Tile(columns=2048),
    "cpu": Tile(columns=64),
}


@triton.jit
def expert_combine_backward(
    rows_ptr,
    ct_ptr,
    weight_ptr,
    place_ptr,
    d_rows_ptr,
    d_weight_ptr,
    copies,
    number_of_copies,
    num_rows,
    width,
    pieces,
    rows_group,
    ct_group,
    weight_group,
    place_group,
    BLOCK: tl.constexpr,
):
    """Gradients of a copy's row, and of its weight."""
    for p in range(tl.program_id(0), pieces, tl.num_programs(0)):
        number = p % number_of_copies
        group = (p // number_of_copies).to(tl.int64)
        place = tl.load(place_ptr + (group * place_group + number)).to(tl.int64)
        row = place * width
        weight = tl.load(weight_ptr + (group * weight_group + number)).to(tl.float32)
        ct_row = ct_ptr + (group * ct_group + (number // copies).to(tl.int64) * width)
        d_row = d_rows_ptr + (group * num_rows * width + row)
        along = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < tl.where(place < 0, 0, width)  # none of an absent copy
            ct = tl.load(ct_row + column, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(rows_ptr + (group * rows_group + row) + column, mask=inside, other=0.0)
            along += ct * value.to(tl.float32)
            tl.store(d_row + column, (ct * weight).to(d_rows_ptr.dtype.element_ty), mask=inside)
        tl.store(d_weight_ptr + (group * number_of_copies + number), tl.sum(along, axis=0))


def accepts(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> str:
    """Why :func:`combine` cannot run, or nothing."""
    if weights.shape != inverse.shape or weights.dtype == torch.float64:
        return (
            f"weights are {list(inverse.shape)}, at most float32, got {list(weights.shape)} of "
            f"{weights.dtype}"
        )
    return unfit(rows, order.numel(), order, inverse)


def combine(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """The op; keeps its inputs."""
    del order
    return _combine(rows[None], weights[None], inverse[None]).squeeze(0)


def _combine_fwd(rows: Tensor, weights: Tensor, inverse: Tensor) -> tuple[Tensor, Any]:
    launch = functools.partial(launch_sum, False)
    return grouped(launch, rows, inverse, weights)[0], (rows, weights, inverse)


def _combine_bwd(residuals: Any, ct: Tensor) -> tuple[Any, ...]:
    rows, weights, inverse = residuals
    return *grouped(_launch_backward, rows, ct, weights, inverse), None


_combine = custom_vjp(_combine_fwd, _combine_bwd, opaque=True, name="combine (triton)")


def _launch_backward(*operands: Tensor) -> tuple[Tensor, ...]:
    rows, ct, weights, place = (a.contiguous() for a in operands)
    groups = max(a.shape[0] for a in operands)
    _, tokens, copies = place.shape
    width = rows.shape[2]
    num_rows = rows.shape[1]
    d_rows = rows.new_empty((groups, num_rows, width))
    d_weights = weights.new_empty((groups, tokens, copies), dtype=torch.float32)
    tile = _TILES[rows.device.type]
    pieces = groups * tokens * copies
    expert_combine_backward[(programs(rows.device, 1, pieces, tile.per_core),)](
        rows,
        ct,
        weights,
        place,
        d_rows,
        d_weights,
        copies,
        tokens * copies,
        num_rows,
        width,
        pieces,
        *map(step, (rows, ct, weights, place)),
        BLOCK=tile.columns,
        num_warps=tile.warps,
    )
    return d_rows, d_weights.to(weights.dtype)


def builds(kind: str) -> list[Build]:
    """What is compiled for 16 copies of a token on a kind of device."""
    listed: list[Build] = []
    for low in ("bf16", "fp32"):
        listed.append(build_of_sum(kind, low, "forward", weighted=True))
        listed.append(build(expert_combine_backward, low, {}, _TILES[kind], "backward"))
    return listed
