"""Random words and rounding on the device: the bits of ``k31fn.random``, whole and in parts."""

import pytest
import torch

from k31fn import random
from k31fn.kernels.philox import Draws, random_bits, stochastic_round
from k31fn.kernels.registry import record_impls, use_impl
from tests.kernels.fused import DEVICE, poisoned

pytest.importorskip("triton")

# whole shape, where the part begins, its size
PARTS = [
    ((), (), ()),
    ((1,), (0,), (1,)),
    ((37,), (0,), (37,)),
    ((37,), (5,), (21,)),
    ((7, 64), (0, 0), (7, 64)),
    ((9, 30), (2, 3), (5, 25)),
    ((3, 5, 20), (1, 0, 4), (2, 5, 8)),
    ((3, 6, 16), (0, 2, 0), (3, 3, 16)),
    ((2, 3, 4, 8), (1, 0, 1, 0), (1, 3, 2, 8)),
    ((2, 3), (0, 3), (2, 0)),
    ((70000, 70000), (69990, 69991), (3, 9)),
]


def draws(shape, starts, seed=5) -> Draws:
    return Draws(random.key(seed * 2**40 + 3, device=DEVICE), shape, starts)


def by_random(d: Draws, size) -> torch.Tensor:
    tile = tuple(slice(a, a + n) for a, n in zip(d.starts, size, strict=True))
    return random.bits(d.key, d.shape, tile=tile)


@pytest.mark.parametrize(("shape", "starts", "size"), PARTS)
def test_words_are_those_of_the_whole(shape, starts, size):
    d = draws(shape, starts)
    with use_impl(random_bits="triton"), record_impls() as ran, poisoned():
        got = random_bits(d, size)
    assert ran["random_bits", "triton"] == 1
    assert torch.equal(got, by_random(d, size))
    if got.numel() > 4:
        assert not torch.equal(got, by_random(draws(shape, starts, seed=6), size)), "another key"
        moved = d._replace(
            shape=(*shape[:-1], shape[-1] + 4), starts=(*starts[:-1], starts[-1] + 4)
        )
        assert not torch.equal(got, by_random(moved, size)), "another place"


@pytest.mark.parametrize(("shape", "starts", "size"), PARTS)
def test_rounding_has_the_bits_of_the_reference(shape, starts, size):
    d = draws(shape, starts)
    x = torch.randn(size, device=DEVICE) * torch.randn(size, device=DEVICE).exp()
    for i, special in enumerate((float("inf"), -float("inf"), float("nan"), -0.0, 1.0)):
        if x.numel() > 8:
            x.view(-1)[i] = special
    results = []
    for name in ("reference", "triton"):
        with use_impl(stochastic_round=name), poisoned():
            results.append(stochastic_round(x, d))
    want, got = results
    assert got.dtype == torch.bfloat16
    same = (got.view(torch.int16) == want.view(torch.int16)) | (got.isnan() & want.isnan())
    assert bool(same.all())


def test_a_part_that_is_cut_twice_inside_is_refused():
    d = draws((2, 3, 4, 8), (0, 1, 1, 0))
    with use_impl(random_bits="triton"), pytest.raises(ValueError, match="more than one inner dim"):
        random_bits(d, (2, 2, 2, 8))


def test_draws_of_a_slice():
    d = draws((9, 30), (2, 3))
    whole = random_bits(d, (5, 25))
    index = (slice(1, 4), slice(6, 20))
    assert torch.equal(random_bits(d.at(index), (3, 14)), whole[index])
