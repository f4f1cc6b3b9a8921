"""Drawing of a tile of a tensor, piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from k31fn.random.keys import DRAW, check_key, philox, words64
from k31fn.typing import Int, Tensor

__all__ = ["draw"]

# Numbers drawn at a time. CPU: temporaries of a few hundred KB stay in a core's caches and outweigh
# the cost of a call (40 M normals/s on one core; 25 M at a quarter of this size). Accelerator: work
# for each launch against memory (H200: 1.6 G normals/s with 190 MiB of temporaries; 0.4 G at a
# quarter, 3.3 G at four times this size).
_PIECE_HOST, _PIECE_ACCELERATOR = 1 << 17, 1 << 22


def draw(
    key: Tensor,
    shape: Sequence[int],
    tile: tuple[slice, ...] | None,
    dtype: torch.dtype,
    transform: Callable[[Tensor], Tensor],
) -> Tensor:
    """``transform`` of the words of ``tile``, piece by piece, so that temporaries stay small for
    any tensor.

    Args:
        key: one key.
        shape: the global shape.
        tile: the slices to draw; None: the whole.
        dtype: of the result.
        transform: words ``[rows, columns]`` to numbers, element by element.
    """
    check_key(key)
    shape = tuple(shape)
    starts, sizes = _starts_and_sizes(shape, tile)
    # not torch.empty: under vmap it must be batched like the key
    out = key.new_empty(sizes, dtype=dtype)
    if 0 in sizes:
        return out
    first, width = (starts[-1], sizes[-1]) if shape else (0, 1)
    rows = out.view(-1, width)
    # a tile that begins or ends inside a block of four words draws that block and cuts it
    end_block = -(-(first + width) // 4)
    for row0, row1, block0, block1 in _pieces(key, math.prod(sizes[:-1]), first // 4, end_block):
        block = torch.arange(block0, block1, dtype=torch.int64, device=key.device)
        low, high = words64(_row_index(row0, row1, shape, starts, sizes, key.device)[:, None])
        words = torch.stack(philox(block, low, high, block * 0 + DRAW, key), dim=-1).flatten(-2)
        column0 = max(4 * block0, first)
        column1 = min(4 * block1, first + width)
        piece = transform(words[:, column0 - 4 * block0 : column1 - 4 * block0])
        rows[row0:row1, column0 - first : column1 - first] = piece.to(dtype)
    return out


def _pieces(
    key: Tensor, rows: int, block0: int, block1: int
) -> Iterator[tuple[int, int, int, int]]:
    """Rectangles (rows, blocks of 4 columns) that cover a tile."""
    blocks = (_PIECE_HOST if key.is_cpu else _PIECE_ACCELERATOR) // 4
    width = min(blocks, block1 - block0)
    height = blocks // width
    for row in range(0, rows, height):
        for block in range(block0, block1, width):
            yield row, min(row + height, rows), block, min(block + width, block1)


def _row_index(
    row0: int,
    row1: int,
    shape: Sequence[int],
    starts: Sequence[int],
    sizes: Sequence[int],
    device: torch.device,
) -> Int[Tensor, "rows"]:
    """Global linear index, over the leading dimensions, of rows row0:row1 of a tile."""
    left = torch.arange(row0, row1, dtype=torch.int64, device=device)
    # int64 throughout: a table of 2**33 rows has no index of 32 bits
    index = left * 0
    stride = 1
    for dim in range(len(shape) - 2, 0, -1):
        index = index + (left % sizes[dim] + starts[dim]) * stride
        left, stride = left // sizes[dim], stride * shape[dim]
    return index + (left + (starts[0] if len(shape) > 1 else 0)) * stride


def _starts_and_sizes(
    shape: tuple[int, ...], tile: tuple[slice, ...] | None
) -> tuple[list[int], list[int]]:
    if (
        any(n < 0 for n in shape)
        or (shape and shape[-1] > 1 << 34)
        or math.prod(shape[:-1]) >= 1 << 63
    ):
        raise ValueError(
            f"shape={shape}: sizes must not be negative, the last at most 2**34, the others "
            "together < 2**63"
        )
    if tile is None:
        return [0] * len(shape), list(shape)
    if len(tile) != len(shape):
        raise ValueError(
            f"tile={tile} has {len(tile)} slices for shape={shape}; give one per dimension"
        )
    starts = [s.start or 0 for s in tile]
    stops = [n if s.stop is None else s.stop for s, n in zip(tile, shape, strict=True)]
    for dim, (start, stop, size) in enumerate(zip(starts, stops, shape, strict=True)):
        if tile[dim].step not in (None, 1) or not 0 <= start <= stop <= size:
            raise ValueError(
                f"tile[{dim}]={tile[dim]} must be slice(start, stop) with 0 <= start <= stop <= "
                f"{size}"
            )
    return starts, [stop - start for start, stop in zip(starts, stops, strict=True)]
