"""Steps of large leaves: what they hold at once, the clip factor inside, and capture."""

import pytest
import torch

from k31fn import optim, params, precision, random, tree
from k31fn.jit import jit
from k31fn.optim import matrix_owners
from k31fn.params import ParamSpec
from k31fn.testing import captures_on_cpu, live_bytes
from tests.optim.tiny import clone, gradients, identical, spec, specs, weights

BF16 = torch.bfloat16
MOST = 2**28


def rounded(declared, **how) -> optim.Transform:
    storage = optim.Storage(BF16)
    rest = optim.adamw(
        declared, storage=storage, where=lambda path, spec: "matrix" not in spec.tags
    )
    both = optim.combine(declared, optim.muon(declared, storage=storage), rest)
    return optim.rounded(both, declared, 3, **how)


def step_of(transform, values, grads):
    """A clipped step; the peak of what it held."""
    state = transform.init(values)
    with live_bytes() as live:
        norm = optim.global_norm(grads)
        scale = optim.clip_factor(norm, 1.0)
        skip = optim.non_finite(norm)
        transform.update(grads, state, values, lr=0.01, scale=scale, skip=skip, donate=True)
    return live.peak


@pytest.mark.parametrize("tags", [[], ["matrix", "expert"]])
def test_no_more_than_256_mib_are_held(tags, monkeypatch):
    """Of a leaf of 24 Mi elements in bfloat16, which in float32 has 96 MiB."""
    large = {"w": spec(96, 64, 4096, dtype=BF16, tags=tags)}
    # drawn by the library: the test is of memory, and Philox on a CPU takes a second
    monkeypatch.setattr(
        random, "stochastic_round", lambda x, dtype, *_, **__: x.to(dtype), raising=True
    )
    values = {"w": torch.randn(96, 64, 4096, dtype=BF16)}
    grads = {"w": torch.randn(96, 64, 4096, dtype=BF16)}
    assert step_of(rounded(large), values, grads) < MOST
    if not tags:
        whole = lambda shape, most=0: [tuple(slice(0, n) for n in shape)]  # noqa: E731
        monkeypatch.setattr(precision, "slices", whole)
        assert step_of(rounded(large), values, grads) > MOST, "the test sees wide leaves"


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_in_the_step_is_a_factor_of_the_gradients(dtype, donate):
    """Bit for bit in the dtype of the step."""
    declared = specs(dtype)
    rest = optim.adamw(declared, where=lambda path, spec: "matrix" not in spec.tags)
    transform = optim.combine(declared, optim.muon(declared), rest)
    inside, outside = weights(dtype), weights(dtype)
    state, other = transform.init(inside), transform.init(outside)
    for i in range(3):
        grads = gradients(i, inside)
        before = clone(grads)
        scale = optim.clip_factor(optim.global_norm(grads), 0.5)
        inside, state = transform.update(grads, state, inside, lr=0.1, scale=scale, donate=donate)
        assert identical(grads, before)
        clipped, _ = optim.clip_by_global_norm(grads, 0.5)
        outside, other = transform.update(clipped, other, outside, lr=0.1, donate=donate)
    assert identical((inside, state), (outside, other))
    assert scale < 1


def test_slices_of_a_step_change_no_bit(monkeypatch):
    """Also where Newton-Schulz does a matrix at a time and its result comes in pieces."""

    def three_steps():
        values = params.init(specs(BF16), random.key(0), dtype=BF16)
        transform = rounded(specs(BF16))
        state = transform.init(values)
        for i in range(3):
            values, state = transform.update(
                gradients(i, values), state, values, lr=0.05, donate=True
            )
        return values, state

    want = three_steps()
    plain = precision.slices
    monkeypatch.setattr(precision, "slices", lambda shape, most=0: plain(shape, 10))
    monkeypatch.setattr(matrix_owners, "_LEAST", 0)
    assert identical(three_steps(), want)


