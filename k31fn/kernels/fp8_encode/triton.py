# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The FP8 encoder: bits of E4M3 by integer arithmetic, and transposes of tiles in registers.

A matrix that lies in memory as ``[lines, width]`` is the operand or its transpose. Largest
magnitudes are compared as integers, whose order is that of the numbers, with infinity and NaN above
them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn._functorch import reinterpret
from k31fn.autodiff.custom_vjp import detached
from k31fn.kernels.formats.fp8 import BLOCK
from k31fn.kernels.fp8_encode.reference import E4M3, Codes, Groups, check
from k31fn.kernels.launch import Build, Tile, grouped, programs

__all__ = ["builds", "fp8_encode"]

_PARTS = 16  # into which columns are cut at most, to find their largest numbers
# chosen by measurement on an H200; on Ascend by its memory alone, since nobody has run them there.
# per device kind: rows (the longest that is held), blocks, blocks of a transpose, tiles (lines at
# once), columns
_TILES = {
    "cuda": (
        Tile(warps=4, per_core=64, columns=8192),
        Tile(warps=4, per_core=32, rows=32, columns=BLOCK),
        Tile(warps=8, per_core=32, rows=BLOCK, columns=64),
        Tile(warps=8, per_core=32, rows=BLOCK, columns=BLOCK),
        Tile(warps=8, per_core=64, rows=128, columns=64),
    ),
    "npu": (
        Tile(per_core=2, columns=2048),
        Tile(per_core=2, rows=16, columns=BLOCK),
        Tile(per_core=2, rows=BLOCK, columns=16),
        Tile(per_core=2, rows=16, columns=BLOCK),
        Tile(per_core=2, rows=64, columns=32),
    ),
    "cpu": (
        Tile(columns=256),
        Tile(rows=64, columns=BLOCK),
        Tile(rows=BLOCK, columns=64),
        Tile(rows=64, columns=BLOCK),
        Tile(rows=64, columns=64),
    ),
}


@triton.jit
def _bits(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _magnitude(x):
    # as an integer: bits without the sign ascend as the numbers do, and a maximum of integers keeps
    # a NaN, which is larger than infinity, where a maximum of floats may drop it
    return _bits(x) & 0x7FFFFFFF


@triton.jit
def _exponent(largest):
    """Exponent of the scale, plus 127. 448 is 1.75 * 2^8, so mantissas above 0.75 need the next
    power.
    """
    return tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 1)


