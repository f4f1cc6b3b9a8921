"""Boxes in arrays: the part of a tensor that a rank holds, the blocks it is written in, and what
two boxes share.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Box", "cut", "num_blocks"]


class Box(NamedTuple):
    """A rectangular part of an array.

    Attributes:
        start: its first index in each dimension.
        shape: its size in each dimension.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box:
        """What both have of the same array; of no elements if they are apart."""
        start: list[int] = []
        shape: list[int] = []
        for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True):
            first = max(a, b)
            start.append(first)
            shape.append(max(0, min(a + n, b + m) - first))
        return Box(tuple(start), tuple(shape))

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """Its slices of an array that holds ``outer``."""
        first = _minus(self.start, outer.start)
        return tuple(slice(a, a + n) for a, n in zip(first, self.shape, strict=True))

    def __str__(self) -> str:
        ranges = [f"{a}:{a + n}" for a, n in zip(self.start, self.shape, strict=True)]
        return f"[{', '.join(ranges)}]"


def cut(box: Box, itemsize: int, most: int) -> Iterator[Box]:
    """Blocks of at most ``most`` bytes that make up ``box``, in order.

    The longest dimension is halved until they fit: blocks of a matrix become squares, so a rank
    that wants some of its columns reads little else, as does one that wants some of its rows.

    Args:
        box: of a tensor.
        itemsize: bytes of an element.
        most: a block of one element may have more.
    """
    sizes = _block_sizes(box.shape, itemsize, most)
    offsets = [range(0, n, size) for n, size in zip(box.shape, sizes, strict=True)]
    for offset in itertools.product(*offsets):
        rest = _minus(box.shape, offset)  # the last block of a dimension may be smaller
        yield Box(_plus(box.start, offset), tuple(map(min, sizes, rest)))


def num_blocks(shape: Sequence[int], itemsize: int, most: int) -> int:
    """How many blocks :func:`cut` gives, without making them."""
    sizes = _block_sizes(shape, itemsize, most)
    return math.prod(-(-n // max(size, 1)) for n, size in zip(shape, sizes, strict=True))


def _block_sizes(shape: Sequence[int], itemsize: int, most: int) -> list[int]:
    sizes = list(shape)
    while math.prod(sizes) * itemsize > most and max(sizes, default=1) > 1:
        longest = sizes.index(max(sizes))
        sizes[longest] = -(-sizes[longest] // 2)
    return sizes


def _plus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(operator.add, a, b))


def _minus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(operator.sub, a, b))
