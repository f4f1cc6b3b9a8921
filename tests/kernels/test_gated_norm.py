from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from k31fn.kernels.gated_norm import gated_norm
from k31fn.kernels.norm import rms_norm

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "kda.safetensors")


def formula(o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return torch.sigmoid(gate) * weight * o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def draw(dtype=torch.float64) -> list[Tensor]:
    return [torch.randn(s, dtype=dtype) for s in ((2, 3, 4, 8), (2, 3, 4, 8), (8,))]


def test_golden():
    y = gated_norm(GOLDEN["o_norm.x"], GOLDEN["o_norm.gate"], GOLDEN["o_norm.weight"], 1e-5)
    torch.testing.assert_close(y, GOLDEN["o_norm.y"], rtol=0, atol=5e-6)
    small = gated_norm(GOLDEN["o_norm.x"], GOLDEN["o_norm.gate"], GOLDEN["o_norm.weight"], 1e-6)
    assert (small - GOLDEN["o_norm.y"]).abs().max() > 1e-3  # o is small: eps counts


def test_values_and_derivatives_equal_the_formula():
    xs = [x.requires_grad_() for x in draw()]
    results = []
    for f in (lambda *xs: gated_norm(*xs, 1e-5), formula):
        y = f(*xs)
        first = torch.autograd.grad(y.pow(3).sum(), xs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), xs)
        results.append([y, *first, *second])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_bfloat16_is_computed_in_float32_and_rounded_once():
    o, gate, weight = draw(torch.float32)
    low_o, low_gate = o.bfloat16(), gate.bfloat16()
    y = gated_norm(low_o, low_gate, weight, 1e-5)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, gated_norm(low_o.float(), low_gate.float(), weight, 1e-5).bfloat16())
    twice = (rms_norm(low_o, weight, 1e-5).float() * torch.sigmoid(low_gate.float())).bfloat16()
    assert not torch.equal(y, twice)


def test_zeros_give_zeros_with_finite_gradients():
    _, gate, weight = draw(torch.float32)
    o = torch.zeros_like(gate, requires_grad=True)
    y = gated_norm(o, gate, weight, 1e-5)
    assert not y.any()
    assert torch.autograd.grad(y.sum(), o)[0].isfinite().all()
