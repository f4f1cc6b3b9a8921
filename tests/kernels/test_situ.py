from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k31fn.kernels.registry import use_impl
from k31fn.kernels.situ import situ_glu
from k31fn.testing import assert_op_matches
from tests.kernels.fused import DEVICE, poisoned

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "situ.safetensors")


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def test_equals_golden():
    y = situ_glu(GOLDEN["gate"], GOLDEN["up"])
    torch.testing.assert_close(y, GOLDEN["y"], rtol=1e-6, atol=1e-6)  # fp32, values up to 100


def test_bf16_rounds_once():
    golden = GOLDEN["y_bf16_in_bf16_out"]
    y = situ_glu(GOLDEN["gate"].bfloat16(), GOLDEN["up"].bfloat16())
    assert torch.equal(y, golden)


def test_gradients_equal_golden():
    gate, up = GOLDEN["gate"].clone().requires_grad_(), GOLDEN["up"].clone().requires_grad_()
    # The golden gradients belong to the cotangent 1.
    grads = torch.autograd.grad(situ_glu(gate, up).sum(), (gate, up))
    assert relative(grads[0], GOLDEN["grad.gate"]) < 1e-6
    assert relative(grads[1], GOLDEN["grad.up"]) < 1e-6


def test_bounds():
    g = torch.tensor([1e4, -1e4, 1e4, 5.0], dtype=torch.float64)
    u = torch.tensor([1e4, 1e4, -1e4, 30.0], dtype=torch.float64)
    y = situ_glu(g, u)
    assert y.abs().max() <= 100
    torch.testing.assert_close(y[:3], torch.tensor([100.0, 0.0, -100.0], dtype=torch.float64))
    assert situ_glu(g, u, 2.0, 3.0).abs().max() <= 6


def test_small_inputs_are_swiglu():
    g, u = torch.randn(2, 50, dtype=torch.float64) * 1e-3
    torch.testing.assert_close(situ_glu(g, u), torch.nn.functional.silu(g) * u, rtol=1e-6, atol=0)


@pytest.mark.parametrize("broken", ["no linear bound", "sigmoid of g / beta", "swapped"])
def test_golden_catches_a_wrong_formula(broken):
    g, u = GOLDEN["gate"], GOLDEN["up"]
    y = {
        "no linear bound": 4 * torch.tanh(g / 4) * torch.sigmoid(g) * u,
        "sigmoid of g / beta": 100 * torch.tanh(g / 4) * torch.sigmoid(g / 4) * torch.tanh(u / 25),
        "swapped": situ_glu(u, g),
    }[broken]
    assert (y - GOLDEN["y"]).abs().max() > 1e-2


def test_derivatives_of_both_orders():
    args = tuple(torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(situ_glu, args)
    assert torch.autograd.gradgradcheck(situ_glu, args)


def test_the_kernels_equal_the_reference_and_the_golden_values():
    pytest.importorskip("k31fn.kernels.situ.triton", exc_type=ImportError)
    gate, up = 4 * torch.randn(5, 2, 70, device=DEVICE), 30 * torch.randn(5, 2, 70, device=DEVICE)
    gate[0], up[0] = 0.02 * gate[0], 0.02 * up[0]  # where 1 - exp would cancel
    exact = {"reference_dtype": torch.float64}
    with poisoned():
        # Three functions of a few roundings each, in gradients twice.
        limits = {"rtol": 4e-6, "atol": 1e-6, "grad_atol": 4e-6}
        assert_op_matches(situ_glu, "triton", (gate, up), **limits, **exact)
    low = (gate.bfloat16(), up.bfloat16())
    # Rounded once, to 2^-9, where the interpreter cuts (2^-8).
    assert_op_matches(situ_glu, "triton", low, rtol=2**-7, atol=1e-6, vmap_grad=False, **exact)
    g, u = (GOLDEN[name].to(DEVICE).requires_grad_() for name in ("gate", "up"))
    with use_impl(situ_glu="triton"):
        y = situ_glu(g, u)
    grads = torch.autograd.grad(y.sum(), (g, u))
    torch.testing.assert_close(y.cpu(), GOLDEN["y"], rtol=1e-6, atol=1e-6)
    for grad, name in zip(grads, ("grad.gate", "grad.up"), strict=True):
        assert relative(grad.cpu(), GOLDEN[name]) < 1e-6


def test_the_kernels_at_the_ends():
    """No NaN from values of 1e8, in rows of one column or none; other shapes are refused."""
    kernels = pytest.importorskip("k31fn.kernels.situ.triton", exc_type=ImportError)
    g = torch.tensor([1e8, -1e8, 1e8, 0.0], device=DEVICE)[:, None].requires_grad_()
    u = torch.tensor([1e8, 1e8, -1e8, 3.0], device=DEVICE)[:, None]
    with use_impl(situ_glu="triton"):
        y = situ_glu(g, u)
        assert situ_glu(g[:0], u[:0]).shape == (0, 1)
    assert y.flatten().tolist() == [100, 0, -100, 0]
    assert torch.autograd.grad(y.sum(), g)[0].isfinite().all()
    assert "one shape" in kernels.accepts(g, u[:2])
