"""The fused Gated DeltaNet against the reference in float64: values and gradients, for decays from
weak to beyond any range, keys that are alike, packed documents of any length, and under vmap.

Tolerances are norms of a difference over the norm. float32: sums of 16 to 128 products in another
order, through a triangular inverse whose entries are at most 1 in size. bfloat16: a rounding of the
result alone is 1.7e-3, operands are rounded some three times on the way; with keys that are alike
and beta near 1 o is a telescoping sum of differences, each rounded: on an H200 8e-3 for o and at
most 1e-2 for a gradient, 2e-2 with tiles of 64 tokens. With the inverse as one bfloat16 number
dbeta was off by 1.9e-1 there.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn import tree
from k31fn.kernels.gdn import gdn
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.layers import gdn as layer
from k31fn.params import init
from k31fn.random import key
from k31fn.testing import assert_op_matches
from tests.kernels.delta_rule import (
    Inputs,
    check_op,
    cotangents,
    operands,
    results_of,
)
from tests.kernels.fused import DEVICE

op = pytest.importorskip("k31fn.kernels.gdn.triton.op", exc_type=ImportError)
FLOAT32, BFLOAT16, ALIKE = 5e-6, 8e-3, 2e-2


def decays(kind: str, *shape: int) -> Tensor:
    """``beyond``: weak ones behind some that leave nothing; no factors in range hold those."""
    if kind == "initial":
        return -torch.exp(torch.rand(shape) * 7.4 - 6.9)
    if kind == "mixed":
        return -5 * torch.sigmoid(3 * torch.randn(shape))
    if kind == "beyond":
        return torch.where(torch.rand(shape) < 0.1, -1e5, -0.01)
    return torch.full(shape, {"hard": -5.0, "weak": -0.01}[kind])


def inputs(
    lengths: list[list[int]],
    length: int,
    *,
    decay: str = "mixed",
    keys: str = "random",
    dtype: torch.dtype = torch.float32,
    size: tuple[int, int, int] = (1, 16, 16),
) -> Inputs:
    shape = (len(lengths), length, size[0])
    return operands(lengths, length, lambda: decays(decay, *shape), keys, dtype, size)


def results(xs: Inputs, cts: tuple[Tensor, Tensor], impl: str = "triton") -> list[Tensor]:
    return results_of(gdn, xs, cts, impl)


def check(xs: Inputs, limit: float) -> None:
    check_op(gdn, xs, limit)


PACKINGS = {1: [[1]], 65: [[31, 33]]}


@pytest.mark.parametrize("length", PACKINGS)
def test_equals_the_reference(length: int) -> None:
    check(inputs(PACKINGS[length], length), FLOAT32)


@pytest.mark.parametrize("decay", ["hard", "beyond"])
def test_decays(decay: str) -> None:
    check(inputs([[40]], 45, decay=decay), FLOAT32)


def test_equal_keys_with_beta_near_one() -> None:
    """Powers of the triangle would lose all digits here."""
    check(inputs([[36]], 36, keys="equal", decay="weak"), FLOAT32)


def test_widths() -> None:
    check(inputs([[18, 4]], 25, size=(2, 32, 16)), FLOAT32)


def test_bfloat16() -> None:
    check(inputs([[20, 13]], 35, dtype=torch.bfloat16), BFLOAT16)


def test_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several, the last one shorter."""
    monkeypatch.setattr(op, "_SHORTEST", 64)
    monkeypatch.setattr(op, "_SEGMENT", 64)
    check(inputs([[70, 2, 60], [139]], 140), FLOAT32)


