"""A step of AdamW in place: against float64, in slices, skipped, and with rounded parameters."""

import math

import pytest
import torch

from k31fn import precision, random
from k31fn.kernels.adamw import Constants, adamw_step
from k31fn.kernels.launch import INTERPRETED
from k31fn.kernels.philox import Draws, stochastic_round
from k31fn.kernels.registry import record_impls, use_impl
from tests.kernels.fused import DEVICE

pytest.importorskip("triton")

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
CONSTANTS = Constants(0.9, 0.95, 1e-8, 0.3)
LR = 0.02
IMPLEMENTATIONS = ["reference", "library", "triton"]
SHAPES = [(7, 33), (2, 5, 16), (300,), (), (3, 0)]


def inputs(shape, p_dtype=F32, g_dtype=F32, state=F32):
    p = torch.randn(shape, device=DEVICE).to(p_dtype)
    g = (torch.randn(shape, device=DEVICE) * torch.randn(shape, device=DEVICE).exp()).to(g_dtype)
    mu = (0.1 * torch.randn(shape, device=DEVICE)).to(state)
    nu = (0.1 * torch.randn(shape, device=DEVICE).square()).to(state)
    return p, g, mu, nu


def scalar(value: float, dtype=F32) -> torch.Tensor:
    return torch.full((), value, dtype=dtype, device=DEVICE)


def by_hand(p, g, mu, nu, t, scale, c=CONSTANTS):
    p, g, mu, nu = (x.to(F64) for x in (p, g, mu, nu))
    g = g * scale
    mu = c.beta1 * mu + (1 - c.beta1) * g
    nu = c.beta2 * nu + (1 - c.beta2) * g**2
    m = mu / (1 - c.beta1**t)
    v = nu / (1 - c.beta2**t)
    return p * (1 - LR * c.decay) - LR * m / (v.sqrt() + c.eps), mu, nu


def run(name, x, t=3, scale=0.25, skip=None, draws=None, constants=CONSTANTS):
    p, g, mu, nu = (y.clone() for y in x)
    lr = torch.full((), LR, dtype=F64, device=DEVICE)
    factor = None if scale is None else scalar(scale)
    skipped = None if skip is None else torch.full((), skip, device=DEVICE)
    with use_impl(adamw_step=name), record_impls() as ran:
        out = adamw_step(p, g, mu, nu, scalar(t), lr, constants, factor, skipped, draws)
    assert ran["adamw_step", name] == 1
    assert all(a is b for a, b in zip(out, (p, mu, nu), strict=True))
    return p, mu, nu


def draws(shape) -> Draws:
    return Draws(random.key(11, device=DEVICE), tuple(shape), (0,) * len(shape))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("t", [1, 2, 1000])
def test_equals_the_formula(name, shape, t):
    """Some roundings of numbers about 1, of which the step itself is a fiftieth."""
    x = inputs(shape)
    for got, want in zip(run(name, x, t), by_hand(*x, t, 0.25), strict=True):
        torch.testing.assert_close(got.to(F64), want, rtol=1e-6, atol=1e-6)
    for got, want in zip(run(name, x, t, scale=None), by_hand(*x, t, 1), strict=True):
        torch.testing.assert_close(got.to(F64), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "change", [{"beta1": 0.8}, {"beta2": 0.9}, {"eps": 1e-2}, {"decay": 0.0}, {"beta1": 0.0}]
)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_each_number_matters(name, change):
    x = inputs((40, 9))
    constants = CONSTANTS._replace(**change)
    got = run(name, x, constants=constants)[0].to(F64)
    torch.testing.assert_close(got, by_hand(*x, 3, 0.25, constants)[0], rtol=1e-6, atol=1e-6)
    assert (got - by_hand(*x, 3, 0.25)[0]).abs().max() > 1e-4


@pytest.mark.parametrize(("g", "state"), [(F32, BF16), (BF16, F32), (BF16, BF16)])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_narrow_gradients_and_moments(name, g, state):
    """Moments are rounded to nearest, after the parameter has seen them as they are."""
    x = inputs((9, 37), g_dtype=g, state=state)
    want = by_hand(*x, 3, 0.25)
    p, mu, nu = run(name, x)
    assert (mu.dtype, nu.dtype) == (state, state)
    torch.testing.assert_close(p.to(F64), want[0], rtol=1e-6, atol=1e-6)
    for got, exact in ((mu, want[1]), (nu, want[2])):
        half = 2.0**-8 if state == BF16 else 0
        if name == "triton" and INTERPRETED:
            half *= 2  # the interpreter cuts where devices round
        # before that some roundings of float32
        assert ((got.to(F64) - exact).abs() <= half * exact.abs() + 1e-6 * (1 + exact.abs())).all()


