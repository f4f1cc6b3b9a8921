"""Tensors of random numbers: bits, uniform, normal, truncated normal; and stochastic rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from k31fn._functorch import reinterpret
from k31fn.random.quantile import half_normal
from k31fn.random.tiles import draw
from k31fn.typing import Float, Int, Tensor

__all__ = ["bits", "normal", "stochastic_round", "truncated_normal", "uniform"]


def bits(
    key: Int[Tensor, "2"], shape: Sequence[int], *, tile: tuple[slice, ...] | None = None
) -> Int[Tensor, "..."]:
    """Uniform 32-bit words, as int64 in [0, 2**32). ``tile`` and errors as in :func:`uniform`."""
    return draw(key, shape, tile, torch.int64, lambda words: words)


def uniform(
    key: Int[Tensor, "2"],
    shape: Sequence[int],
    *,
    low: float = 0.0,
    high: float = 1.0,
    tile: tuple[slice, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "..."]:
    """Uniform numbers: ``low + (high - low) k / 2**24`` with k uniform in [0, 2**24).

    Args:
        key: one key (batch keys with vmap).
        shape: the global shape.
        low: smallest value.
        high: exclusive in float32; rounding to a narrower dtype may reach it.
        tile: one ``slice(start, stop)`` per dimension: just this part of ``shape`` is drawn,
            bit-equal to the same slice of the whole. None: all of it.
        dtype: numbers are drawn in float32, then converted; so a float64 run starts from the
            numbers of a float32 run.

    Raises:
        ValueError: an empty or not finite range, a tile that leaves the shape, a dtype that is not
            floating.
    """
    if not (low < high and math.isfinite(high - low)):
        raise ValueError(f"low={low}, high={high}: low must be less than high, both finite")
    # the sum below may round up to `high` itself
    last = float(np.nextafter(np.float32(high), np.float32(low)))

    def transform(words: Tensor) -> Tensor:
        # 24 bits are what a float32 holds exactly, so no uniform number is likelier than another
        steps = (words >> 8).to(torch.float32)
        return steps.mul_((high - low) * 2**-24).add_(low).clamp(max=last)

    return draw(key, shape, tile, _floating(dtype), transform)


def normal(
    key: Int[Tensor, "2"],
    shape: Sequence[int],
    *,
    tile: tuple[slice, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "..."]:
    """Standard normal numbers by inversion: sign times the quantile of a 31-bit uniform.

    Relative error of the quantile below 1e-6; the largest possible magnitude is 6.338 (probability
    2**-31). ``tile``, ``dtype`` and errors as in :func:`uniform`.
    """
    return draw(key, shape, tile, _floating(dtype), lambda words: half_normal(words, 0.0))


def truncated_normal(
    key: Int[Tensor, "2"],
    shape: Sequence[int],
    *,
    bound: float = 3.0,
    tile: tuple[slice, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "..."]:
    """Standard normal numbers conditioned on [-bound, bound], by inversion; :func:`normal` is
    ``bound = inf``.

    The variance is ``1 - 2 b phi(b) / (2 Phi(b) - 1)``, less than 1: 0.7737 for b = 2, 0.9733 for b
    = 3. Nothing is rescaled. ``tile``, ``dtype`` and errors as in :func:`uniform`; also ValueError
    if ``bound`` is not positive.
    """
    if not bound > 0:
        raise ValueError(f"bound={bound} must be positive: the numbers lie in [-bound, bound]")
    tail = 0.5 * math.erfc(bound / math.sqrt(2))

    def transform(words: Tensor) -> Tensor:
        # rounding may step over the bound by one unit in the last place
        return half_normal(words, tail).clamp(-bound, bound)

    return draw(key, shape, tile, _floating(dtype), transform)


def stochastic_round(
    x: Float[Tensor, "*shape"],
    dtype: torch.dtype,
    key: Int[Tensor, "2"],
    *,
    shape: Sequence[int] | None = None,
    tile: tuple[slice, ...] | None = None,
) -> Float[Tensor, "*shape"]:
    """``x`` in bfloat16, rounded up or down with the odds of its distance: the expectation is
    ``x``, exactly.

    Between two neighbours ``a <= x < b`` the result is ``b`` with probability ``(x - a) / (b -
    a)``, to the last bit of float32: a float32 has 2**16 equal steps between neighbours in
    bfloat16, so 16 random bits are added to its integer and the lower half cut off. Steps far below
    a weight's last place, which nearest rounding always loses, add up. What bfloat16 can hold comes
    back as it is, as do infinities and NaN. No gradient flows.

    Args:
        x: float32.
        dtype: bfloat16; or that of ``x``, which is left as it is.
        key: a new one for each call (fold in the step and the leaf).
        shape: the global shape that ``x`` is a tile of; None: ``x`` is whole.
        tile: where it lies there: on any mesh the bits are those of the whole.

    Raises:
        ValueError: another pair of dtypes, or a tile of another shape than ``x``.
    """
    if dtype == x.dtype:
        return x
    if x.dtype != torch.float32 or dtype != torch.bfloat16:
        raise ValueError(
            f"stochastic_round: x is {x.dtype}, dtype={dtype}: it rounds float32 to bfloat16"
        )
    added = draw(
        key,
        tuple(x.shape if shape is None else shape),
        tile,
        torch.int32,
        lambda words: words >> 16,
    )
    if added.shape != x.shape:
        raise ValueError(
            f"stochastic_round: tile={tile} has shape {list(added.shape)}, x {list(x.shape)}"
        )
    # the step through integers has no derivative, so none is pretended
    x = x.detach()
    rounded = reinterpret((reinterpret(x, torch.int32) + added) & -0x10000, torch.float32)
    # an infinity plus random bits would be a NaN
    return torch.where(torch.isfinite(x), rounded, x).to(dtype)


def _floating(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype} must be a floating dtype; bits() gives integers")
    return dtype
