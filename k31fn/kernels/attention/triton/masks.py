"""What queries see, for the kernels: masks by query, and lists of the tiles in which one sees a
key.
"""

from __future__ import annotations

import torch

from k31fn.typing import Bool, Int, Tensor

__all__ = ["LARGEST", "WORD", "bounds", "occupied", "padded", "tile_lists"]

LARGEST = 128
"""Tokens in the largest tile; masks are padded to a multiple of it, with queries that see none."""

WORD = 32
"""Keys in a word of a bit mask, and the side of the blocks that lists of tiles are made from."""


def padded(length: int) -> int:
    """``length`` rounded up to whole tiles of any size."""
    return -(-length // LARGEST) * LARGEST


def bounds(start: Int[Tensor, "B T"], stop: Int[Tensor, "B T"]) -> Int[Tensor, "B 2 T2"]:
    """Masks of intervals ``[B 2 T2]``: the first keys, then one past the last."""
    # a query of padding may have any empty interval; the tiles' union must not contain it
    none = start >= stop
    both = torch.stack([start, stop], dim=1).masked_fill(none[:, None], 0)
    rows = padded(start.shape[1]) - start.shape[1]
    return torch.nn.functional.pad(both.to(torch.int32), (0, rows))


def occupied(seen: Int[Tensor, "L W T2"], keys: int, sets: bool) -> Bool[Tensor, "L t s"]:
    """Whether a block of 32 queries may see a key of a block of 32."""
    blocks = seen.unflatten(2, (seen.shape[2] // WORD, WORD))
    if sets:
        return (blocks != 0).any(3).mT
    first = torch.arange(0, padded(keys), WORD, device=seen.device)
    begin, end = blocks.unbind(1)
    start = torch.where(begin < end, begin, keys).amin(2)[..., None]
    stop = end.amax(2)[..., None]
    return (first < stop) & (first + WORD > start)


def tile_lists(
    blocks: Bool[Tensor, "L t s"], rows: int, columns: int
) -> tuple[Int[Tensor, "L a b"], Int[Tensor, "L a"]]:
    """For each tile of ``rows``, the tiles of ``columns`` that hold something, first ones first,
    and how many.
    """
    tiles = blocks.unflatten(2, (-1, columns // WORD)).any(3)
    tiles = tiles.unflatten(1, (-1, rows // WORD)).any(2)
    order = torch.sort((~tiles).to(torch.int8), dim=-1, stable=True).indices
    return order.to(torch.int32), tiles.sum(-1, dtype=torch.int32)
