# pyright: reportMissingImports=false
"""Strips of queries, whose numbers for each slot are held at once, and the cuts of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from k31fn.kernels.launch import INTERPRETED, Tile

__all__ = [
    "HEADS",
    "TILES",
    "Strip",
    "Tiles",
    "accepts",
    "at_once",
    "fold",
    "options",
    "sizes_of",
    "strips",
]

HEADS = 128
"""Heads whose scores of a tile of keys a program holds at once."""


class Tiles(NamedTuple):
    """Cuts: of scores, their gradients and rows ``rows`` keys and ``columns`` dims of a step; of
    sums ``rows`` keys of a step and ``columns`` dims of a program; else ``rows`` of a step.
    """

    scores: Tile
    gradients: Tile
    sums: Tile
    rows: Tile
    keys: Tile
    delta: Tile


_SMALL = Tiles(
    Tile(rows=32, columns=32),
    Tile(rows=32, columns=32),
    Tile(rows=32, columns=64),
    Tile(rows=32, columns=32),
    Tile(rows=4),
    Tile(rows=4),
)
# Per kind of device and bytes of a number.
TILES = {
    ("cuda", 2): Tiles(
        Tile(warps=4, rows=128, columns=64, stages=3),
        Tile(warps=8, rows=128, columns=32, stages=4),
        Tile(warps=8, rows=64, columns=256, stages=3),
        Tile(warps=8, rows=128, columns=64, stages=3),
        Tile(warps=2, rows=4),
        Tile(warps=4, rows=8),
    ),
    ("cuda", 4): _SMALL,
    ("npu", 2): _SMALL,
    ("npu", 4): _SMALL,
    ("cpu", 2): _SMALL,
    ("cpu", 4): _SMALL,
}
_STRIP = 2**20  # slots, of a row of the batch


def accepts(q: Tensor, kv: Tensor, *others: Any, **named: Any) -> str:
    """Why :func:`latent_attention` and :func:`latent_probs` cannot run, or nothing."""
    del others, named
    if q.dtype != kv.dtype:
        return f"queries and keys have one dtype, got {q.dtype} and {kv.dtype}"
    return ""


class Strip(NamedTuple):
    """Some queries of a row of the batch, all its keys, and the sets, filled up to whole tiles."""

    q: Tensor
    kv: Tensor
    sets: Tensor

    def sizes(self, tile: Tile) -> dict[str, Any]:
        """Constants of a launch with tiles of keys and dims."""
        _, heads, width = self.q.shape
        return {**sizes_of(heads, width, tile), "WIDE": INTERPRETED}

    def pieces(self, tile: Tile) -> int:
        """Tiles of keys of all queries."""
        return self.sets.numel() // tile.rows


def sizes_of(heads: int, width: int, tile: Tile) -> dict[str, int]:
    """Constants of a kernel with tiles of keys and dims."""
    padded = max(16, triton.next_power_of_2(heads))
    return {"H": heads, "K": width, "HEADS": padded, "KEYS": tile.rows, "DIMS": tile.columns}


def options(tile: Tile) -> dict[str, int]:
    """What the compiler for CUDA is told."""
    return {"num_warps": tile.warps, "num_stages": tile.stages}


def fold(*operands: Tensor) -> tuple[int, Tiles, list[Tensor]]:
    """The number of groups, and operands with groups and rows of the batch in one dimension."""
    groups = max(x.shape[0] for x in operands)
    whole = [x.expand(groups, *x.shape[1:]).flatten(0, 1).contiguous() for x in operands]
    tiles = TILES[whole[0].device.type, whole[0].itemsize]
    missing = -whole[2].shape[2] % max(tile.rows for tile in tiles)
    whole[2] = torch.nn.functional.pad(whole[2].to(torch.int32), (0, missing), value=-1)
    return groups, tiles, whole


def at_once(sets: Tensor) -> int:
    """Queries of a strip."""
    return max(1, min(sets.shape[1], _STRIP // max(1, sets.shape[2])))


def strips(
    q: Tensor, kv: Tensor, sets: Tensor, *others: Tensor
) -> Iterator[tuple[Strip, int, tuple[Tensor, ...]]]:
    """Strips, the row of the batch that each is of, and its part of other tensors."""
    each = at_once(sets)
    # sets without a slot have no work
    for line in range(len(sets) if sets.shape[2] else 0):
        for first in range(0, sets.shape[1], each):
            part = slice(first, first + each)
            strip = Strip(q[line, part], kv[line], sets[line, part])
            yield strip, line, tuple(x[line, part] for x in others)
