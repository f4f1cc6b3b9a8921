"""The fused KDA against the reference in float64: values and gradients, for decays from weak to
hard, keys that are alike, packed documents of any length, and under vmap.

Tolerances are norms of a difference over the norm. float32: sums of 16 to 128 products in another
order, through a triangular inverse whose entries are at most 1 in size, 4e-7 a value; up to 64
tokens' decays in an exponent of up to 115 make that 3e-6 for dg. bfloat16: a rounding of the result
alone is 1.7e-3, operands are rounded some three times on the way. With keys that are equal and beta
near 1, o and dv are telescoping sums whose terms are added to the state by b K e^(G_end - G):
rounded to one bfloat16 number it leaves parts at right angles to the key, which no later token
takes out again. In float64 with all roundings o, dv and dbeta are off by 1.6e-2, 2.0e-2 and 2.2e-2
at 1000 tokens; with this factor, P and the inverse as two numbers each, as they are, by 0.9e-2,
1.2e-2 and 1.2e-2. Errors average over the width, so those of 16 are larger than those of 128.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k31fn import tree
from k31fn.kernels.kda import MIN_LOG_DECAY, kda, recurrence
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.layers import kda as layer
from k31fn.params import init
from k31fn.random import key
from k31fn.segments import from_lengths
from k31fn.testing import assert_op_matches
from tests.kernels.delta_rule import (
    NAMES,
    Inputs,
    check_op,
    cotangents,
    operands,
    results_of,
)
from tests.kernels.fused import DEVICE
from tests.kernels.test_kda import golden_arguments, golden_inputs

launches = pytest.importorskip("k31fn.kernels.kda.triton.launches", exc_type=ImportError)
pieces = pytest.importorskip("k31fn.kernels.kda.triton.pieces", exc_type=ImportError)
tiles = pytest.importorskip("k31fn.kernels.kda.triton.tiles", exc_type=ImportError)
GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "kda.safetensors")
FLOAT32, BFLOAT16, ALIKE = 5e-6, 8e-3, 2e-2


def decays(kind: str, *shape: int) -> Tensor:
    if kind == "initial":
        return -torch.exp(torch.rand(shape) * 4.2 - 4.6)
    if kind == "mixed":
        return MIN_LOG_DECAY * torch.sigmoid(3 * torch.randn(shape))
    return torch.full(shape, {"hard": MIN_LOG_DECAY, "weak": -0.01}[kind])


def inputs(
    lengths: list[list[int]],
    length: int,
    *,
    decay: str = "mixed",
    keys: str = "random",
    dtype: torch.dtype = torch.float32,
    size: tuple[int, int, int] = (2, 16, 16),
) -> Inputs:
    shape = (len(lengths), length, *size[:2])
    return operands(lengths, length, lambda: decays(decay, *shape), keys, dtype, size)


def results(xs: Inputs, cts: tuple[Tensor, Tensor], impl: str = "triton") -> list[Tensor]:
    return results_of(kda, xs, cts, impl)


def check(xs: Inputs, limit: float) -> None:
    check_op(kda, xs, limit)


PACKINGS = {
    1: [[1]],
    15: [[3, 1, 7]],
    16: [[16]],
    17: [[1, 16]],
    63: [[13, 19, 1, 3, 20]],
    64: [[64]],
    65: [[31, 33]],
}


@pytest.mark.parametrize(
    "length",
    [1, 17, 65, *(pytest.param(n, marks=pytest.mark.slow) for n in (15, 16, 63, 64))],
)
def test_equals_the_reference(length: int) -> None:
    check(inputs(PACKINGS[length], length), FLOAT32)


@pytest.mark.parametrize("decay", ["hard", "weak", pytest.param("initial", marks=pytest.mark.slow)])
def test_decays(decay: str) -> None:
    check(inputs([[40]], 45, decay=decay), FLOAT32)


@pytest.mark.parametrize(
    "keys", ["equal", *(pytest.param(k, marks=pytest.mark.slow) for k in ("alike", "opposite"))]
)
def test_alike_keys_with_beta_near_one(keys: str) -> None:
    """Powers of the triangle would lose all digits here."""
    check(inputs([[36]], 36, keys=keys, decay="weak"), FLOAT32)


@pytest.mark.parametrize("size", [(1, 64, 16), (3, 16, 32)])
def test_widths(size: tuple[int, int, int]) -> None:
    check(inputs([[18, 4]], 25, size=size), FLOAT32)


def test_bfloat16() -> None:
    check(inputs([[20, 13]], 35, dtype=torch.bfloat16), BFLOAT16)


def test_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several, the last one shorter, and more than the forward does at a time."""
    monkeypatch.setattr(launches, "_SHORTEST", 1)
    monkeypatch.setattr(launches, "_SEGMENT", 2)
    check(inputs([[70, 2, 60], [139]], 140, size=(1, 16, 16)), FLOAT32)


