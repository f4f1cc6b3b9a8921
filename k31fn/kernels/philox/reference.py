"""Plain torch forms: those of :mod:`k31fn.random`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from k31fn import random
from k31fn.typing import Float, Int, Tensor

__all__ = ["Draws", "random_bits", "stochastic_round"]


class Draws(NamedTuple):
    """Where the random words of a tensor come from.

    Attributes:
        key: of :mod:`k31fn.random`.
        shape: of the whole tensor, which may be cut over ranks.
        starts: where this one begins in it, a number for each dimension.
    """

    key: Int[Tensor, "2"]
    shape: tuple[int, ...]
    starts: tuple[int, ...]

    def at(self, index: tuple[slice, ...]) -> Draws:
        """Those of a slice of the tensor."""
        moved = [a + s.start for a, s in zip(self.starts, index, strict=True)]
        return self._replace(starts=tuple(moved))

    def tile(self, size: tuple[int, ...]) -> tuple[slice, ...]:
        """The place of a tensor of this size, as :mod:`k31fn.random` takes it."""
        return tuple(slice(a, a + n) for a, n in zip(self.starts, size, strict=True))


def random_bits(draws: Draws, size: tuple[int, ...]) -> Int[Tensor, "..."]:
    """Words of a tensor of this size."""
    return random.bits(draws.key, draws.shape, tile=draws.tile(size))


def stochastic_round(x: Float[Tensor, "*shape"], draws: Draws) -> Float[Tensor, "*shape"]:
    """``x`` in bfloat16."""
    if x.is_meta:
        return x.to(torch.bfloat16)  # there are no values to draw for
    place = draws.tile(tuple(x.shape))
    return random.stochastic_round(x, torch.bfloat16, draws.key, shape=draws.shape, tile=place)
