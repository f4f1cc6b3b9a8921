"""The fused gated norm against the reference in float64.

Tolerances: a mean of up to 128 squares in float32, 1e-5; the weight's gradient sums over rows,
3e-5. bfloat16: rounded once, to 2^-9, where the
interpreter cuts to 2^-8; gradients add two such.
"""

import pytest
import torch
from torch import Tensor

from k31fn.kernels.gated_norm import gated_norm
from k31fn.kernels.registry import use_impl
from k31fn.testing import assert_op_matches
from tests.kernels.fused import DEVICE, poisoned

kernels = pytest.importorskip("k31fn.kernels.gated_norm.triton", exc_type=ImportError)
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5, "grad_rtol": 3e-5, "grad_atol": 3e-5}
BFLOAT16 = {"rtol": 2**-7, "atol": 2**-7, "grad_rtol": 2**-6, "grad_atol": 2**-6}
EPS = 1e-5


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, float]:
    o, gate = (torch.randn(*shape, device=DEVICE).to(dtype) for _ in range(2))
    return o, 3 * gate, torch.randn(shape[-1], device=DEVICE), EPS


@pytest.mark.parametrize("shape", [(2, 3, 2, 16), (5, 11), (1, 1)])
def test_equals_the_reference(shape: tuple[int, ...]):
    with poisoned():
        assert_op_matches(
            gated_norm, "triton", inputs(*shape), **FLOAT32, reference_dtype=torch.float64
        )


def test_bfloat16():
    args = inputs(7, 16, dtype=torch.bfloat16)
    assert_op_matches(
        gated_norm, "triton", args, **BFLOAT16, reference_dtype=torch.float64, vmap_grad=False
    )


def test_rows_of_zeros_and_strong_gates():
    """Padding is a row of zeros and stays one; a gate of -1e4 closes without an overflow."""
    o, gate, weight, eps = inputs(3, 8)
    o[1], gate[2] = 0.0, -1e4
    with use_impl(gated_norm="triton"):
        y = gated_norm(o, gate, weight, eps)
    assert torch.equal(y[1:], torch.zeros_like(y[1:]))
    assert y[0].isfinite().all()


def test_no_rows():
    with use_impl(gated_norm="triton"):
        assert gated_norm(*inputs(0, 8)).shape == (0, 8)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [128, 100])
def test_at_full_width(width: int):
    """Many chunks, the last one short; twenty repeats are bit-identical."""
    args = inputs(2000, 3, width, dtype=torch.bfloat16)
    with poisoned():
        assert_op_matches(
            gated_norm, "triton", args, **BFLOAT16, reference_dtype=torch.float64, vmap_grad=False
        )
    leaves = [x.requires_grad_() for x in args[:3]]
    runs = []
    with use_impl(gated_norm="triton"):
        for _ in range(20):
            y = gated_norm(*leaves, EPS)
            runs.append((y, *torch.autograd.grad(y.float().square().sum(), leaves)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_refusals():
    assert "one shape" in kernels.accepts(torch.zeros(3, 4), torch.zeros(3, 5), torch.zeros(4), EPS)
    wide = torch.zeros(1, 2000)
    assert "1 to 1024" in kernels.accepts(wide, wide, torch.zeros(2000), EPS)