@pytest.mark.parametrize("state", [F32, BF16])
def test_a_bfloat16_parameter_is_rounded_with_its_draws(state):
    """The kernel's step of a float32 copy, rounded by the plain form, has the same bits."""
    for shape in ((9, 37), (4, 6, 16)):
        x = inputs(shape, BF16, BF16, state)
        wide, mu, nu = run("triton", (x[0].to(F32), *x[1:]))
        with use_impl(stochastic_round="reference"):
            want = stochastic_round(wide, draws(shape))
        p, own_mu, own_nu = run("triton", x, draws=draws(shape))
        assert torch.equal(p, want)
        assert torch.equal(own_mu, mu)
        assert torch.equal(own_nu, nu)
        others = draws(shape)._replace(key=random.key(12, device=DEVICE))
        assert not torch.equal(run("triton", x, draws=others)[0], want)
        for name in ("reference", "library"):
            near = run(name, x, draws=draws(shape))[0]
            # a rounding of the last place before it turns few of the bits
            assert (near != want).float().mean() < 0.01


def test_a_bfloat16_parameter_without_draws_is_refused():
    x = inputs((3, 5), BF16)
    for name, message in (("reference", "has no draws"), ("triton", "has draws, by which")):
        with pytest.raises(ValueError, match=message):
            run(name, x)


@pytest.mark.parametrize("p_dtype", [F32, BF16])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_skipped_step_changes_no_bit(name, p_dtype):
    x = inputs((6, 21), p_dtype, BF16, BF16)
    drawn = draws((6, 21)) if p_dtype == BF16 else None
    bad = (x[0], torch.full_like(x[1], math.nan), *x[2:])
    for got, before in zip(run(name, bad, skip=True, draws=drawn), (x[0], *x[2:]), strict=True):
        assert torch.equal(got, before)
    taken, plain = run(name, x, skip=False, draws=drawn), run(name, x, draws=drawn)
    for got, want in zip(taken, plain, strict=True):
        assert torch.equal(got, want)
    assert run(name, bad, draws=drawn)[0].isnan().all()


@pytest.mark.parametrize("p_dtype", [F32, BF16])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_parts_have_the_bits_of_the_whole(name, p_dtype):
    """As ranks hold them: rows, columns that begin inside a block of four words, experts."""
    shape = (4, 6, 22)
    x = inputs(shape, p_dtype, BF16, BF16)
    drawn = draws(shape) if p_dtype == BF16 else None
    whole = run(name, x, draws=drawn)
    rows, columns = slice(0, 6), slice(0, 22)
    for index in (
        (slice(1, 3), rows, columns),
        (slice(0, 4), slice(2, 5), columns),
        (slice(0, 4), rows, slice(7, 20)),
    ):
        part = [y[index].contiguous() for y in x]
        got = run(name, part, draws=drawn.at(index) if drawn else None)
        for a, b in zip(got, whole, strict=True):
            assert torch.equal(a, b[index])
    if drawn:
        index = (slice(1, 3), rows, columns)
        part = [y[index].contiguous() for y in x]
        assert not torch.equal(run(name, part, draws=drawn)[0], whole[0][index]), "no offset"


@pytest.mark.parametrize("p_dtype", [F32, BF16])
@pytest.mark.parametrize("name", ["reference", "library"])
def test_slices_change_no_bit(name, p_dtype, monkeypatch):
    shape = (3, 8, 40)
    x = inputs(shape, p_dtype, BF16, BF16)
    drawn = draws(shape) if p_dtype == BF16 else None
    whole = run(name, x, draws=drawn)
    plain = precision.slices
    for most in (640, 100, 16):
        assert len(list(plain(shape, most))) > 1
        monkeypatch.setattr(precision, "slices", lambda s, most=most: plain(s, most))
        for a, b in zip(run(name, x, draws=drawn), whole, strict=True):
            assert torch.equal(a, b)


def test_tensors_of_any_layout():
    """Gradients are copied; what is written in place is stepped where it lies, or refused."""
    x = inputs((6, 10))
    want = run("library", x)
    turned = [y.T.contiguous().T for y in x]
    for a, b in zip(run("library", turned), want, strict=True):
        assert torch.equal(a, b)
    kernel = run("triton", x)
    for a, b in zip(run("triton", (x[0], turned[1], *x[2:])), kernel, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="must be contiguous"):
        run_uncopied(turned)


def run_uncopied(x):
    with use_impl(adamw_step="triton"):
        adamw_step(*x, scalar(1), LR, CONSTANTS)


@pytest.mark.cuda
def test_on_cuda_the_kernel_is_chosen():
    x = inputs((6, 10))
    with record_impls() as ran:
        adamw_step(*x, scalar(1), LR, CONSTANTS)
        adamw_step(*(y.double() for y in x), scalar(1), LR, CONSTANTS)
    assert dict(ran) == {("adamw_step", "triton"): 1, ("adamw_step", "library"): 1}
