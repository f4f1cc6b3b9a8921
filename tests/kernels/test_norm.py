from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from k31fn.kernels.norm import layer_norm, rms_norm
from k31fn.kernels.registry import use_impl
from k31fn.testing import assert_op_matches
from tests.kernels.fused import DEVICE, poisoned

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "norms_and_casts.safetensors")


@pytest.mark.parametrize("eps", ["1e-05", "1e-06"])
def test_rms_norm_equals_golden(eps):
    y = rms_norm(GOLDEN["x"], GOLDEN["weight"], float(eps))
    torch.testing.assert_close(
        y, GOLDEN[f"kimi_rmsnorm_eps{eps}"], rtol=0, atol=1e-6
    )  # fp32, another order of sums


def test_golden_tells_the_two_eps_apart():
    y = rms_norm(GOLDEN["x"], GOLDEN["weight"], 1e-6)
    assert (y - GOLDEN["kimi_rmsnorm_eps1e-05"]).abs().max() > 1e-5


def test_rms_norm_bf16_is_bit_exact_and_the_cast_order_matters():
    x, weight, golden = (
        GOLDEN["x_bf16"],
        GOLDEN["weight_bf16"],
        GOLDEN["kimi_rmsnorm_bf16_eps1e-05"],
    )
    assert torch.equal(rms_norm(x, weight, 1e-5), golden)
    wide = x.float()
    one_rounding = (
        weight.float() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    ).bfloat16()
    assert (one_rounding != golden).sum() > 50


def test_rms_norm_with_the_vision_eps():
    eps = torch.finfo(torch.float32).eps
    y = rms_norm(GOLDEN["x"], GOLDEN["weight"], eps)
    torch.testing.assert_close(y, GOLDEN["vit_nn_rmsnorm_fp32_eps_none"], rtol=0, atol=2e-6)
    low = rms_norm(GOLDEN["x_bf16"], GOLDEN["weight_bf16"], eps)
    # nn.RMSNorm rounds once after the weight: the two may differ by one unit of bf16 (2^-7
    # relative).
    torch.testing.assert_close(low, GOLDEN["vit_nn_rmsnorm_bf16_eps_none"], rtol=2**-7, atol=0)


def test_rms_norm_normalises():
    x = torch.randn(3, 4, 16, dtype=torch.float64)
    y = rms_norm(x, torch.ones(16, dtype=torch.float64), 1e-300)
    torch.testing.assert_close(
        y.square().mean(-1), torch.ones(3, 4, dtype=torch.float64), rtol=1e-14, atol=0
    )
    assert torch.equal(rms_norm(torch.zeros(2, 5), torch.ones(5), 1e-5), torch.zeros(2, 5))


def test_weight_is_used_in_the_dtype_of_x():
    x = torch.randn(4, 8).bfloat16()
    assert rms_norm(x, torch.rand(8), 1e-5).dtype == torch.bfloat16
    assert rms_norm(x.double(), torch.rand(8), 1e-5).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layer_norm_equals_torch(dtype):
    x, weight, bias = (
        torch.randn(5, 12).to(dtype),
        torch.randn(12).to(dtype),
        torch.randn(12).to(dtype),
    )
    expected = F.layer_norm(x.double(), (12,), weight.double(), bias.double(), 1e-5)
    # Half a unit of the dtype's last place at |y| < 8; float64 and float32 leave room for the order
    # of sums.
    atol = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(
        layer_norm(x, weight, bias, 1e-5).double(), expected, rtol=0, atol=atol
    )


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_the_library_layer_norm_equals_the_reference(weights):
    x = torch.randn(4, 5, 24, device=DEVICE)
    weight, bias = (torch.randn(24, device=DEVICE).to(weights) for _ in range(2))
    limits = {"rtol": 1e-5, "atol": 1e-5, "grad_rtol": 3e-5, "grad_atol": 3e-5}
    if weights == torch.bfloat16:
        # Sums over rows that are rounded to bfloat16.
        limits |= {"grad_rtol": 2**-8, "grad_atol": 2**-8}
    assert_op_matches(
        layer_norm, "library", (x, weight, bias, 1e-5), **limits, reference_dtype=torch.float64
    )
    low = x.bfloat16()
    with use_impl(layer_norm="library"):
        y = layer_norm(low, weight, bias, 1e-5)
    with use_impl(layer_norm="reference"):
        torch.testing.assert_close(y, layer_norm(low, weight, bias, 1e-5), rtol=2**-7, atol=2**-7)


def test_derivatives_of_both_orders():
    x, weight, bias = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3), (3,), (3,))
    )
    for f, args in ((rms_norm, (x, weight)), (layer_norm, (x, weight, bias))):
        assert torch.autograd.gradcheck(lambda *a, f=f: f(*a, 1e-5), args)
        assert torch.autograd.gradgradcheck(lambda *a, f=f: f(*a, 1e-5), args)


@pytest.mark.parametrize("shape", [(2, 18, 24), (1, 1), (3, 70)])
def test_the_rms_norm_kernels_equal_the_reference(shape):
    """Widths that are no power of two, more rows than a chunk, one element."""
    pytest.importorskip("k31fn.kernels.norm.triton", exc_type=ImportError)
    args = (torch.randn(*shape, device=DEVICE), torch.randn(shape[-1], device=DEVICE), 1e-5)
    with poisoned():
        # A mean of squares in float32; the weight's gradient is a sum over rows.
        limits = {"rtol": 1e-5, "atol": 1e-5, "grad_rtol": 3e-5, "grad_atol": 3e-5}
        assert_op_matches(rms_norm, "triton", args, **limits, reference_dtype=torch.float64)


def test_the_rms_norm_kernels_in_bfloat16_and_without_rows():
    kernels = pytest.importorskip("k31fn.kernels.norm.triton", exc_type=ImportError)
    x, weight = (GOLDEN[n].to(DEVICE) for n in ("x_bf16", "weight_bf16"))
    with use_impl(rms_norm="triton"):
        y = rms_norm(x, weight, 1e-5)
        assert rms_norm(x[:0], weight, 1e-5).shape == x[:0].shape
        padded = rms_norm(torch.zeros_like(x), weight, 1e-5)
    # Two roundings of a unit of bfloat16 each, where the interpreter cuts.
    golden = GOLDEN["kimi_rmsnorm_bf16_eps1e-05"]
    torch.testing.assert_close(y.cpu(), golden, rtol=2**-6, atol=0)
    assert not padded.any()
    wide = torch.zeros(1, 20000)
    assert "1 to 16384" in kernels.accepts(wide, torch.zeros(20000), 1e-5)
    assert "weight [D]" in kernels.accepts(x, weight[:1], 1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [7168, 3584, 100])
def test_the_rms_norm_kernels_at_full_width(width):
    """Twenty repeats are bit-identical."""
    x = torch.randn(999, width, device=DEVICE).bfloat16()
    weight = torch.randn(width, device=DEVICE)
    # Rounded twice. The weight's gradient sums 999 normed values, each rounded by up to 2^-9: rms
    # 0.036, and five times that in the worst of 7168.
    limits = {"rtol": 2**-6, "atol": 2**-6, "grad_rtol": 2**-5, "grad_atol": 2**-2}
    with poisoned():
        args = (x, weight.bfloat16(), 1e-5)
        wide = {"reference_dtype": torch.float64, "vmap_grad": False}
        assert_op_matches(rms_norm, "triton", args, **limits, **wide)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    runs = []
    for _ in range(20):
        y = rms_norm(*leaves, 1e-5)
        runs.append((y, *torch.autograd.grad(y.float().square().sum(), leaves)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
