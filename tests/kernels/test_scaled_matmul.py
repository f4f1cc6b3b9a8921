"""FP8 products against the same rounding written out, and against exact ones where scales must save
them.
"""

import functools

import pytest
import torch
from torch import Tensor

from k31fn import random
from k31fn.autodiff import remat, split_vjp, value_and_grad
from k31fn.kernels import scaled_matmul as package
from k31fn.kernels.fp8_encode import fp8_encode
from k31fn.kernels.registry import OPS, record_impls, use_impl
from k31fn.kernels.scaled_matmul import library, reference, refusal, scaled_matmul
from k31fn.layers import losses
from k31fn.layers.linear import linear, use_products

SCALINGS = ["rows", "blocks"]


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return random.normal(random.key(seed), shape, dtype=dtype)


def rounded(x: Tensor, group: tuple[int, int]) -> Tensor:
    """Each block of so many rows and columns over the least power of two that fits 448, in E4M3,
    and back.
    """
    out = x.clone()
    for i in range(0, x.shape[0], group[0]):
        for j in range(0, x.shape[1], group[1]):
            block = x[i : i + group[0], j : j + group[1]]
            scale = (
                2.0 ** torch.ceil(torch.log2(block.abs().max() / 448)) if bool(block.any()) else 1.0
            )
            out[i : i + group[0], j : j + group[1]] = (block / scale).to(torch.float8_e4m3fn).to(
                x.dtype
            ) * scale
    return out


def by_hand(a: Tensor, b: Tensor, scaling: str, b_blocks: bool) -> Tensor:
    along = a.shape[1] if scaling == "rows" else 128
    of_b = (128, 128) if b_blocks and scaling == "blocks" else (1, along)
    return rounded(a, (1, along)) @ rounded(b.mT.contiguous(), of_b).mT


@pytest.mark.parametrize("scaling", SCALINGS)
def test_all_three_products(scaling: str):
    """y, d a and d b, each with scales along what it contracts; sizes all differ."""
    a, b, ct = drawn(0, 128, 256), drawn(1, 256, 384), drawn(2, 128, 384)
    a[0], b[:, 3] = 0, 0
    grads = value_and_grad(lambda a, b: (scaled_matmul(a, b, scaling, True) * ct).sum(), (0, 1))(
        a, b
    )[1]
    want = (
        by_hand(a, b, scaling, True),
        by_hand(ct, b.mT, scaling, True),
        by_hand(a.mT, ct, scaling, False),
    )
    for got, expected in zip((scaled_matmul(a, b, scaling, True), *grads), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-5)  # summed in float32
    exact = a @ b
    error = (scaled_matmul(a, b, scaling, True) - exact).norm() / exact.norm()
    assert 0.01 < float(error) < 0.05, "three bits of mantissa"