@pytest.mark.parametrize("tokens", [16, 64])
def test_other_tiles(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other devices."""
    kind = op.kind_of(torch.empty(0, device=DEVICE))
    monkeypatch.setitem(op._TILES, kind, op._TILES[kind]._replace(tokens=tokens))
    check(inputs([[60, 7]], 70), FLOAT32)


def test_vmap_and_no_state() -> None:
    q, k, v, g, beta, ids, state = inputs([[9, 8]], 20)
    for args in ((q, k, v, g, beta, ids, state), (q, k, v, g, beta, ids)):
        assert_op_matches(gdn, "triton", args, rtol=1e-4, atol=1e-5, reference_dtype=torch.float64)


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


def test_other_documents_and_later_tokens_change_no_bit() -> None:
    xs = inputs([[20, 28]], 50)
    cts = cotangents(xs)
    base = results(xs, cts)
    first, second = slice(0, 20), slice(20, 48)
    for changed, kept in ((first, second), (second, first)):
        ys = [x.clone() for x in xs]
        for x in ys[:5]:
            x[:, changed] = x[:, changed].flip(1)
        o, _, *grads, _ = results(tuple(ys), cts)
        assert torch.equal(o[:, kept], base[0][:, kept])
        if changed == first:  # the state's cotangent passes the second document alone
            assert all(
                torch.equal(g[:, kept], b[:, kept]) for g, b in zip(grads, base[2:], strict=False)
            )
    for at in (5, 32):
        ys = [torch.cat([x[:, :at], x[:, at:].flip(1)], 1) for x in xs[:5]]
        with use_impl(gdn="triton"):
            assert torch.equal(gdn(*ys, *xs[5:]).o[:, :at], base[0][:, :at])


@pytest.mark.cuda
def test_repeats_are_bit_identical() -> None:
    xs = inputs([[300, 5]], 400, dtype=torch.bfloat16, size=(3, 128, 128))
    cts = cotangents(xs)
    first, *others = (results(xs, cts) for _ in range(20))
    for run in others:
        assert all(torch.equal(a, b) for a, b in zip(run, first, strict=True))


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


@pytest.mark.parametrize("name", ["gdn_gradients", "kda_adjoint"])
def test_a_broken_kernel_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """beta in the place of g; the inverse in the place of P."""
    monkeypatch.setattr(op, name, Swapped(getattr(op, name)))
    with pytest.raises(AssertionError, match=r"(o|dq|dk|dv|dg): "):
        check(inputs([[20]], 20), FLOAT32)


def test_first_order_only() -> None:
    xs = inputs([[5]], 5)

    def loss(q: Tensor) -> Tensor:
        with use_impl(gdn="triton"):
            return gdn(q, *xs[1:]).o.square().sum()

    with pytest.raises(RuntimeError, match=r"gdn \(triton\) is first order only"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).square().sum())(xs[0])


def test_refusals() -> None:
    q, k, v, g, beta, ids, state = inputs([[5]], 5)
    wide = torch.randn(1, 5, 1, 256, device=DEVICE)
    for args, reason in (
        ((wide, wide, v, g, beta, ids), r"K and V are one of 16, 32, 64, 128, got K = 256"),
        ((q[:, :0], k[:, :0], v[:, :0], g[:, :0], beta[:, :0], ids[:, :0]), "at least one token"),
        ((q, k[:, :4], v, g, beta, ids), r"q and k are \[B T H K\]"),
        ((q, k, v, g, beta[:, :4], ids), r"beta is \[B T H\] and ids \[B T\]"),
        ((q, k, v, g[..., None].expand_as(k), beta, ids), r"g is \[B T H\], got \[1, 5, 1, 16\]"),
        ((q, k.bfloat16(), v, g, beta, ids), "one dtype"),
        ((q, k, v, g.double(), beta, ids), "at most float32"),
        ((q, k, v, g, beta, ids, state[:, :, :4]), r"initial_state is \[1, 1, 16, 16\]"),
    ):
        with use_impl(gdn="triton"), pytest.raises(ValueError, match=reason):
            gdn(*args)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("decay", ["initial", "mixed", "hard", "weak", "beyond"])
def test_at_full_width(decay: str, dtype: torch.dtype) -> None:
    limit = BFLOAT16 if dtype == torch.bfloat16 else FLOAT32
    lengths = [[1000], [37, 1, 460, 3, 400]]
    check(inputs(lengths, 1000, decay=decay, dtype=dtype, size=(3, 128, 128)), limit)


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
    p = init(layer.specs(cfg), key(0), dtype=torch.bfloat16)
    p = tree.map(lambda x: x.to(DEVICE), p)
    with record_impls() as ran:
        layer.apply(p, torch.randn(1, 100, 256, device=DEVICE, dtype=torch.bfloat16), cfg)
    assert ran["gdn", "triton"] == 1
