"""The fused hyper-connection kernels against the references in float64: values, gradients, vmap,
and what they refuse.

Tolerances: float32 sums of N D < 300 products, through a sigmoid and 20 Sinkhorn iterations that do
not enlarge an
error: 1e-5. Gradients undo the iterations by multiplication, 40 roundings of 2^-24 or 2.4e-6
relative, and sum over
tokens: 3e-5. bfloat16: rounded once, to 2^-9, where the interpreter cuts (2^-8); the gradient of
the streams is a sum of two such.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k31fn import device
from k31fn.autodiff import vjp
from k31fn.kernels.mhc_post import mhc_post
from k31fn.kernels.mhc_pre import mhc_pre
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.testing import assert_op_matches
from tests.kernels.fused import DEVICE, poisoned

kernels = pytest.importorskip("k31fn.kernels.mhc_pre.triton.read", exc_type=ImportError)
tiles = pytest.importorskip("k31fn.kernels.mhc_pre.triton.tiles")
GOLDEN = Path(__file__).parents[1] / "golden" / "mhc.safetensors"
EPS = 1e-6
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5, "grad_rtol": 3e-5, "grad_atol": 3e-5}
BFLOAT16 = {"rtol": 2**-7, "atol": 2**-7, "grad_rtol": 2**-6, "grad_atol": 2**-6}
BOTH = {"mhc_pre": "triton", "mhc_post": "triton"}


def pre_inputs(
    n: int,
    width: int = 11,
    tokens: int = 3,
    dtype: torch.dtype = torch.float32,
    iterations: int = 6,
    strong: float = 1,
) -> tuple[object, ...]:
    columns = 2 * n + n * n
    x = torch.randn(2, tokens, n, width, device=DEVICE).to(dtype)
    phi = torch.randn(n * width, columns, device=DEVICE) / (n * width) ** 0.5
    scale, base = strong * torch.randn(3, device=DEVICE), torch.randn(columns, device=DEVICE)
    return x, phi, scale, base, EPS, iterations


def post_inputs(
    n: int, width: int = 37, tokens: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    shapes = ((2, tokens, n, width), (2, tokens, width), (2, tokens, n), (2, tokens, n, n))
    x, f, h_post, h_res = (torch.randn(*shape, device=DEVICE) for shape in shapes)
    return x.to(dtype), f.to(dtype), h_post, h_res


@pytest.mark.parametrize("n", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_equal_the_reference(n: int) -> None:
    with poisoned():
        assert_op_matches(
            mhc_pre, "triton", pre_inputs(n), **FLOAT32, reference_dtype=torch.float64
        )
        assert_op_matches(
            mhc_post, "triton", post_inputs(n), **FLOAT32, reference_dtype=torch.float64
        )


def test_bfloat16() -> None:
    for op, args in (
        (mhc_pre, pre_inputs(4, dtype=torch.bfloat16)),
        (mhc_post, post_inputs(4, dtype=torch.bfloat16)),
    ):
        assert_op_matches(op, "triton", args, **BFLOAT16, reference_dtype=torch.float64)


def test_golden() -> None:
    """5e-6: what a correct float32 implementation meets."""
    g = {k: v.to(DEVICE) for k, v in load_file(GOLDEN).items()}

    def both(x: Tensor, f: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, ...]:
        with use_impl(**BOTH):
            pre = mhc_pre(x, fn.mT, scale, base, EPS, 20)
            return pre.y, pre.h_post, pre.h_res, mhc_post(pre.x, f, pre.h_post, pre.h_res)

    out, pull = vjp(both, *(g[f"in.{name}"] for name in ("x", "f_out", "fn", "scale", "base")))
    for actual, name in zip(out, ("pre.y", "pre.h_post", "pre.h_res", "post.x_next"), strict=True):
        torch.testing.assert_close(actual, g[name], atol=5e-6, rtol=0)
    none = (out[1].new_zeros(out[1].shape), out[2].new_zeros(out[2].shape))
    _, *grads = pull(
        (g["upstream.pre_y"], *none, g["upstream.x_next"])
    )  # that of x has the head's part too
    for actual, name in zip(grads, ("f_out", "fn", "scale", "base"), strict=True):
        assert (actual - g[f"grad.{name}"]).norm() <= 5e-6 * g[f"grad.{name}"].norm(), name


@pytest.mark.cuda
@pytest.mark.parametrize(("n", "width"), [(4, 5120), (4, 2560), (2, 1000), (8, 264)])
def test_at_full_width(n: int, width: int) -> None:
    """More tokens than programs, and several splits of each kind."""
    with poisoned():
        args = pre_inputs(n, width, tokens=301, dtype=torch.bfloat16)
        assert_op_matches(mhc_pre, "triton", args, **BFLOAT16, reference_dtype=torch.float64)
        args = post_inputs(n, width, tokens=301, dtype=torch.bfloat16)
        assert_op_matches(mhc_post, "triton", args, **BFLOAT16, reference_dtype=torch.float64)


def test_coefficients_of_bfloat16_streams_are_those_of_float32_products() -> None:
    """A product with phi rounded to bfloat16 would be off by 1e-3."""
    args = pre_inputs(4, width=32, dtype=torch.bfloat16)
    with use_impl(mhc_pre="triton"):
        found = mhc_pre(*args)
    exact = mhc_pre(*(a.double() if isinstance(a, Tensor) else a for a in args))
    for ours, theirs in ((found.h_post, exact.h_post), (found.h_res, exact.h_res)):
        torch.testing.assert_close(ours.double(), theirs, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize(
    ("width", "tokens", "iterations"), [(1, 1, 1), (16, 7, 2), (33, 2, 3), (5, 0, 20)]
)
def test_odd_sizes(width: int, tokens: int, iterations: int) -> None:
    args = pre_inputs(4, width, tokens, iterations=iterations)
    assert_op_matches(mhc_pre, "triton", args, **FLOAT32, vmap_grad=False)
    assert_op_matches(mhc_post, "triton", post_inputs(2, width, tokens), **FLOAT32, vmap_grad=False)


def test_fresh_inputs_up_to_far_off_the_diagonal() -> None:
    """Scales of 100 give Sinkhorn entries of +-200, whose softmax underflows; gradients in
    proportion to the scale.
    """
    for i in range(20 if DEVICE == "cuda" else 4):
        strong = (1, 3, 10, 100)[i % 4]
        limit = 3e-5 * strong
        assert_op_matches(
            mhc_pre,
            "triton",
            pre_inputs(4, strong=strong, iterations=20),
            rtol=limit,
            atol=limit,
            grad_rtol=3 * limit,
            grad_atol=3 * limit,
            vmap_grad=False,
            reference_dtype=torch.float64,
        )


def whole(*args: Tensor) -> Tensor:
    """A round: the read, a sublayer, the update."""
    x, phi, scale, base = args
    pre = mhc_pre(x, phi, scale, base, EPS, 3)
    return mhc_post(pre.x, torch.sin(pre.y), pre.h_post, pre.h_res)


def round_gradients(impl: str, *args: Tensor) -> tuple[Tensor, ...]:
    def loss(*args: Tensor) -> Tensor:
        with use_impl(mhc_pre=impl, mhc_post=impl):
            return whole(*args).square().sum()

    return torch.func.grad(loss, argnums=(0, 1, 2, 3))(*args)


@pytest.mark.parametrize(
    "batched", [(0,), (1,), pytest.param((0, 1, 2, 3), marks=pytest.mark.slow)]
)
def test_vmap_over_any_argument(batched: tuple[int, ...]) -> None:
    """Whichever argument alone is batched, gradients are those of a loop; of a shared weight, one
    per sample.
    """
    flat = [a for a in pre_inputs(2) if isinstance(a, Tensor)]
    args = [torch.stack([a, 1.5 * a, -a]) if i in batched else a for i, a in enumerate(flat)]
    dims = tuple(0 if i in batched else None for i in range(4))
    with record_impls() as ran:
        together = torch.func.vmap(lambda *a: round_gradients("triton", *a), in_dims=dims)(*args)
    assert ran == {("mhc_pre", "triton"): 1, ("mhc_post", "triton"): 1}
    for sample in range(3):
        alone = round_gradients(
            "reference", *(a[sample] if i in batched else a for i, a in enumerate(args))
        )
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(ours[sample], theirs, rtol=5e-5, atol=5e-5)


def test_jacobian() -> None:
    """vmap over the cotangents alone."""
    x, phi, scale, base, *_ = pre_inputs(2, width=3, tokens=1)
    found = []
    for impl in ("triton", "reference"):
        with use_impl(mhc_pre=impl, mhc_post=impl):
            found.append(torch.func.jacrev(whole, argnums=(0, 1, 2, 3))(x, phi, scale, base))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=3e-5)


@pytest.mark.slow
def test_twenty_runs_are_bit_identical() -> None:
    args = [
        a for a in pre_inputs(4, tokens=600 if DEVICE == "cuda" else 5) if isinstance(a, Tensor)
    ]
    seen = []
    for _ in range(20 if DEVICE == "cuda" else 2):
        with use_impl(**BOTH):
            out, pull = vjp(whole, *args)
        seen.append((out, *pull(torch.ones_like(out))))
    for run in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, seen[0], strict=True))


def test_first_order_only() -> None:
    x, phi, scale, base, *_ = pre_inputs(2)
    for name in ("mhc_pre", "mhc_post"):
        with (
            use_impl(**(dict.fromkeys(BOTH, "reference") | {name: "triton"})),
            pytest.raises(
                RuntimeError,
                match=rf"{name} \(triton\) is first order only.*reference implementation",
            ),
        ):
            torch.func.grad(
                lambda x: (
                    torch.func.grad(lambda x: whole(x, phi, scale, base).square().sum())(x)
                    .square()
                    .sum()
                )
            )(x)


def test_refusals() -> None:
    with use_impl(**BOTH):
        for args, reason in (
            (pre_inputs(1), "2, 4 or 8 streams, got 1"),
            (pre_inputs(2, iterations=65), "1 to 64 iterations, got 65"),
            (pre_inputs(2, dtype=torch.float64), r"got torch.float64"),
            ((pre_inputs(2)[0][0], *pre_inputs(2)[1:]), r"streams are \[B, T, N, D\], got"),
            (
                (*pre_inputs(2)[:3], torch.zeros(9, device=DEVICE), EPS, 6),
                r"base \[9\] are not those of streams",
            ),
        ):
            with pytest.raises(ValueError, match=reason):
                mhc_pre(*args)
        x, f, h_post, h_res = post_inputs(2)
        with pytest.raises(ValueError, match="have one dtype"):
            mhc_post(x, f.bfloat16(), h_post, h_res)
        with pytest.raises(ValueError, match="f, h_post and h_res must be"):
            mhc_post(x, f, h_post[:, :-1], h_res)
        with pytest.raises(ValueError, match=r"streams are \[B, T, N, D\], got"):
            mhc_post(x[0], f[0], h_post[0], h_res[0])


def test_how_work_is_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand for 132 cores, two programs each: 160 units fill 264 places to 61, 61 and 91% in 1 to
    3 parts.
    """
    monkeypatch.setattr(device, "num_cores", lambda where: 132)
    tile = tiles.Tile(rows=32, per_core=2)
    x = torch.empty(1, 1024, device="meta")
    assert [tiles.filling(tile, x, units) for units in (160, 80, 264, 300, 5)] == [3, 3, 1, 3, 16]
    assert tiles.filling(tile, x[:, :40], 80) == 2  # 40 tokens are two tiles
    assert tiles.dealt(tile, x, 1) == (264, 32)
    assert tiles.dealt(tile, x, 8) == (33, 0)  # a program does both kinds


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One gradient scaled by 1.01."""
    launch = kernels._launch_sums

    def off(*operands: Tensor) -> tuple[Tensor, ...]:
        d_phi, total = launch(*operands)
        return 1.01 * d_phi, total

    monkeypatch.setattr(kernels, "_launch_sums", off)
    with pytest.raises(AssertionError, match="gradient"):
        assert_op_matches(mhc_pre, "triton", pre_inputs(4), **FLOAT32)
