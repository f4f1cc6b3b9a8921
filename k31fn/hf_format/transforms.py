"""Transforms of one weight between the checkpoint and the parameter tree.

A transform is told ``shape``, the weight's in the tree, and a ``tile`` of it: a slice per
dimension, with start and stop. ``stored_shape`` is the shape in the checkpoint and ``sliced_shape``
the same memory with the dimensions that tiles are cut from; ``stored_tile`` is where the tile lies
in that. ``load`` turns what was read there into the tile (a view); ``export`` undoes it bit for
bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from k31fn.typing import Tensor

__all__ = [
    "DEPTHWISE",
    "HEADS_PADDED",
    "KERNEL",
    "ROW",
    "SAME",
    "TRANSPOSED",
    "Tile",
    "Transform",
    "tile_shape",
    "whole",
]

Shape = tuple[int, ...]
Tile = tuple[slice, ...]


def tile_shape(tile: Tile) -> Shape:
    """Sizes of a tile."""
    return tuple(s.stop - s.start for s in tile)


def whole(shape: Shape) -> Tile:
    """The tile that is all of a tensor."""
    return tuple(slice(0, n) for n in shape)


@dataclass(frozen=True)
class Transform:
    """The transform of a weight that is stored as it is, which the others refine."""

    def stored_shape(self, shape: Shape) -> Shape:
        """Unchanged."""
        return shape

    def sliced_shape(self, shape: Shape) -> Shape:
        """The shape in the checkpoint."""
        return self.stored_shape(shape)

    def stored_tile(self, tile: Tile, shape: Shape) -> Tile:
        """Unchanged."""
        del shape
        return tile

    def load(self, stored: Tensor, tile: Tile) -> Tensor:
        """Unchanged."""
        del tile
        return stored

    def export(self, part: Tensor, tile: Tile, shape: Shape) -> Tensor:
        """Unchanged."""
        del tile, shape
        return part


@dataclass(frozen=True)
class _Transposed(Transform):
    """Stored ``[out, in]``, used as ``[in, out]``."""

    def stored_shape(self, shape: Shape) -> Shape:
        """Reversed."""
        return shape[::-1]

    def stored_tile(self, tile: Tile, shape: Shape) -> Tile:
        """Reversed."""
        del shape
        return tile[::-1]

    def load(self, stored: Tensor, tile: Tile) -> Tensor:
        """``[in, out]``."""
        del tile
        return stored.mT

    def export(self, part: Tensor, tile: Tile, shape: Shape) -> Tensor:
        """``[out, in]``."""
        del tile, shape
        return part.mT


@dataclass(frozen=True)
class _Kernel(_Transposed):
    """The kernel of a convolution, stored ``[out, C, P, P]``, used as a matrix ``[C P P, out]``."""

    channels: int

    def stored_shape(self, shape: Shape) -> Shape:
        """Four dimensions."""
        side = math.isqrt(shape[0] // self.channels)  # patches are square
        return (shape[1], self.channels, side, side)

    def sliced_shape(self, shape: Shape) -> Shape:
        """``[out, C P P]``."""
        return shape[::-1]


@dataclass(frozen=True)
class _Inserted(Transform):
    """Stored with one more dimension of size 1: ``[C, 1, W]`` for ``[C, W]``, ``[1, D]`` for
    ``[D]``.
    """

    dim: int

    def stored_shape(self, shape: Shape) -> Shape:
        """Adds the dimension."""
        return (*shape[: self.dim], 1, *shape[self.dim :])

    def stored_tile(self, tile: Tile, shape: Shape) -> Tile:
        """Adds the dimension."""
        del shape
        return (*tile[: self.dim], slice(0, 1), *tile[self.dim :])

    def load(self, stored: Tensor, tile: Tile) -> Tensor:
        """Leaves the dimension out."""
        del tile
        return stored.squeeze(self.dim)

    def export(self, part: Tensor, tile: Tile, shape: Shape) -> Tensor:
        """Adds the dimension."""
        del tile, shape
        return part.unsqueeze(self.dim)


@dataclass(frozen=True)
class _Padded(Transform):
    """A vector stored with zeros up to a multiple of ``multiple`` elements; what stands there
    counts for nothing.
    """

    multiple: int

    def stored_shape(self, shape: Shape) -> Shape:
        """Rounded up."""
        return (-(-shape[0] // self.multiple) * self.multiple,)

    def stored_tile(self, tile: Tile, shape: Shape) -> Tile:
        """The tile; the last one has the zeros too."""
        (rows,) = tile
        stop = rows.stop if rows.stop < shape[0] else self.stored_shape(shape)[0]
        return (slice(rows.start, stop),)

    def load(self, stored: Tensor, tile: Tile) -> Tensor:
        """Leaves the zeros out."""
        return stored[: tile[0].stop - tile[0].start]

    def export(self, part: Tensor, tile: Tile, shape: Shape) -> Tensor:
        """Adds the zeros, if it is the last tile."""
        (rows,) = self.stored_tile(tile, shape)
        return torch.cat([part, part.new_zeros(rows.stop - rows.start - part.shape[0])])


SAME = Transform()
TRANSPOSED = _Transposed()  # torch.nn.Linear's layout
KERNEL = _Kernel(3)  # of colours
DEPTHWISE = _Inserted(1)  # torch.nn.Conv1d's layout with one channel per group
ROW = _Inserted(0)  # torch.nn.Linear's layout of a map onto one number
HEADS_PADDED = _Padded(128)  # as K3 stores A_log