@triton.jit
def _scale(largest):
    # 0x7F800000 is infinity; a group that is not finite gets the scale 1 and codes of NaN
    exponent = tl.where(largest < 0x7F800000, _exponent(largest), 127)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(largest):
    """Inverse of the scale; NaN for a group that is not finite."""
    # 254 - e in the exponent's field is 2^-e exactly, where a division could round
    bits = tl.where(largest < 0x7F800000, (254 - _exponent(largest)) << 23, 0x7FC00000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _code(x, inverse):
    """The code of a number. Adding 2^(e + 20) rounds what has the exponent e to 4 bits, ties to
    even; below 2^-6 the step stays 2^-9.
    """
    # written out, since not every backend has a cast to E4M3 that rounds alike
    size = (_magnitude(x).to(tl.float32, bitcast=True) * inverse).to(tl.int32, bitcast=True)
    size = tl.minimum(size, 0x43F00000)  # 480 has the code of NaN
    unit = tl.maximum(size & 0x7F800000, 0x3C800000) + (20 << 23)
    rounded = (size.to(tl.float32, bitcast=True) + unit.to(tl.float32, bitcast=True)).to(
        tl.int32, bitcast=True
    )
    code = rounded - unit + (unit >> 20) - (141 << 3)  # 0 to 16 steps, and 8 per exponent above -6
    return (code | ((_bits(x) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def fp8_encode_rows(
    x_ptr, codes_ptr, scales_ptr, lines, width, SPAN: tl.constexpr, HELD: tl.constexpr
):
    zero = tl.program_id(0).to(tl.int64) * 0  # widens offsets: 2^31 elements are passed early
    span = tl.arange(0, SPAN)
    for r in range(tl.program_id(0), lines, tl.num_programs(0)):
        x_row = x_ptr + (zero + r) * width
        codes_row = codes_ptr + (zero + r) * width
        if HELD:
            x = tl.load(x_row + span, mask=span < width, other=0.0)
            largest = tl.max(_magnitude(x), axis=0)
            tl.store(codes_row + span, _code(x, _inverse(largest)), mask=span < width)
        else:  # read twice, the second time from the cache
            most = tl.zeros((SPAN,), dtype=tl.int32)
            for start in range(0, width, SPAN):
                x = tl.load(x_row + start + span, mask=start + span < width, other=0.0)
                most = tl.maximum(most, _magnitude(x))
            largest = tl.max(most, axis=0)
            for start in range(0, width, SPAN):
                x = tl.load(x_row + start + span, mask=start + span < width, other=0.0)
                tl.store(
                    codes_row + start + span, _code(x, _inverse(largest)), mask=start + span < width
                )
        tl.store(scales_ptr + r, _scale(largest))


@triton.jit
def fp8_encode_blocks(
    x_ptr,
    codes_ptr,
    scales_ptr,
    lines,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    zero = tl.program_id(0).to(tl.int64) * 0
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    across = tl.cdiv(width, COLUMNS)
    for t in range(tl.program_id(0), tl.cdiv(lines, ROWS) * across, tl.num_programs(0)):
        top = (t // across) * ROWS
        left = (t % across) * COLUMNS
        inside = (top + row < lines)[:, None] & (left + column < width)[None, :]
        tile = row[:, None] * width + column[None, :]
        x = tl.load(x_ptr + ((zero + top) * width + left) + tile, mask=inside, other=0.0)
        if TRANSPOSED:  # 128 lines are a group of each column
            largest = tl.max(_magnitude(x), axis=0)
            scales = scales_ptr + (zero + t // across) * width + left
            tl.store(scales + column, _scale(largest), mask=left + column < width)
            codes = tl.trans(_code(x, _inverse(largest)[None, :]))
            tile = column[:, None] * lines + row[None, :]
            tl.store(
                codes_ptr + ((zero + left) * lines + top) + tile,
                codes,
                mask=(left + column < width)[:, None],
            )
        else:  # 128 columns are a group of each line
            largest = tl.max(_magnitude(x), axis=1)
            scales = scales_ptr + (zero + t % across) * lines + top
            tl.store(scales + row, _scale(largest), mask=top + row < lines)
            codes = _code(x, _inverse(largest)[:, None])
            tl.store(
                codes_ptr + ((zero + top) * width + left) + tile,
                codes,
                mask=(top + row < lines)[:, None],
            )


@triton.jit
def fp8_encode_tiles(
    x_ptr,
    codes_ptr,
    scales_ptr,
    lines,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Codes and scale of tiles of 128 x 128."""
    zero = tl.program_id(0).to(tl.int64) * 0
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    across = width // COLUMNS
    down = lines // COLUMNS
    # where all 128 lines come at once (ROWS is 128), the compiler merges the two loads into one
    for t in range(tl.program_id(0), down * across, tl.num_programs(0)):
        top = (t // across) * COLUMNS
        left = (t % across) * COLUMNS
        tile = row[:, None] * width + column[None, :]
        first = x_ptr + ((zero + top) * width + left)
        most = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
        for start in tl.static_range(0, COLUMNS, ROWS):
            most = tl.maximum(most, _magnitude(tl.load(first + start * width + tile)))
        largest = tl.max(tl.max(most, axis=1), axis=0)
        for start in tl.static_range(0, COLUMNS, ROWS):
            codes = _code(tl.load(first + start * width + tile), _inverse(largest))
            if TRANSPOSED:
                place = codes_ptr + ((zero + left) * lines + top + start)
                tl.store(place + (column[:, None] * lines + row[None, :]), tl.trans(codes))
            else:
                tl.store(codes_ptr + ((zero + top + start) * width + left) + tile, codes)
        if TRANSPOSED:
            tl.store(scales_ptr + (t % across) * down + t // across, _scale(largest))
        else:
            tl.store(scales_ptr + t, _scale(largest))


@triton.jit
def fp8_encode_largest(
    x_ptr, largest_ptr, lines, width, part, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The largest magnitudes of each column, for every so many lines."""
    zero = tl.program_id(0).to(tl.int64) * 0
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    across = tl.cdiv(width, COLUMNS)
    for t in range(tl.program_id(0), tl.cdiv(lines, part) * across, tl.num_programs(0)):
        number = t // across
        left = (t % across) * COLUMNS
        most = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
        for top in range(number * part, tl.minimum(lines, (number + 1) * part), ROWS):
            inside = (top + row < lines)[:, None] & (left + column < width)[None, :]
            place = x_ptr + ((zero + top) * width + left) + (row[:, None] * width + column[None, :])
            most = tl.maximum(most, _magnitude(tl.load(place, mask=inside, other=0.0)))
        # stored for each part and not by an atomic maximum: no memory has to be set first
        of_part = largest_ptr + (number * width + left) + column
        tl.store(of_part, tl.max(most, axis=0), mask=left + column < width)


@triton.jit
def fp8_encode_columns(
    x_ptr,
    largest_ptr,
    codes_ptr,
    scales_ptr,
    lines,
    width,
    part,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Codes of the columns, transposed, and their scales."""
    zero = tl.program_id(0).to(tl.int64) * 0
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    parts = tl.arange(0, PARTS)
    across = tl.cdiv(width, COLUMNS)
    count = tl.cdiv(lines, part)
    for t in range(tl.program_id(0), count * across, tl.num_programs(0)):
        # from the end: what fp8_encode_largest read last is in the cache
        number = count - 1 - t // across
        left = (t % across) * COLUMNS
        there = (left + column < width)[None, :]
        of_parts = largest_ptr + left + (parts[:, None] * width + column[None, :])
        largest = tl.max(tl.load(of_parts, mask=(parts < count)[:, None] & there, other=0), axis=0)
        if number == 0:
            tl.store(scales_ptr + left + column, _scale(largest), mask=left + column < width)
        for top in range(number * part, tl.minimum(lines, (number + 1) * part), ROWS):
            inside = (top + row < lines)[:, None] & there
            place = x_ptr + ((zero + top) * width + left) + (row[:, None] * width + column[None, :])
            codes = tl.trans(
                _code(tl.load(place, mask=inside, other=0.0), _inverse(largest)[None, :])
            )
            place = (
                codes_ptr + ((zero + left) * lines + top) + (column[:, None] * lines + row[None, :])
            )
            inside = (left + column < width)[:, None] & (top + row < lines)[None, :]
            tl.store(place, codes, mask=inside)


def fp8_encode(x: Tensor, scaling: Groups = "rows") -> Codes:
    """The op."""
    check(x, scaling)
    # a transpose is read as it lies in memory, and its codes are written transposed: no copy
    transposed = x.mT.is_contiguous() and not x.is_contiguous()
    memory = detached(x.mT if transposed else x).contiguous()
    codes, scales = grouped(lambda m: _launch(m, scaling, transposed), memory)
    return Codes(reinterpret(codes, E4M3), scales.mT if scaling == "blocks" else scales)


def _launch(x: Tensor, scaling: Groups, transposed: bool) -> tuple[Tensor, ...]:
    lines, width = x.shape
    R, K = (width, lines) if transposed else (lines, width)  # of the matrix; lines are of memory
    codes = x.new_empty((R, K), dtype=torch.uint8)
    shape = {"rows": (R, 1), "blocks": (K // BLOCK, R), "tiles": (R // BLOCK, K // BLOCK)}[scaling]
    scales = x.new_empty(shape, dtype=torch.float32)
    rows, blocks, blocks_transposed, tiles, _ = _TILES[x.device.type]
    if scaling == "rows" and transposed:
        _launch_columns(x, codes, scales)
    elif scaling == "rows":
        grid = (programs(x.device, 1, lines, rows.per_core),)
        cut = _spans(x.device.type, width)
        fp8_encode_rows[grid](
            x, codes, scales, lines, width, **cut, num_warps=_warps(rows, cut["SPAN"])
        )
    else:
        square = scaling == "tiles"
        kernel = fp8_encode_tiles if square else fp8_encode_blocks
        tile = tiles if square else blocks_transposed if transposed else blocks
        work = triton.cdiv(lines, BLOCK if square else tile.rows) * triton.cdiv(width, tile.columns)
        kernel[(programs(x.device, 1, work, tile.per_core),)](
            x,
            codes,
            scales,
            lines,
            width,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            TRANSPOSED=transposed,
            num_warps=tile.warps,
        )
    return codes, scales


def _launch_columns(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    lines, width = x.shape
    tile = _TILES[x.device.type][-1]
    part = triton.cdiv(triton.cdiv(lines, _PARTS), tile.rows) * tile.rows
    count = triton.cdiv(lines, part)
    largest = x.new_empty((count, width), dtype=torch.int32)
    grid = (programs(x.device, 1, count * triton.cdiv(width, tile.columns), tile.per_core),)
    cut = {"ROWS": tile.rows, "COLUMNS": tile.columns, "num_warps": tile.warps}
    fp8_encode_largest[grid](x, largest, lines, width, part, **cut)
    fp8_encode_columns[grid](x, largest, codes, scales, lines, width, part, PARTS=_PARTS, **cut)


def _spans(kind: str, width: int) -> dict[str, int | bool]:
    """A row that is held comes in one span, a longer one in spans of half that length."""
    longest = _TILES[kind][0].columns
    held = width <= longest
    return {"SPAN": triton.next_power_of_2(width) if held else longest // 2, "HELD": held}


def _warps(tile: Tile, span: int) -> int:
    """Warps of a row's program: at least 32 numbers a thread."""
    # fewer would wait for one another more than they load
    return max(1, min(tile.warps, span // 1024))


def builds(kind: str) -> list[Build]:
    """Kernels to compile for matrices of 7168 and of 12288 columns on a kind of device."""
    rows, blocks, blocks_transposed, tiles, columns = _TILES[kind]
    listed = []
    sizes = {"lines": "i32", "width": "i32"}
    for dtype in ("bf16", "fp32"):
        x = {"x_ptr": f"*{dtype}"}
        out = {"codes_ptr": "*u8", "scales_ptr": "*fp32"}
        for width in (7168, 12288):
            cut = _spans(kind, width)
            tile = rows._replace(warps=_warps(rows, cut["SPAN"]))
            name = f"fp8_encode_rows {dtype} K{width}"
            listed.append(Build(name, fp8_encode_rows, x | out | sizes, cut, "forward", tile))
        for name, kernel, tile, transposed in (
            ("blocks", fp8_encode_blocks, blocks, False),
            ("blocks transposed", fp8_encode_blocks, blocks_transposed, True),
            ("tiles", fp8_encode_tiles, tiles, False),
            ("tiles transposed", fp8_encode_tiles, tiles, True),
        ):
            cut = {"ROWS": tile.rows, "COLUMNS": tile.columns, "TRANSPOSED": transposed}
            listed.append(
                Build(f"fp8_encode_{name} {dtype}", kernel, x | out | sizes, cut, "forward", tile)
            )
        cut = {"ROWS": columns.rows, "COLUMNS": columns.columns}
        x_largest = x | {"largest_ptr": "*i32"}
        sizes_part = sizes | {"part": "i32"}
        for kernel, signature, constants in (
            (fp8_encode_largest, x_largest | sizes_part, cut),
            (fp8_encode_columns, x_largest | out | sizes_part, {"PARTS": _PARTS, **cut}),
        ):
            name = f"{kernel.__name__} {dtype}"
            listed.append(Build(name, kernel, signature, constants, "forward", columns))
    # a model's sizes are multiples of 16, so loads may be 16 bytes wide
    return [build._replace(aligned=("lines", "width", "part")) for build in listed]
