"""Counter-based random numbers: a value is a function of (key, global index) and of nothing else.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
2011), written in int64 tensor operations. There is no state: a rank draws just its own tile of a
tensor and gets the bits that it would have cut out of the whole, on every mesh. A key is an int64
tensor of two 32-bit words, so keys batch under ``torch.func.vmap``; torch's own generators have no
such form on the CPU.

Counter of a draw: word ``j % 4`` of block ``(j // 4, row low, row high, 0)`` is element ``j`` of
the last dimension in the row with that 64-bit linear index over the leading dimensions. The fourth
word keeps draws, :func:`split` and :func:`fold_in` apart.

Everything after the integers is additions, products, one division and conversions of float32
tensors, each of them a torch operation of its own and rounded as IEEE 754 says: the same bits on a
CPU and on an H200, with torch 2.11 and 2.13. Library functions have not (measured: log, exp, cos
and even sqrt differ between CPU and CUDA, the CPU's sigmoid between the body and the tail of a
loop). A compiler that fuses a product with a sum takes this away: draw eagerly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from k31fn._functorch import reinterpret
from k31fn.typing import Float, Int, Tensor

__all__ = [
    "bits",
    "fold_in",
    "key",
    "normal",
    "split",
    "stochastic_round",
    "truncated_normal",
    "uniform",
]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_DRAW, _SPLIT, _FOLD = range(3)  # fourth counter word

# Numbers drawn at a time. CPU: temporaries of a few hundred KB stay in a core's caches and outweigh
# the cost of a call (40 M normals/s on one core; 25 M at a quarter of this size). Accelerator: work
# for each launch against memory (H200: 1.6 G normals/s with 190 MiB of temporaries; 0.4 G at a
# quarter, 3.3 G at four times this size).
_PIECE_HOST, _PIECE_ACCELERATOR = 1 << 17, 1 << 22

# Minimax fits, highest power first; see _log2 and _half_normal.
_LOG2 = (
    -0.00908878954,
    0.0147788101,
    -0.0205788113,
    0.0374628985,
    -0.0712997363,
    0.142526375,
    -0.32059683,
    0.961795972,
    0.584962488,
)
_QUANTILE_TOP = (
    4.68616414e-06,
    0.000230702742,
    0.00395470256,
    0.0431594277,
    0.313577222,
    1.25331428,
)
_QUANTILE_BOTTOM = (1.6134581e-07, 3.91924453e-05, 0.000759252041, 0.0156967776, 0.0687348346, 1.0)


def key(seed: int, *, device: torch.device | str | None = None) -> Int[Tensor, "2"]:
    """The key of a seed.

    Args:
        seed: 0 <= seed < 2**64; its low and high 32 bits are the two words.
        device: where the key, and all that is drawn with it, lives.

    Raises:
        ValueError: the seed is out of range.
    """
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed={seed} must be in [0, 2**64); take it modulo 2**64")
    return torch.tensor([seed & _WORD, seed >> 32], dtype=torch.int64, device=device)


def split(key: Int[Tensor, "2"], num: int) -> Int[Tensor, "num 2"]:
    """``num`` new keys; the i-th does not depend on ``num``.

    Raises:
        ValueError: ``num`` is negative, or ``key`` is not one key.
    """
    _check_key(key)
    if num < 0:
        raise ValueError(f"num={num} must not be negative")
    index = torch.arange(num, dtype=torch.int64, device=key.device)
    return torch.stack(_philox(*_words64(index), index * 0, index * 0 + _SPLIT, key)[:2], dim=-1)


def fold_in(key: Int[Tensor, "2"], data: int | Int[Tensor, ""]) -> Int[Tensor, "2"]:
    """A new key from ``key`` and an int64 (a step, a layer, a rank); a tensor may be batched by
    vmap.

    Raises:
        ValueError: ``data`` is not one int64, or ``key`` is not one key.
    """
    _check_key(key)
    data = _int64(data, key.device)
    return torch.stack(_philox(*_words64(data), data * 0, data * 0 + _FOLD, key)[:2])


def bits(
    key: Int[Tensor, "2"], shape: Sequence[int], *, tile: tuple[slice, ...] | None = None
) -> Int[Tensor, "..."]:
    """Uniform 32-bit words, as int64 in [0, 2**32). ``tile`` and errors as in :func:`uniform`."""
    return _draw(key, shape, tile, torch.int64, lambda words: words)


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
    last = float(
        np.nextafter(np.float32(high), np.float32(low))
    )  # the sum below may round up to `high` itself

    def transform(words: Tensor) -> Tensor:
        return (words >> 8).to(torch.float32).mul_((high - low) * 2**-24).add_(low).clamp(max=last)

    return _draw(key, shape, tile, _floating(dtype), transform)


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
    return _draw(key, shape, tile, _floating(dtype), lambda words: _half_normal(words, 0.0))


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
        return _half_normal(words, tail).clamp(
            -bound, bound
        )  # rounding may step over by one unit in the last place

    return _draw(key, shape, tile, _floating(dtype), transform)


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
    added = _draw(
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
    x = x.detach()
    rounded = reinterpret((reinterpret(x, torch.int32) + added) & -0x10000, torch.float32)
    return torch.where(torch.isfinite(x), rounded, x).to(dtype)


def _philox(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of counters in [0, 2**32) that broadcast.

    A product of two 32-bit words wraps into int64 with the right bits, so the high word is its
    shift. The low word is masked only when it has reached a position where its upper half would
    matter: 10 operations a round, not 14.
    """
    k0, k1 = key[0], key[1]
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((product1 >> 32) ^ c1 ^ k0) & _WORD, ((product0 >> 32) ^ c3 ^ k1) & _WORD
        c1, c3 = product1, product0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def _words64(x: Tensor) -> tuple[Tensor, Tensor]:
    return x & _WORD, (x >> 32) & _WORD


