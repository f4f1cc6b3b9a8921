# pyright: reportMissingImports=false, reportMissingParameterType=false
"""The gradients of query and norm weight from the parts of the key's: ``key = query * norm``,
summed in one order.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from k31fn.kernels.attn_res.triton.sources import build
from k31fn.kernels.launch import Build, Tile, grid, step

__all__ = ["attn_res_d_weights", "build_of_weights", "of_weights"]

# per device kind; rows are parts, at most: with fewer there are more columns
_TILES = {
    "cuda": Tile(warps=4, rows=256, columns=16),
    "npu": Tile(rows=16, columns=512),
    "cpu": Tile(rows=2, columns=16),
}


@triton.jit
def attn_res_d_weights(
    part_ptr,
    query_ptr,
    norm_ptr,
    d_query_ptr,
    d_norm_ptr,
    parts,
    width,
    pieces,
    query_group,
    norm_group,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients for a piece of the features: the parts summed, times the other of the two."""
    group = (tl.program_id(0) // pieces).to(tl.int64)
    columns = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    rows = tl.arange(0, ROWS)
    query = tl.load((query_ptr + group * query_group) + columns, mask=inside, other=0.0).to(
        tl.float32
    )
    norm = tl.load((norm_ptr + group * norm_group) + columns, mask=inside, other=0.0).to(tl.float32)
    # ROWS sums side by side, added at the end: fewer dependent additions, and one order of them
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, parts, ROWS):
        row = part_ptr + (group * parts + start) * width
        here = (rows < parts - start)[:, None] & inside[None, :]
        total += tl.load(row + rows[:, None] * width + columns[None, :], mask=here, other=0.0)
    d_key = tl.sum(total, axis=0)
    written = group * width + columns
    tl.store(d_query_ptr + written, (d_key * norm).to(d_query_ptr.dtype.element_ty), mask=inside)
    tl.store(d_norm_ptr + written, (d_key * query).to(d_norm_ptr.dtype.element_ty), mask=inside)


def of_weights(
    kind: str, kernel: Any, parts: Tensor, query: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of query and norm weight, ``[G, W]`` each.

    Args:
        kind: of device.
        kernel: :func:`attn_res_d_weights`, as the caller has it.
        parts: of the key's gradient, ``[G, P, W]``.
        query: ``[G or 1, W]``.
        norm: likewise.
    """
    groups, count, width = parts.shape
    cut = _cut(_TILES[kind], count)
    pieces = triton.cdiv(width, cut["BLOCK"])
    d_query = query.new_empty((groups, width))
    d_norm = norm.new_empty((groups, width))
    kernel[grid(groups * pieces, groups)](
        parts, query, norm, d_query, d_norm, count, width, pieces, step(query), step(norm), **cut
    )
    return d_query, d_norm


def _cut(tile: Tile, count: int) -> dict[str, int]:
    # the size of the tile is kept: with fewer parts than rows it is wider
    rows = min(tile.rows, triton.next_power_of_2(count))
    return {"ROWS": rows, "BLOCK": tile.columns * tile.rows // rows, "num_warps": tile.warps}


def build_of_weights(kind: str, shapes: str, parts: int) -> Build:
    """The kernel for so many parts."""
    tile = _TILES[kind]
    return build(attn_res_d_weights, shapes, _cut(tile, parts), "backward", tile)