def test_both_updates_agree_where_muon_rounds():
    start = params.init(specs(BF16), random.key(0), dtype=BF16)
    transform = rounded(specs(BF16))
    a, b = clone(start), clone(start)
    state, other = transform.init(a), transform.init(b)
    for i in range(3):
        grads = gradients(i, start)
        a, state = transform.update(grads, state, a, lr=0.05, donate=True)
        b, other = transform.update(grads, other, b, lr=0.05, donate=False)
    # adamw's kernel and its plain form differ in the last place of float32, so few bits turn
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    assert max((x.double() - y.double()).abs().max().item() for x, y in pairs) < 0.01
    for x, y in zip(tree.leaves(a.layers), tree.leaves(b.layers), strict=True):
        assert x.dtype == torch.float32 or torch.equal(x, y)


def test_a_captured_step_has_the_bits_of_an_eager_one():
    def steps(update):
        values = params.init(specs(BF16), random.key(0), dtype=BF16)
        state = transform.init(values)
        for i in range(4):  # the third is captured, the fourth launched
            lr = torch.full((), 0.1 / (i + 1), dtype=torch.float64)
            (values, state), _ = update((values, state), gradients(i, values), lr)
        return values, state

    transform = rounded(specs(BF16))

    def update(held, grads, lr):
        values, state = held
        norm = optim.global_norm(grads)
        scale = optim.clip_factor(norm, 1.0)
        skip = optim.non_finite(norm)
        return transform.update(
            grads, state, values, lr=lr, scale=scale, skip=skip, donate=True
        ), norm

    want = steps(update)
    with captures_on_cpu():
        got = steps(jit(update, donate=(0,), strict=True))
    assert identical(got, want)


def test_the_norm_of_a_large_narrow_leaf(monkeypatch):
    g = {"w": torch.randn(40, 50).to(BF16)}
    exact = g["w"].double().norm()
    monkeypatch.setattr(optim.clip, "_WIDENED", 300)
    for p, want in ((2, exact), (float("inf"), g["w"].double().abs().max())):
        torch.testing.assert_close(optim.global_norm(g, p=p).double(), want, rtol=1e-6, atol=0)


def test_slices_cover_a_tensor_once_and_are_contiguous():
    for shape in ((), (7,), (3, 4), (2, 3, 5), (4, 0, 3), (2, 2, 2, 9)):
        for most in (1, 4, 7, 1000):
            seen = torch.zeros(shape, dtype=torch.int64)
            for index in precision.slices(shape, most):
                seen[index] += 1
                assert seen[index].numel() <= most
                assert seen[index].is_contiguous()
            assert bool((seen == 1).all())


def test_a_weight_of_four_dimensions_is_rounded_by_its_place():
    declared = {
        "w": ParamSpec((2, 3, 4, 8), ("",) * 4, params.Normal(1.0), BF16, frozenset({"matrix"}))
    }
    whole = params.init(declared, random.key(0), dtype=BF16)
    half = {"w": whole["w"][1:].clone()}
    tile = lambda path, spec: (slice(1, 2), *(slice(0, n) for n in spec.shape[1:]))  # noqa: E731
    g = {"w": torch.randn(2, 3, 4, 8)}
    one, own = rounded(declared), rounded(declared, tile=tile)
    whole, _ = one.update(g, one.init(whole), whole, lr=0.05, donate=True)
    half, _ = own.update({"w": g["w"][1:]}, own.init(half), half, lr=0.05, donate=True)
    assert torch.equal(half["w"], whole["w"][1:])
    inner = lambda path, spec: (slice(0, 2), slice(0, 2), *(slice(0, n) for n in spec.shape[2:]))  # noqa: E731
    cut = rounded(declared, tile=inner)
    part = {"w": whole["w"][:, :2].clone()}
    with pytest.raises(ValueError, match="of more than three dimensions"):
        cut.update({"w": g["w"][:, :2]}, cut.init(part), part, lr=0.05, donate=True)