def in_pieces(monkeypatch: pytest.MonkeyPatch, scans: int) -> None:
    """As if the device held so many scans."""
    monkeypatch.setattr(launches, "_SCANS", dict.fromkeys(launches._SCANS, scans))


def test_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three a segment, in two segments, the last piece shorter; documents end inside and at a
    cut.
    """
    xs = inputs([[100, 28, 20]], 156, decay="weak", size=(1, 16, 16))
    cts = cotangents(xs)
    whole = results(xs, cts)
    in_pieces(monkeypatch, 4)
    monkeypatch.setattr(launches, "_SHORTEST", 5)
    monkeypatch.setattr(launches, "_SEGMENT", 5)
    plan = launches.Plan.of(tiles.Shape(1, 1, 156, 1, 16, 16), "cpu", 1, 5)
    assert plan == launches.Plan(piece=2, side=3, pieces=5)
    check(xs, FLOAT32)
    apart = [float((a - b).norm() / b.norm()) for a, b in zip(results(xs, cts), whole, strict=True)]
    # another order of sums, so not the same bits
    assert 0 < apart[0] <= FLOAT32
    assert max(apart) <= FLOAT32


def test_a_missing_relay_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: None

    in_pieces(monkeypatch, 4)
    monkeypatch.setattr(pieces, "kda_relay", Idle())
    with pytest.raises(AssertionError, match=r"o: "):
        check(inputs([[75]], 75, decay="weak", size=(1, 16, 16)), FLOAT32)


@pytest.mark.parametrize("kind", ["plain", "hard_decay"])
def test_golden(kind: str) -> None:
    x = {name: y.detach().to(DEVICE).requires_grad_() for name, y in golden_inputs(kind).items()}
    g = {name: y.to(DEVICE) for name, y in GOLDEN.items()}
    ids = from_lengths([[70], [70]], 70).ids.to(DEVICE)
    with use_impl(kda="triton"):
        out = kda(*golden_arguments(x), ids, x["S0"])
    torch.testing.assert_close(out.o, g[f"{kind}.init.o"], rtol=0, atol=5e-6)
    torch.testing.assert_close(out.state, g[f"{kind}.init.final_state"], rtol=0, atol=5e-6)
    cts = [g[f"{kind}.upstream_o"], g[f"{kind}.upstream_S"]]
    for name, grad in zip(x, torch.autograd.grad(out, list(x.values()), cts), strict=True):
        expected = g[f"{kind}.init.grad.{name}"]
        assert (grad - expected).norm() <= 5e-6 * expected.norm(), name


def test_vmap_and_no_state() -> None:
    q, k, v, g, beta, ids, state = inputs([[9, 8]], 20, size=(1, 16, 16))
    for args in ((q, k, v, g, beta, ids, state), (q, k, v, g, beta, ids)):
        assert_op_matches(kda, "triton", args, rtol=1e-4, atol=1e-5, reference_dtype=torch.float64)


def test_vmap_over_one_argument_alone() -> None:
    xs = inputs([[17]], 20, size=(1, 16, 16))

    def loss(g: Tensor, state: Tensor) -> Tensor:
        with use_impl(kda="triton"):
            out = kda(*xs[:3], g, xs[4], xs[5], state)
        return out.o.square().sum() + out.state.sum()

    together = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(
        torch.stack([xs[3], 0.5 * xs[3]]), xs[6]
    )
    for i, scale in enumerate((1, 0.5)):
        alone = torch.func.grad(loss, argnums=(0, 1))(scale * xs[3], xs[6])
        assert all(torch.equal(a[i], b) for a, b in zip(together, alone, strict=True))


def test_padding_may_hold_nan() -> None:
    xs = inputs([[21, 3], []], 40)
    cts = cotangents(xs)
    clean = results(xs, cts)
    padding = xs[5] == 0
    dirty = [x.masked_fill(padding[(...,) + (None,) * (x.ndim - 2)], torch.nan) for x in xs[:5]]
    d_o = cts[0].masked_fill(padding[..., None, None], torch.nan)
    for a, b in zip(results((*dirty, *xs[5:]), (d_o, cts[1])), clean, strict=True):
        assert torch.equal(a, b)
    for x in (clean[0], *clean[2:7]):
        assert not x[padding].any()


def test_a_later_token_changes_no_bit_of_an_earlier_output() -> None:
    for at in (5, 16, 30):
        xs = inputs([[50]], 50)
        ys = [torch.cat([x[:, :at], x[:, at:].flip(1)], 1) for x in xs[:5]]
        with use_impl(kda="triton"):
            assert torch.equal(kda(*xs).o[:, :at], kda(*ys, *xs[5:]).o[:, :at])


def test_repeats_are_bit_identical() -> None:
    xs = inputs([[30, 5]], 40)
    cts = cotangents(xs)
    first, *others = (results(xs, cts) for _ in range(20 if DEVICE == "cuda" else 2))
    for run in others:
        assert all(torch.equal(a, b) for a, b in zip(run, first, strict=True))


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_decays_below_the_range_count_as_its_bound(impl: str) -> None:
    """Against the recurrence, which has no bound, on decays that are clamped before."""
    q, k, v, g, beta, ids, state = inputs([[30]], 30)
    g = torch.where(torch.rand_like(g) < 0.2, -40.0, g)
    xs = (q, k, v, g, beta, ids, state)
    cts = cotangents(xs)
    wide = [x.double().requires_grad_() if x.is_floating_point() else x for x in xs]
    wide_g = wide[3].clamp(min=MIN_LOG_DECAY)
    out = recurrence(*wide[:3], wide_g, *wide[4:])
    leaves = [x for x in wide if x.requires_grad]
    expected = [*out, *torch.autograd.grad(list(out), leaves, [c.double() for c in cts])]
    for name, a, b in zip(NAMES, results(xs, cts, impl), expected, strict=True):
        assert (a.double() - b).norm() <= FLOAT32 * b.norm(), name


class Swapped:
    """A kernel that is given its third and fourth argument in the wrong order."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(a: Any, b: Any, c: Any, d: Any, *args: Any, **kwargs: Any) -> None:
            self.kernel[grid](a, b, d, c, *args, **kwargs)

        return launch