@pytest.mark.parametrize(("scaling", "size"), [("rows", 1), ("blocks", 128)])
def test_a_scale_of_its_own_for_each_row_and_group(scaling: str, size: int):
    """A row (by blocks, also 128 features) a million times smaller than another loses nothing; one
    scale would.
    """
    a, b = drawn(0, 128, 256), drawn(1, 256, 128)
    a[:64] *= 1e-6
    if scaling == "blocks":
        a[64:, 128:], b[128:] = a[64:, 128:] * 1e-6, b[128:] * 1e6
    y, exact = scaled_matmul(a, b, scaling, False), a @ b
    error = (y - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(error.max()) < 0.06
    one_scale = rounded(a, (128, 256)) @ b
    assert float(((one_scale - exact).norm(dim=1) / exact.norm(dim=1)).max()) > 0.2


def test_linear_layers_in_fp8():
    """Values, gradients and replays by the op; what FP8 does not take is exact, and so is the
    head.
    """
    x, w = drawn(0, 2, 8, 32).bfloat16(), drawn(1, 32, 48).bfloat16()

    def f(x: Tensor, w: Tensor) -> Tensor:
        return linear(x, w).float().square().sum()

    with use_products("fp8_rows"), record_impls() as ran:
        value, grads = value_and_grad(lambda x, w: remat(f)(x, w), (0, 1))(x, w)
    assert ran["scaled_matmul", "reference"] == 2, (
        "the forward and its replay; gradients by the same rule"
    )
    y = scaled_matmul(x.flatten(0, 1), w, "rows", True)
    torch.testing.assert_close(value, y.float().square().sum())
    ct = 2 * y
    assert torch.equal(grads[0].flatten(0, 1), scaled_matmul(ct, w.mT, "rows", True))
    assert torch.equal(grads[1], scaled_matmul(x.flatten(0, 1).mT, ct, "rows", False))
    assert not torch.equal(linear(x, w).flatten(0, 1), y)
    with use_products("fp8_blocks"):
        assert torch.equal(linear(x, w), x @ w), "too small for blocks"
    with use_products("fp8_rows"):
        assert torch.equal(linear(x.double(), w.double()), x.double() @ w.double())
        assert torch.equal(linear(x[:, :5], w), x[:, :5] @ w)
        labels = torch.zeros(2, 8, dtype=torch.int64)
        in_fp8 = losses.linear_cross_entropy(x, w, labels).total
    assert torch.equal(in_fp8, losses.linear_cross_entropy(x, w, labels).total)


def test_weight_gradients_can_come_later():
    x, w = drawn(0, 16, 32).bfloat16(), drawn(1, 32, 48).bfloat16()
    with use_products("fp8_rows"):
        _, expected = value_and_grad(lambda w, x: linear(x, w).float().sum(), (0, 1))(w, x)
        y, backward_input = split_vjp(lambda w, x: linear(x, w).float().sum(), w, x)
        (dx,), backward_weight = backward_input(torch.ones_like(y))
        dw = backward_weight()
    assert torch.equal(dw, expected[0])
    assert torch.equal(dx, expected[1])


def test_sizes():
    assert not refusal(16, 32, 48, "rows")
    assert "(16, 32, 40) with scaling='rows' must be multiples of 16" in refusal(16, 32, 40, "rows")
    assert "must be multiples of 128" in refusal(128, 128, 64, "blocks")
    # torch's product is refused by the same words, before it is tried
    empty = torch.zeros(0, 128), torch.zeros(128, 128)
    assert "M, K, N=(0, 128, 128) is empty; at least one" in library.accepts(*empty, "rows")
    with pytest.raises(ValueError, match=r"must be multiples of 128"):
        scaled_matmul(drawn(0, 128, 16), drawn(1, 16, 128), "blocks", True)


def test_scales_as_the_library_wants_them():
    """By rows of 128: [M, K/128] with strides (1, M); in blocks [K/128 up to fours, N/128] with
    strides (1, that).
    """
    codes = fp8_encode(drawn(0, 256, 640).bfloat16(), "blocks")
    fine = library._columns_first(codes.scales)
    assert (tuple(fine.shape), fine.stride()) == ((256, 5), (1, 256))
    assert torch.equal(fine, codes.scales)
    coarse = fp8_encode(drawn(1, 384, 640).bfloat16(), "tiles")  # [N, K]
    padded = library._padded(coarse.scales)
    assert (tuple(padded.shape), padded.stride()) == ((8, 3), (1, 8))
    assert torch.equal(padded[:5].mT, coarse.scales)
    assert fp8_encode(drawn(0, 32, 64).bfloat16(), "rows").scales.shape == (32, 1)


@pytest.mark.cuda
@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_library_s_products(scaling: str):
    """Within the rounding of the result and of the tensor cores' sums, for all three products."""
    if reason := package.scaled_matmul.refusal(
        "scaled_mm", *(drawn(i, 256, 256).cuda().bfloat16() for i in (0, 1)), scaling, True
    ):
        pytest.skip(reason)
    a, b, ct = (
        drawn(i, *s).cuda().bfloat16() for i, s in enumerate(((256, 640), (640, 384), (256, 384)))
    )
    results = []
    for f in (library.scaled_mm, reference.scaled_matmul):
        y, grads = value_and_grad(
            lambda a, b, f=f: (f(a, b, scaling, True) * ct).float().sum(), (0, 1)
        )(a, b)
        results.append((y, *grads, f(a, b, scaling, True)))
    for got, want in zip(*results, strict=True):
        assert float((got.float() - want.float()).norm() / want.float().norm()) < 4e-3


@pytest.mark.cuda
@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_library_s_products_do_not_depend_on_who_encodes(scaling: str):
    """The kernels' codes and scales, with strides of their own, give the bits of the
    reference's.
    """
    a, b, ct = (
        drawn(i, *s).cuda().bfloat16() for i, s in enumerate(((256, 640), (640, 384), (256, 384)))
    )
    results = []
    for encoder in ("triton", "reference"):
        with use_impl(fp8_encode=encoder):
            f = functools.partial(library.scaled_mm, scaling=scaling, b_blocks=True)
            y, grads = value_and_grad(lambda a, b, f=f: (f(a, b) * ct).float().sum(), (0, 1))(a, b)
            results.append((y, *grads, f(a, b)))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_its_kernels_are_warmed_up():
    named = scaled_matmul.implementations["scaled_mm"].calls
    assert named == ("fp8_encode",)
    assert set(named) <= set(OPS)
