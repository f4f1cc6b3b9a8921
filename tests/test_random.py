"""Random numbers against published vectors, the distributions they claim, and their own slices."""

import hashlib
import itertools
import math
from statistics import NormalDist

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from k31fn import random
from k31fn.random import tiles
from k31fn.random.keys import _int64, check_key, philox
from k31fn.random.quantile import half_normal

# Random123, kat_vectors: philox4x32 10 (counter, key, words).
VECTORS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
DRAWS = [random.bits, random.uniform, random.normal, random.truncated_normal]
FLOATS = [random.uniform, random.normal, random.truncated_normal]
N = 1 << 20


def words(text: str) -> Tensor:
    return torch.tensor([int(w, 16) for w in text.split()])


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_vectors(counter: str, key: str, expected: str) -> None:
    assert torch.stack(philox(*words(counter), words(key))).equal(words(expected))


def test_words_of_a_tensor_are_philox_of_its_indices() -> None:
    shape, key = (3, 5, 10), random.key(0x0123456789ABCDEF)
    drawn = random.bits(key, shape)
    for i, j, k in itertools.product(*map(range, shape)):
        counter = (torch.tensor(w) for w in (k // 4, 5 * i + j, 0, 0))
        assert drawn[i, j, k] == philox(*counter, words("89abcdef 01234567"))[k % 4]


def test_row_index_uses_64_bits() -> None:
    rows, key = 1 << 41, random.key(1)
    drawn = random.bits(key, (rows, 2, 4), tile=(slice(rows - 1, rows), slice(1, 2), slice(0, 4)))
    index = 2 * rows - 1
    counter = (torch.tensor(w) for w in (0, index & 0xFFFFFFFF, index >> 32, 0))
    assert drawn.flatten().equal(torch.stack(philox(*counter, key)))


def random_tile(shape: tuple[int, ...]) -> tuple[slice, ...]:
    ends = (sorted(torch.randint(0, n + 1, (2,)).tolist()) for n in shape)
    return tuple(slice(a, b) for a, b in ends)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(
    "shape",
    [(), (1,), (7,), (64,), (1001,), (13, 17), (5, 1), (4, 6, 9), (2, 3, 4, 5), (0, 3), (3, 0)],
)
@pytest.mark.parametrize("piece", [16, 1 << 17])
def test_a_tile_is_bit_equal_to_the_slice(
    draw, shape, piece, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the tile and whatever the pieces it is computed in: loop bodies and tails must
    agree.
    """
    key = random.key(3)
    whole = draw(key, shape)
    assert whole.shape == shape
    monkeypatch.setattr(tiles, "_PIECE_HOST", piece)
    assert draw(key, shape).equal(whole)
    for _ in range(12):
        tile = random_tile(shape)
        assert draw(key, shape, tile=tile).equal(whole[tile])


def test_tiles_of_a_large_tensor() -> None:
    shape, key = (70, 9, 1031), random.key(8)  # several pieces
    whole = random.normal(key, shape)
    for _ in range(15):
        tile = random_tile(shape)
        assert random.normal(key, shape, tile=tile).equal(whole[tile])
    assert random.normal(key, shape, tile=(slice(None), slice(2, None), slice(None, 5))).equal(
        whole[:, 2:, :5]
    )


def test_a_shifted_tile_is_caught() -> None:
    key = random.key(3)
    assert not random.normal(key, (9, 9), tile=(slice(0, 9), slice(1, 9))).equal(
        random.normal(key, (9, 9))[:, :8]
    )
    assert not random.normal(key, (8, 9)).equal(
        random.normal(key, (9, 8)).view(8, 9)
    )  # the shape is part of the index


def test_only_the_tile_is_drawn() -> None:
    """2**60 elements in all: anything but the tile would not fit."""
    tile = (slice(5, 8), slice(1 << 29, (1 << 29) + 4))
    assert random.normal(random.key(0), (1 << 30, 1 << 30), tile=tile).shape == (3, 4)


def digest(draws: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(d.cpu().numpy().tobytes() for d in draws)).hexdigest()


def golden_draws(device: str) -> list[Tensor]:
    key, shape = random.fold_in(random.split(random.key(3, device=device), 4)[2], 17), (777, 1031)
    draws = [random.normal(key, shape), random.truncated_normal(key, shape, bound=2.5)]
    return [
        *draws,
        random.uniform(key, shape, low=-0.3, high=0.7),
        random.normal(key, shape, dtype=torch.float64),
    ]


GOLDEN = "5a2f49bb10fe1a8e07ea940a2d06faaea26c7520bbe1439ea0f8af8a7e441705"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_bits_are_the_same_on_every_machine(device: str) -> None:
    """Made with torch 2.13 on AVX512; also seen with AVX2, without vector instructions, and on an
    H200 (torch 2.11).
    """
    assert digest(golden_draws(device)) == GOLDEN


def normal_cdf(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def truncated_cdf(bound: float):
    def cdf(x: Tensor) -> Tensor:
        low, high = (
            torch.special.ndtr(torch.tensor(b, dtype=torch.float64)) for b in (-bound, bound)
        )
        return (torch.special.ndtr(x) - low) / (high - low)

    return cdf


def kolmogorov_smirnov(x: Tensor, cdf) -> float:
    """sqrt(n) sup |F_n - F|. Under F it exceeds 2.2 with probability 2 exp(-2 * 2.2**2) =
    1.3e-4.
    """
    x = x.flatten().double().sort().values
    n = x.numel()
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    f = cdf(x)
    return float(
        math.sqrt(n) * torch.maximum((f - steps[:-1]).abs().max(), (steps[1:] - f).abs().max())
    )


@pytest.mark.parametrize(
    ("draw", "cdf"),
    [
        (random.uniform, lambda x: x),
        (random.normal, normal_cdf),
        (random.truncated_normal, truncated_cdf(3.0)),
    ],
)
@pytest.mark.parametrize(
    "shape", [(N,), (N // 4, 4), (N, 1)]
)  # along blocks, along rows, one word of each block
def test_distribution(draw, cdf, shape) -> None:
    x = draw(random.key(11), shape)
    assert kolmogorov_smirnov(x, cdf) < 2.2
    if len(shape) == 1:  # the test can see an error of 1% in the scale
        assert kolmogorov_smirnov(1.01 * x, lambda y: cdf(y).clamp(0, 1)) > 2.2


def test_moments() -> None:
    """Within 4.5 standard errors: sd of x**k is sqrt(E x**2k - (E x**k)**2)."""
    x = random.normal(random.key(5), (N,)).double()
    for power, mean, second in [(1, 0, 1), (2, 1, 3), (3, 0, 15), (4, 3, 105)]:
        assert abs(float((x**power).mean()) - mean) < 4.5 * math.sqrt((second - mean**2) / N)


@pytest.mark.parametrize("bound", [0.5, 2.0, 3.0, 10.0])
def test_truncated_normal_keeps_its_bound_and_variance(bound: float) -> None:
    x = random.truncated_normal(random.key(5), (N,), bound=bound).double()
    phi = math.exp(-(bound**2) / 2) / math.sqrt(2 * math.pi)
    variance = 1 - 2 * bound * phi / math.erf(bound / math.sqrt(2))
    assert x.abs().max() <= bound
    assert x.abs().max() > min(bound - 1e-3, 4.5)
    assert abs(float(x.square().mean()) - variance) < 4.5 * math.sqrt(
        2 / N
    )  # sd of x**2 is at most sqrt 2
    assert kolmogorov_smirnov(x, truncated_cdf(bound)) < 2.2


def test_quantile_function_against_float64() -> None:
    """Relative error below 1e-6 (7e-8 from the fit, the rest roundings), ends and middle of the
    range included.
    """
    middle, end = torch.arange(-100, 100) + (1 << 31), torch.arange(100)
    sample = torch.cat(
        [random.bits(random.key(2), (N,)), middle, end, (1 << 32) - 1 - end, 1 << torch.arange(32)]
    )
    p = ((sample & 0x7FFFFFFF).double() + 0.5) / 2**32
    expected = -torch.special.ndtri(p) * (1 - 2 * (sample >> 31))
    # ndtri itself loses relative precision at p = 1/2, where the quantile is sqrt(2 pi) (1/2 - p)
    # to third order.
    q = (0.5 - p) * (1 - 2 * (sample >> 31))
    expected = torch.where(q.abs() < 1e-4, math.sqrt(2 * math.pi) * q, expected)
    torch.testing.assert_close(half_normal(sample, 0.0).double(), expected, rtol=1e-6, atol=0)


def test_extreme_words_are_finite_and_symmetric() -> None:
    extremes = half_normal(torch.tensor([0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]), 0.0)
    assert extremes[0] == -extremes[2]
    assert extremes[1] == -extremes[3]
    expected = torch.tensor([-NormalDist().inv_cdf(2**-33), math.sqrt(2 * math.pi) * 2**-33])
    torch.testing.assert_close(extremes[:2], expected, rtol=1e-6, atol=0)


def test_uniform_range_excludes_high() -> None:
    x = random.uniform(random.key(1), (N,), low=1.0, high=2.0)  # 1 + (1 - 2**-24) rounds to 2
    assert x.min() >= 1
    assert x.max() < 2
    shifted = random.uniform(random.key(1), (N,), low=-3.0, high=5.0)
    torch.testing.assert_close(
        shifted.double(), 8 * random.uniform(random.key(1), (N,)).double() - 3, rtol=0, atol=5e-7
    )
    assert shifted.max() < 5


def correlation(x: Tensor, y: Tensor) -> float:
    """sqrt(n) times the correlation: standard normal for independent streams."""
    x, y = x.flatten().double(), y.flatten().double()
    return abs(float(torch.corrcoef(torch.stack([x, y]))[0, 1])) * math.sqrt(x.numel())


def test_streams_are_uncorrelated() -> None:
    """Keys that differ in one bit, split keys, folded keys and their parent; 4.5 sigma, about 70
    pairs: p = 5e-4.
    """
    parent, n = random.key(0), 1 << 18
    keys = [parent, random.key(1), random.key(1 << 32), *random.split(parent, 4)]
    keys += [random.fold_in(parent, 0), random.fold_in(parent, 1), random.fold_in(random.key(1), 0)]
    keys += [random.fold_in(parent, -1), random.fold_in(parent, 1 << 32)]
    assert len({tuple(k.tolist()) for k in keys}) == len(keys)
    streams = [random.normal(k, (n,)) for k in keys]
    for a, b in itertools.combinations(streams, 2):
        assert correlation(a, b) < 4.5
    x = streams[0]
    for lag in (1, 2, 3, 4, 8, 64):  # inside and across blocks
        assert correlation(x[:-lag], x[lag:]) < 4.5
    rows = random.normal(parent, (n // 64, 64))
    assert correlation(rows[:-1], rows[1:]) < 4.5
    assert correlation(x, 0.99 * streams[1] + 0.02 * x) > 4.5  # this is what the test can see


def test_split_keys_are_distinct_and_do_not_depend_on_num() -> None:
    parent = random.key(42)
    keys = random.split(parent, 1000)
    assert keys.shape == (1000, 2)
    assert keys.unique(dim=0).shape == (1000, 2)
    assert random.split(parent, 3).equal(keys[:3])
    assert random.split(parent, 0).shape == (0, 2)
    assert keys.min() >= 0
    assert keys.max() < 1 << 32


def test_fold_in_takes_numbers_and_tensors() -> None:
    parent = random.key(42)
    for data in (0, 7, -7, 1 << 40, (1 << 63) - 1):
        assert random.fold_in(parent, data).equal(random.fold_in(parent, torch.tensor(data)))
    assert random.fold_in(parent, 7).equal(
        random.fold_in(parent, torch.tensor(7, dtype=torch.int32))
    )
    folded = torch.stack([random.fold_in(parent, i) for i in range(100)])
    assert folded.unique(dim=0).shape == (100, 2)
    assert not folded.equal(random.split(parent, 100))  # the fourth counter word keeps them apart


@pytest.mark.parametrize("draw", DRAWS)
def test_vmap_over_keys_equals_a_loop(draw) -> None:
    keys, shape, tile = random.split(random.key(9), 6), (5, 11), (slice(1, 4), slice(2, 9))
    for options in ({}, {"tile": tile}):
        batched = vmap(lambda k, o=options: draw(k, shape, **o))(keys)
        assert batched.equal(torch.stack([draw(k, shape, **options) for k in keys]))
    nested = vmap(vmap(lambda k: draw(k, shape)))(keys.view(2, 3, 2))
    assert nested.view(6, 5, 11).equal(vmap(lambda k: draw(k, shape))(keys))


def test_vmap_of_split_and_fold_in() -> None:
    keys, steps = random.split(random.key(9), 6), torch.arange(6)
    assert vmap(lambda k: random.split(k, 3))(keys).equal(
        torch.stack([random.split(k, 3) for k in keys])
    )
    folded = torch.stack([random.fold_in(k, i) for i, k in enumerate(keys)])
    assert vmap(random.fold_in)(keys, steps).equal(folded)
    assert vmap(lambda i: random.fold_in(keys[0], i))(steps).equal(
        torch.stack([random.fold_in(keys[0], i) for i in range(6)])
    )


def test_draws_inside_a_gradient() -> None:
    key = random.key(1)
    grad = torch.func.grad(lambda w: (w * random.normal(key, (4,))).sum())(torch.ones(4))
    assert grad.equal(random.normal(key, (4,)))
    keys = random.split(key, 3)
    per_key = vmap(
        torch.func.grad(lambda w, k: (w * random.normal(k, (4,))).sum()), in_dims=(None, 0)
    )
    assert per_key(torch.ones(4), keys).equal(torch.stack([random.normal(k, (4,)) for k in keys]))
    total = torch.func.grad(
        lambda w: vmap(lambda k: (w * random.normal(k, (4,))).sum())(keys).sum()
    )(torch.ones(4))
    torch.testing.assert_close(total, per_key(torch.ones(4), keys).sum(0))


@pytest.mark.parametrize("draw", FLOATS)
def test_other_dtypes_are_rounded_float32(draw) -> None:
    """So a float64 run starts from the numbers of the float32 run."""
    x = draw(random.key(6), (33, 5))
    assert x.dtype == torch.float32
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert draw(random.key(6), (33, 5), dtype=dtype).equal(x.to(dtype))


def test_key_words() -> None:
    assert random.key(0x0123456789ABCDEF).equal(words("89abcdef 01234567"))


KEY = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: random.key(-1), r"seed=-1 must be in \[0, 2\*\*64\)"),
        (lambda: random.key(1 << 64), r"seed=18446744073709551616 must be in"),
        (lambda: random.split(KEY, -2), "num=-2 must not be negative"),
        (lambda: random.fold_in(KEY, 1 << 63), "data=9223372036854775808 must fit int64"),
        (
            lambda: _int64(torch.tensor([1, 2]), KEY.device),
            r"data has shape \[2\].*expected one integer",
        ),
        (
            lambda: _int64(torch.tensor(1.0), KEY.device),
            "torch.float32; expected one integer",
        ),
        (
            lambda: check_key(torch.zeros(3, 2, dtype=torch.int64)),
            r"shape \[3, 2\].*batch keys with vmap",
        ),
        (lambda: check_key(torch.zeros(2)), r"torch.float32; expected \[2\], int64"),
        (lambda: random.normal(KEY, (-1, 2)), r"shape=\(-1, 2\): sizes must not be negative"),
        (lambda: random.normal(KEY, (1, (1 << 34) + 1)), "the last at most"),
        (lambda: random.normal(KEY, (1 << 62, 2, 4)), "the others together < 2"),
        (lambda: random.normal(KEY, (4, 4), tile=(slice(0, 2),)), "has 1 slices for shape"),
        (
            lambda: random.normal(KEY, (4, 4), tile=(slice(0, 2), slice(2, 5))),
            r"tile\[1\]=slice\(2, 5, None\).*<= 4",
        ),
        (
            lambda: random.normal(KEY, (4,), tile=(slice(-2, None),)),
            r"tile\[0\]=slice\(-2, None, None\)",
        ),
        (lambda: random.normal(KEY, (4,), tile=(slice(0, 4, 2),)), r"tile\[0\]=slice\(0, 4, 2\)"),
        (lambda: random.normal(KEY, (4,), tile=(slice(3, 1),)), r"start <= stop"),
        (
            lambda: random.normal(KEY, (4,), dtype=torch.int64),
            "dtype=torch.int64 must be a floating dtype",
        ),
        (lambda: random.truncated_normal(KEY, (4,), bound=0.0), "bound=0.0 must be positive"),
        (lambda: random.truncated_normal(KEY, (4,), bound=math.nan), "bound=nan must be positive"),
        (
            lambda: random.uniform(KEY, (4,), low=1.0, high=1.0),
            "low=1.0, high=1.0: low must be less",
        ),
        (lambda: random.uniform(KEY, (4,), high=math.inf), "both finite"),
    ],
)
def test_refusals(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_stochastic_rounding_is_unbiased_and_exact_where_it_can_be():
    """Each draw is a neighbour; over all 2**16 offsets of many keys the mean is x within 5 standard
    errors.
    """
    x = random.normal(random.key(3), (64,)) * torch.logspace(-30, 30, 64)
    draws = torch.stack(
        [random.stochastic_round(x, torch.bfloat16, random.key(i)) for i in range(1000)]
    )
    low = (x.view(torch.int32) & -0x10000).view(torch.float32).double()
    high = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32).double()
    wide = draws.double()
    assert bool(((wide == low) | (wide == high)).all())
    odds = (x.double() - low) / (high - low)
    error = (wide.mean(0) - x.double()) / (high - low).abs()
    assert bool((error.abs() <= 5 * (odds * (1 - odds) / 1000).sqrt() + 1e-12).all())
    nearest = (x.bfloat16().double() - x.double()) / (high - low).abs()
    assert float(nearest.abs().max()) > 0.3  # which round-to-nearest is far from
    kept = torch.tensor([0.0, -0.0, 1.0, -3.5, float("inf"), float("-inf"), 2.0**-130])
    assert torch.equal(random.stochastic_round(kept, torch.bfloat16, random.key(0)).float(), kept)
    assert bool(
        random.stochastic_round(torch.tensor([float("nan")]), torch.bfloat16, random.key(0)).isnan()
    )


def test_small_steps_add_up_under_stochastic_rounding():
    """1000 steps of 2**-12 on a weight of 1, of which nearest rounding loses each: the sum arrives,
    +-5 sigma.
    """
    start = torch.ones(500, dtype=torch.bfloat16)
    nearest, drawn = start, start
    for i in range(1000):
        nearest = (nearest.float() + 2.0**-12).bfloat16()
        drawn = random.stochastic_round(drawn.float() + 2.0**-12, torch.bfloat16, random.key(i))
    assert torch.equal(nearest, start)
    sigma = (
        1000 * 2.0**-7 * 2.0**-12
    ) ** 0.5  # of one walk, at most: steps of 2**-7 with odds of 1/32
    assert abs(float(drawn.double().mean()) - (1 + 1000 * 2.0**-12)) < 5 * sigma / 500**0.5


def test_a_tile_is_rounded_like_the_whole():
    x = random.normal(random.key(1), (6, 10))
    whole = random.stochastic_round(x, torch.bfloat16, random.key(2))
    tile = (slice(2, 5), slice(4, 10))
    part = random.stochastic_round(
        x[tile].contiguous(), torch.bfloat16, random.key(2), shape=x.shape, tile=tile
    )
    assert torch.equal(part, whole[tile])
    with pytest.raises(ValueError, match="rounds float32 to bfloat16"):
        random.stochastic_round(x.double(), torch.bfloat16, random.key(2))
    with pytest.raises(ValueError, match="has shape"):
        random.stochastic_round(x, torch.bfloat16, random.key(2), shape=x.shape, tile=tile)