@pytest.mark.parametrize("name", ["bound", "kda_scan", "kda_adjoint"])
def test_a_broken_kernel_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decays cut too early; P in the place of U; the inverse in the place of P."""
    if name == "bound":
        monkeypatch.setattr(tiles, "MIN_LOG_DECAY", -4.0)
    else:
        monkeypatch.setattr(pieces, name, Swapped(getattr(pieces, name)))
    with pytest.raises(AssertionError, match=r"(o|dq|dk|dv|dg): "):
        check(inputs([[20]], 20, size=(1, 16, 16)), FLOAT32)


def test_first_order_only() -> None:
    xs = inputs([[5]], 5, size=(1, 16, 16))

    def loss(q: Tensor) -> Tensor:
        with use_impl(kda="triton"):
            return kda(q, *xs[1:]).o.square().sum()

    with pytest.raises(RuntimeError, match=r"kda \(triton\) is first order only"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).square().sum())(xs[0])


def test_refusals() -> None:
    q, k, v, g, beta, ids, state = inputs([[5]], 5)
    wide = torch.randn(1, 5, 2, 256, device=DEVICE)
    for args, reason in (
        ((wide, wide, v, wide, beta, ids), r"K and V are one of 16, 32, 64, 128, got K = 256"),
        ((q[:, :0], k[:, :0], v[:, :0], g[:, :0], beta[:, :0], ids[:, :0]), "at least one token"),
        ((q, k[:, :4], v, g, beta, ids), r"q and k are \[B T H K\]"),
        ((q, k, v, beta, beta, ids), r"g is \[B T H K\], got \[1, 5, 2\]"),
        ((q, k, v, g, beta[:, :4], ids), r"beta is \[B T H\] and ids \[B T\]"),
        ((q, k.bfloat16(), v, g, beta, ids), "one dtype"),
        ((q, k, v, g.double(), beta, ids), "at most float32"),
        ((q, k, v, g, beta, ids, state[:, :1]), r"initial_state is \[1, 2, 16, 16\]"),
    ):
        with use_impl(kda="triton"), pytest.raises(ValueError, match=reason):
            kda(*args)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("decay", ["initial", "mixed", "hard", "weak"])
def test_at_full_width(decay: str, dtype: torch.dtype) -> None:
    limit = BFLOAT16 if dtype == torch.bfloat16 else FLOAT32
    lengths = [[1000], [37, 1, 460, 3, 400]]
    check(inputs(lengths, 1000, decay=decay, dtype=dtype, size=(3, 128, 128)), limit)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("decay", ["initial", "mixed", "hard", "weak"])
def test_pieces_at_full_width(
    decay: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few heads are cut by themselves; and with one piece the results agree to rounding."""
    xs = inputs([[2000]], 2000, decay=decay, dtype=dtype, size=(3, 128, 128))
    check(xs, 1e-2 if dtype == torch.bfloat16 else FLOAT32)
    cts = cotangents(xs)
    cut = results(xs, cts)
    in_pieces(monkeypatch, 0)
    limit = BFLOAT16 if dtype == torch.bfloat16 else FLOAT32
    for name, a, b in zip(NAMES, cut, results(xs, cts), strict=True):
        assert (a.double() - b).norm() <= limit * b.double().norm(), name


