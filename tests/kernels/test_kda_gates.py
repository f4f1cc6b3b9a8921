"""Norms and gates of KDA: the reference against the equations, the kernels against the reference.

Tolerances: float32 sums of at most 40 products and a sigmoid, 1e-5; gradients of parameters are
sums over 300 tokens, 3e-5. bfloat16: rounded once, to 2^-9, where the interpreter cuts (2^-8).
"""

import pytest
import torch
from torch import Tensor

from k31fn.kernels.kda_gates import kda_gates
from k31fn.kernels.registry import use_impl
from k31fn.testing import assert_op_matches, check_grads
from tests.kernels.fused import DEVICE, poisoned

pytest.importorskip("k31fn.kernels.kda_gates.triton", exc_type=ImportError)
NUMBERS = (-5.0, 1e-6, 0.3)


def inputs(
    tokens: int, width: int = 16, heads: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    shape = (2, tokens, heads, width)
    q, k, z = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(3))
    beta = torch.randn(shape[:3], device=DEVICE).to(dtype)
    rate, bias = torch.randn(heads, device=DEVICE), torch.randn(heads, width, device=DEVICE)
    return q, k, z, beta, rate, bias


def test_the_reference_is_the_equations() -> None:
    q, k, z, beta, rate, bias = (x.double() for x in inputs(5))
    out = kda_gates(q, k, z, beta, rate, bias, *NUMBERS)
    torch.testing.assert_close(out.q.norm(dim=-1), torch.full_like(beta, 0.3), rtol=1e-5, atol=0)
    torch.testing.assert_close(out.k * k.norm(dim=-1, keepdim=True), k, rtol=1e-5, atol=0)
    odds = out.g / (-5 - out.g)
    torch.testing.assert_close(odds.log(), rate.exp()[:, None] * (z + bias))
    torch.testing.assert_close((out.beta / (1 - out.beta)).log(), beta)
    check_grads(lambda *xs: tuple(kda_gates(*xs, *NUMBERS)), (q, k, z, beta, rate, bias))


@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (17, 20), (150, 8)])
def test_equal_the_reference(tokens: int, width: int) -> None:
    """Widths that are no power of two, and more tokens than a chunk."""
    args = (*inputs(tokens, width), *NUMBERS)
    tolerance = {"rtol": 1e-5, "atol": 1e-5, "grad_rtol": 3e-5, "grad_atol": 3e-5}
    with poisoned():
        assert_op_matches(
            kda_gates,
            "triton",
            args,
            reference_dtype=torch.float64,
            vmap_grad=tokens < 50,
            **tolerance,
        )


def test_bfloat16() -> None:
    args = (*inputs(9, dtype=torch.bfloat16), *NUMBERS)
    tolerance = {"rtol": 2**-7, "atol": 2**-7, "grad_rtol": 2**-6, "grad_atol": 2**-6}
    assert_op_matches(
        kda_gates, "triton", args, reference_dtype=torch.float64, vmap_grad=False, **tolerance
    )


def test_a_wrong_bound_is_caught() -> None:
    args = inputs(3)
    with use_impl(kda_gates="triton"):
        wrong = kda_gates(*args, -4.9, *NUMBERS[1:])
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(wrong.g, kda_gates(*args, *NUMBERS).g, rtol=1e-5, atol=1e-5)


def test_refusals() -> None:
    q, k, z, beta, rate, bias = inputs(3)
    with use_impl(kda_gates="triton"):
        for args, reason in (
            ((q[:, :0], k, z, beta, rate, bias), "K at most 256"),
            ((q, k[:, :1], z, beta, rate, bias), r"q, k, z are \[B T H K\]"),
            ((q, k, z, beta, rate[:1], bias), r"A_log is \[H\] and dt_bias \[H K\]"),
            ((q, k, z, beta.double(), rate, bias), "at most float32"),
        ):
            with pytest.raises(ValueError, match=reason):
                kda_gates(*args, *NUMBERS)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_at_full_width(dtype: torch.dtype) -> None:
    args = (*inputs(333, 128, 6, dtype), *NUMBERS)
    limit = 2**-6 if dtype == torch.bfloat16 else 1e-4
    with poisoned():
        assert_op_matches(
            kda_gates,
            "triton",
            args,
            rtol=limit,
            atol=limit,
            grad_rtol=2 * limit,
            grad_atol=2 * limit,
            reference_dtype=torch.float64,
        )