def _int64(data: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(data, int):
        if not -(1 << 63) <= data < 1 << 63:
            raise ValueError(f"data={data} must fit int64; take it modulo 2**63")
        return torch.tensor(data, dtype=torch.int64, device=device)
    if data.ndim or data.dtype.is_floating_point or data.dtype.is_complex:
        raise ValueError(
            f"data has shape {list(data.shape)} and {data.dtype}; expected one integer: fold in "
            "one by one"
        )
    return data.to(torch.int64)


def _draw(
    key: Tensor,
    shape: Sequence[int],
    tile: tuple[slice, ...] | None,
    dtype: torch.dtype,
    transform: Callable[[Tensor], Tensor],
) -> Tensor:
    """``transform`` of the words of ``tile``, piece by piece, so that temporaries stay small for
    any tensor.
    """
    _check_key(key)
    shape = tuple(shape)
    starts, sizes = _starts_and_sizes(shape, tile)
    out = key.new_empty(
        sizes, dtype=dtype
    )  # not torch.empty: under vmap it must be batched like the key
    if 0 in sizes:
        return out
    first, width = (starts[-1], sizes[-1]) if shape else (0, 1)
    rows = out.view(-1, width)
    for row0, row1, block0, block1 in _pieces(
        key, math.prod(sizes[:-1]), first // 4, -(-(first + width) // 4)
    ):
        block = torch.arange(block0, block1, dtype=torch.int64, device=key.device)
        low, high = _words64(_row_index(row0, row1, shape, starts, sizes, key.device)[:, None])
        words = torch.stack(_philox(block, low, high, block * 0 + _DRAW, key), dim=-1).flatten(-2)
        column0, column1 = max(4 * block0, first), min(4 * block1, first + width)
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
    index, stride = left * 0, 1
    for dim in range(len(shape) - 2, 0, -1):
        index = index + (left % sizes[dim] + starts[dim]) * stride
        left, stride = left // sizes[dim], stride * shape[dim]
    return index + (left + (starts[0] if len(shape) > 1 else 0)) * stride


def _half_normal(words: Tensor, tail: float) -> Tensor:
    """Top bit: the sign. Others: p uniform in (tail, 1/2), mapped to the quantile -Phi^-1(p).

    ``-Phi^-1(p) = (1 - 2p) R(w)``, ``w = -log2(4 p (1 - p))``, where R is smooth and positive: a
    5/5 rational minimax fit on 0 <= w <= 31 (all that 31 bits can reach) has relative error 1.1e-7.
    p and 1 - 2p are formed from the integer and its complement, so both ends keep their relative
    precision.
    """
    magnitude = words & 0x7FFFFFFF
    p = magnitude.to(torch.float32).add_(0.5).mul_((0.5 - tail) * 2**-31).add_(tail)
    centred = (0x7FFFFFFF - magnitude).to(torch.float32).add_(0.5).mul_((1 - 2 * tail) * 2**-31)
    w = _log2((1 - p).mul_(p)).add_(2).neg_()
    sign = (words >> 31).to(torch.float32).mul_(-2).add_(1)
    return (
        centred.mul_(sign)
        .mul_(_polynomial(w, _QUANTILE_TOP))
        .div_(_polynomial(w, _QUANTILE_BOTTOM))
    )


def _log2(x: Tensor) -> Tensor:
    """log2 of positive normal float32 numbers: exponent plus a polynomial of the mantissa, error
    1e-7 and roundings.
    """
    field = reinterpret(x, torch.int32)
    mantissa = reinterpret((field & 0x7FFFFF) | 0x3F800000, torch.float32)
    return ((field >> 23) - 127).to(torch.float32).add_(_polynomial(mantissa - 1.5, _LOG2))


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Horner's scheme, in separate products and sums (see the module's docstring)."""
    value = x * coefficients[0]
    for c in coefficients[1:-1]:
        value.add_(c).mul_(x)
    return value.add_(coefficients[-1])


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


def _check_key(key: Tensor) -> None:
    if key.shape != (2,) or key.dtype != torch.int64:
        raise ValueError(
            f"key has shape {list(key.shape)} and {key.dtype}; expected [2], int64: batch keys "
            "with vmap"
        )


def _floating(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype} must be a floating dtype; bits() gives integers")
    return dtype