@pytest.mark.cuda
@pytest.mark.parametrize("keys", ["alike", "equal", "opposite"])
def test_alike_keys_at_full_width(keys: str) -> None:
    xs = inputs([[1000]], 1000, keys=keys, decay="weak", size=(3, 128, 128))
    check(xs, 2 * FLOAT32)
    check((*(x.bfloat16() for x in xs[:3]), *xs[3:]), ALIKE)


@pytest.mark.cuda
@pytest.mark.parametrize("size", [(2, 16, 64), (2, 64, 16), (2, 32, 32), (2, 128, 32)])
def test_widths_on_the_device(size: tuple[int, int, int]) -> None:
    check(inputs([[100, 33]], 140, size=size, dtype=torch.bfloat16), 1.5 * BFLOAT16)
    check(inputs([[100, 33]], 140, size=size), FLOAT32)


@pytest.mark.cuda
def test_the_layer_takes_it() -> None:
    cfg = layer.Config(256, 2, 128)
    p = tree.map(lambda x: x.to(DEVICE), init(layer.specs(cfg), key(0), dtype=torch.bfloat16))
    with record_impls() as ran:
        layer.apply(p, torch.randn(1, 100, 256, device=DEVICE, dtype=torch.bfloat16), cfg)
    assert ran["kda_gated", "triton"] == 1
