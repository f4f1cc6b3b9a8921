# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false
"""Philox on the device, with the bits of :mod:`k31fn.random`, and rounding with them.

A program works on blocks of four neighbouring columns, which share one counter. A tensor's rows are
cut into blocks where those of the whole weight are: a part that begins inside a block draws all of
it and leaves out what is not its own.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from k31fn.kernels.launch import Tile, programs
from k31fn.kernels.philox.reference import Draws

__all__ = ["TILES", "Blocks", "accepts", "cut", "grid", "places", "rounded", "words_of"]

# per kind of device; rows: blocks of four at once
TILES = {
    "cuda": Tile(warps=4, per_core=16, rows=256),
    "npu": Tile(per_core=2, rows=256),
    "cpu": Tile(rows=16),
}
_MOST_BLOCKS = 2**31 - 2**16  # counted in int32, a tile beyond the last included


class Blocks(NamedTuple):
    """A part of a weight in blocks of four columns, as kernels take it.

    Attributes:
        total: blocks.
        per_row: of them.
        width: columns of the part.
        lead: columns that the first block of a row has before the part's first.
        first_block: its number in the whole row.
        first_row: of the part in the whole weight.
        inner: rows of the part that lie together in the whole.
        inner_whole: rows from one such run to the next.
    """

    total: int
    per_row: int
    width: int
    lead: int
    first_block: int
    first_row: int
    inner: int
    inner_whole: int

    @classmethod
    def of(cls, size: tuple[int, ...], draws: Draws) -> Blocks:
        """Those of a part of this size."""
        size = size or (1,)
        shape = draws.shape or (1,)
        starts = draws.starts or (0,)
        width = size[-1]
        first_block = starts[-1] // 4
        per_row = -(-(starts[-1] + width) // 4) - first_block
        runs = _runs(size[:-1], shape[:-1])
        inner = math.prod(size[runs:-1])
        inner_whole = math.prod(shape[runs:-1])
        first_row = 0
        for start, n in zip(starts[:-1], shape[:-1], strict=True):
            first_row = first_row * n + start
        total = math.prod(size[:-1]) * per_row
        lead = starts[-1] - 4 * first_block
        return cls(total, per_row, width, lead, first_block, first_row, inner, inner_whole)

    @property
    def constants(self) -> dict[str, bool]:
        """What a kernel is compiled for."""
        # whole blocks only: every element of a block is the part's own
        whole = self.lead == 0 and self.width % 4 == 0
        return {"WHOLE": whole, "CUT": self.inner != self.inner_whole}


def _runs(size: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The dimension from which on the rows of a part lie together in the whole but for one cut."""
    dim = 0
    for d in range(1, len(size)):
        if size[d] != shape[d]:
            dim = d
    return dim


@triton.jit
def _multiplied(a, factor: tl.constexpr):
    """High and low word of a product."""
    product = a.to(tl.uint64) * factor
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _words(block, row, key_ptr):
    """The four words of each block: the counter is ``(block, row, 0, 0)``, since no weight has 2^32
    rows.
    """
    k0 = tl.load(key_ptr).to(tl.uint32)
    k1 = tl.load(key_ptr + 1).to(tl.uint32)
    c0 = block.to(tl.uint32)
    c1 = row.to(tl.uint32)
    c2 = c0 * 0
    c3 = c0 * 0
    for _ in tl.static_range(10):
        high0, low0 = _multiplied(c0, 0xD2511F53)
        high1, low1 = _multiplied(c2, 0xCD9E8D57)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = (k0 + 0x9E3779B9).to(tl.uint32)
        k1 = (k1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def places(t, total, per_row, width, lead, BLOCKS: tl.constexpr, WHOLE: tl.constexpr):
    """Of tile ``t``: the offset of its first row, offsets ``[BLOCKS, 4]`` from there, which of them
    are the part's own, and rows and blocks.
    """
    start = t * BLOCKS
    first = start // per_row
    along = start - first * per_row + tl.arange(0, BLOCKS)
    down = along // per_row
    block = along - down * per_row
    column = (block * 4)[:, None] + tl.arange(0, 4)[None, :] - lead
    inside = (start + tl.arange(0, BLOCKS) < total)[:, None] & (column >= -lead)
    if not WHOLE:
        inside = inside & (column >= 0) & (column < width)
    base = (tl.program_id(0).to(tl.int64) * 0 + first) * width  # 2^31 elements are passed
    return base, (down * width)[:, None] + column, inside, first + down, block


@triton.jit
def words_of(row, block, key_ptr, first_block, first_row, inner, inner_whole, CUT: tl.constexpr):
    """The word of each element ``[BLOCKS, 4]`` of these rows and blocks."""
    if CUT:
        row = (row // inner) * inner_whole + row % inner
    w0, w1, w2, w3 = _words(first_block + block, first_row + row, key_ptr)
    lane = tl.arange(0, 4)[None, :]
    low = tl.where(lane == 0, w0[:, None], w1[:, None])
    high = tl.where(lane == 2, w2[:, None], w3[:, None])
    return tl.where(lane < 2, low, high)


@triton.jit
def rounded(x, words):
    """float32 to bfloat16 with 16 random bits."""
    bits = x.to(tl.int32, bitcast=True)
    moved = (bits + (words >> 16).to(tl.int32)) & -65536
    # an infinity plus random bits would be a NaN
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, moved.to(tl.float32, bitcast=True), x).to(tl.bfloat16)


def accepts(size: tuple[int, ...], draws: Draws) -> str:
    """Why draws of a part of this size cannot be made, or nothing."""
    leading = len(size) - 1
    cuts = sum(size[d] != draws.shape[d] for d in range(1, leading))
    if cuts > 1:
        return f"a part {list(size)} of {list(draws.shape)} is cut along more than one inner dim"
    if math.prod(draws.shape[:-1]) >= 2**31 or Blocks.of(size, draws).total > _MOST_BLOCKS:
        return f"a weight has fewer than 2^31 rows and blocks of four, got {list(draws.shape)}"
    return ""


def grid(x: Tensor, blocks: Blocks) -> tuple[int]:
    """Programs for a part on this device."""
    tile = TILES[x.device.type]
    return (programs(x.device, 1, triton.cdiv(blocks.total, tile.rows), tile.per_core),)


def cut(x: Tensor, blocks: Blocks) -> dict[str, Any]:
    """Constants of a launch for it."""
    tile = TILES[x.device.type]
    return {"BLOCKS": tile.rows, **blocks.constants, "num_warps": tile.warps}
