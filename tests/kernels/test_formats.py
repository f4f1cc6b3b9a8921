"""Narrow formats against what their bits say, and fake quantisation against encoding and
decoding.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from k31fn import random
from k31fn.autodiff import value_and_grad
from k31fn.kernels.formats import fp8, mxfp4, mxfp8
from k31fn.kernels.formats.powers import power_of_two


def wide_range(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, each row on a scale of its own."""
    return (
        random.normal(random.key(seed), shape)
        * torch.logspace(-6, 3, shape[0])[(..., *[None] * (len(shape) - 1))]
    )


def e4m3_by_hand() -> list[float]:
    """The finite numbers of E4M3, from its bits."""
    found = []
    for code in range(256):
        sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
        if exponent == 15 and mantissa == 7:
            continue
        size = (
            mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        )
        found.append(-size if sign else size)
    return sorted(set(found))


def nearest_by_hand(x: float, numbers: list[float]) -> set[float]:
    """The nearest number, both if it is a tie."""
    distance = min(abs(x - n) for n in numbers)
    return {n for n in numbers if abs(x - n) == distance}


def test_mxfp4_fake_quantisation_is_encoding_and_decoding():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        w = wide_range(40, 96).to(dtype)
        w[3, :32] = 0
        w[4, :8] = torch.tensor(
            [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
        )  # ties, in a group of its own scale
        w[4, 8:32] = 0
        assert torch.equal(mxfp4.fake_quantise(w), mxfp4.decode(*mxfp4.encode(w.bfloat16()), dtype))
        again = mxfp4.fake_quantise(w)
        assert torch.equal(mxfp4.fake_quantise(again), again)


def test_mxfp8_numbers_are_the_nearest_of_e4m3():
    numbers, x = e4m3_by_hand(), wide_range(6, 64, seed=1)
    rounded = mxfp8.fake_quantise(x)
    for row, got in zip(x.unflatten(-1, (-1, 32)).flatten(0, 1), rounded.view(-1, 32), strict=True):
        factor = 2.0 ** (math.floor(math.log2(float(row.abs().max()))) - 8)
        for a, b in zip(row.tolist(), got.tolist(), strict=True):
            assert b / factor in nearest_by_hand(max(-448.0, min(448.0, a / factor)), numbers)
    assert torch.equal(mxfp8.fake_quantise(rounded), rounded)
    assert mxfp8.fake_quantise(torch.full((32,), 511.0))[0] == 448, "saturates, is not NaN"


@pytest.mark.parametrize("fake_quantise", [mxfp4.fake_quantise, mxfp8.fake_quantise])
def test_the_gradient_is_that_of_the_identity_also_where_it_saturates(fake_quantise):
    x, ct = (
        wide_range(4, 64, seed=2).double(),
        random.normal(random.key(3), (4, 64), dtype=torch.float64),
    )
    x[0, 0] = x[0].abs().max() * 1.99
    assert not torch.equal(fake_quantise(x), x)
    _, grad = value_and_grad(lambda x: (fake_quantise(x) * ct).sum())(x)
    assert torch.equal(grad, ct)
    assert torch.equal(
        vmap(torch.func.grad(lambda x, ct: (fake_quantise(x) * ct).sum()))(x, ct), ct
    )
    with pytest.raises(ValueError, match="no whole groups of 32"):
        fake_quantise(x[:, :20])


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_blocks(stored: torch.dtype):
    """Each number within half a step of its own, no scale larger than needed, and encoding again
    changes no number.
    """
    w = wide_range(2, 12, 30, seed=4)
    w[0, :4, :10] = 0
    codes, scales = fp8.encode(w, (4, 10), stored)
    assert codes.shape == w.shape
    assert codes.dtype == torch.uint8
    assert scales.shape == (2, 3, 3)
    back = fp8.decode(codes, scales, torch.float32, stored)
    info, each = torch.finfo(stored), scales.repeat_interleave(4, 1).repeat_interleave(10, 2)
    step = torch.maximum(w.abs() * info.eps, info.smallest_normal * info.eps * each)
    assert bool(((back - w).abs() <= step / 2 * (1 + 1e-6)).all())
    largest = w.unflatten(2, (3, 10)).unflatten(1, (3, 4)).abs().amax((2, 4))
    assert bool((largest <= info.max * scales).all())
    assert bool(((largest > info.max * scales / 2) | (largest == 0)).all())
    assert torch.equal(fp8.decode(*fp8.encode(back, (4, 10), stored), torch.float32, stored), back)
    assert torch.equal(fp8.decode(codes, scales, torch.bfloat16, stored).float(), back), (
        "exact in bfloat16"
    )
    batched = vmap(lambda c, s: fp8.decode(c, s, torch.float32, stored))(codes, scales)
    assert torch.equal(batched, back)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="do not divide a matrix"):
        fp8.encode(torch.ones(6, 6), (4, 2))
    with pytest.raises(ValueError, match="equal blocks"):
        fp8.decode(torch.zeros(6, 6, dtype=torch.uint8), torch.ones(4, 2), torch.float32)
    assert [fp8.block_size(n) for n in (7168, 576, 264, 97)] == [128, 96, 88, 97]


def test_powers_of_two_are_exact():
    exponents = torch.arange(-126, 128)
    assert power_of_two(exponents, torch.float64).tolist() == [2.0**e for e in exponents.tolist()]
