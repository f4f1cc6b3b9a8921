"""The fused head against its reference in float64, and against torch's own loss.

Tolerances: float32 sums of at most 40 products and of a softmax, 1e-5; gradients sum over tokens
too, 3e-5. bfloat16: logits and their gradient are rounded once each, to 2^-9, where the interpreter
cuts (2^-8); sums of two such.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from k31fn.autodiff import value_and_grad
from k31fn.jit import jit
from k31fn.kernels.head_cross_entropy import head_cross_entropy
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.layers.losses import IGNORED, linear_cross_entropy
from k31fn.testing import assert_op_matches, captures_on_cpu, live_bytes
from tests.kernels.fused import DEVICE, poisoned

kernels = pytest.importorskip("k31fn.kernels.head_cross_entropy.triton", exc_type=ImportError)
FLOAT32: Any = {"rtol": 1e-5, "atol": 1e-5, "grad_rtol": 3e-5, "grad_atol": 3e-5}
BFLOAT16: Any = {"rtol": 2**-7, "atol": 2**-6, "grad_rtol": 2**-5, "grad_atol": 2**-5}
D, Z = 5, 37


@pytest.fixture(autouse=True)
def several_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts of the columns, the last one short, as of a large vocabulary."""
    monkeypatch.setattr(kernels, "_SUMMED", 16)


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(tokens, D, device=DEVICE).to(dtype)
    w = torch.randn(D, Z, device=DEVICE).to(dtype)
    return hidden, w, torch.randint(0, Z, (tokens,), device=DEVICE)


def rows(count: int, dtype: torch.dtype = torch.float32) -> int:
    """The bound that makes chunks of so many tokens."""
    return count * Z * dtype.itemsize


def loss(hidden: Tensor, w: Tensor, labels: Tensor, bound: int = 0, **how: Any) -> Tensor:
    with use_impl(head_cross_entropy="triton"):
        return linear_cross_entropy(hidden[None], w, labels[None], logits_bytes=bound, **how).total


@pytest.mark.parametrize(
    ("tokens", "chunk"), [(7, 7), (7, 3), (6, 3), (5, 1), (1, 1), (0, 1)], ids=str
)
def test_equals_the_reference(tokens: int, chunk: int) -> None:
    """One chunk, chunks of which the last is short or full, one token each, one, and none; labels
    that are no column, as on a rank of a split vocabulary.
    """
    hidden, w, labels = inputs(tokens)
    # beyond the columns too, where a tile of the kernel has lanes
    labels = torch.where(labels % 4 == 0, labels - 3, labels + 2 * (labels % 2))
    with poisoned():
        assert_op_matches(
            head_cross_entropy,
            "triton",
            (hidden, w, labels, rows(chunk)),
            **FLOAT32,
            reference_dtype=torch.float64,
            vmap_grad=False,
        )


@pytest.mark.parametrize("chunk", [9, 4])
def test_bfloat16(chunk: int) -> None:
    args = (*inputs(9, torch.bfloat16), rows(chunk, torch.bfloat16))
    assert_op_matches(
        head_cross_entropy,
        "triton",
        args,
        **BFLOAT16,
        reference_dtype=torch.float64,
        vmap_grad=False,
    )


@pytest.mark.parametrize("chunk", [8, 3])
def test_ignored_labels(chunk: int) -> None:
    """Torch's loss of the others, for a state that is NaN where there is no label; with a label it
    would count.
    """
    hidden, w, labels = inputs(8)
    ignored = torch.tensor([0, 3, 7], device=DEVICE)
    labels[ignored] = IGNORED
    bad = hidden.index_fill(0, ignored, torch.nan)
    value, (d_hidden, d_w) = value_and_grad(loss, (0, 1))(bad, w, labels, rows(chunk))

    def exact(hidden: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(hidden @ w, labels, ignore_index=IGNORED, reduction="sum")

    wide = value_and_grad(exact, (0, 1))(hidden.double(), w.double(), labels)
    torch.testing.assert_close(value.double(), wide[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d_hidden.double(), wide[1][0], rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(d_w.double(), wide[1][1], rtol=3e-5, atol=3e-5)
    labels[0] = 1
    assert linear_cross_entropy(bad[None], w, labels[None]).total.isnan()


@pytest.mark.parametrize("chunk", [4, 3])
def test_no_valid_label(chunk: int) -> None:
    hidden, w, labels = inputs(4)
    nothing = torch.full_like(labels, IGNORED)
    value, grads = value_and_grad(loss, (0, 1))(hidden * torch.nan, w, nothing, rows(chunk))
    assert value == 0
    assert all((g == 0).all() for g in grads)


def test_large_logits() -> None:
    """exp(1e4) overflows float32; the least of all logits has no part in the sum. Their products
    are exact.
    """
    _, _, labels = inputs(3)
    scale = torch.tensor([1e4, -1e4, 1.0], device=DEVICE)[:, None]
    hidden = scale * torch.randint(-8, 9, (3, D), device=DEVICE)
    w = torch.randint(-8, 9, (D, Z), device=DEVICE) / 8
    with use_impl(head_cross_entropy="triton"):
        lse, picked = head_cross_entropy(hidden, w, labels)
    exact = hidden.double() @ w.double()
    torch.testing.assert_close(lse.double(), exact.logsumexp(-1), rtol=1e-6, atol=1e-5)
    assert torch.equal(picked.double(), exact.gather(1, labels[:, None])[:, 0])


def test_z_loss() -> None:
    """Off by default; its gradient goes through the kernel's."""
    hidden, w, labels = inputs(6)
    labels[2] = IGNORED

    def exact(hidden: Tensor, w: Tensor) -> Tensor:
        logits = hidden @ w
        of_labels = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return of_labels + 0.1 * logits.logsumexp(-1).square()[labels >= 0].sum()

    value, grads = value_and_grad(lambda h, w: loss(h, w, labels, z_loss=0.1), (0, 1))(hidden, w)
    wide, wide_grads = value_and_grad(exact, (0, 1))(hidden.double(), w.double())
    torch.testing.assert_close(value.double(), wide, rtol=1e-5, atol=0)
    for ours, theirs in zip(grads, wide_grads, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("chunk", [8, 3])
def test_a_retained_graph_and_twenty_runs(chunk: int) -> None:
    """A second backward finds gradients where logits were, and computes them again: same bits."""
    hidden, w, labels = inputs(8)
    leaves = [hidden.requires_grad_(), w.requires_grad_()]
    value = loss(hidden, w, labels, rows(chunk))
    runs = [torch.autograd.grad(value, leaves, retain_graph=True) for _ in range(2)]
    for _ in range(18 if DEVICE == "cuda" else 2):
        again = loss(hidden, w, labels, rows(chunk))
        assert torch.equal(again, value)
        runs.append(torch.autograd.grad(again, leaves))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("frozen", ["hidden", "w"])
def test_a_frozen_argument_costs_no_product(frozen: str) -> None:
    hidden, w, labels = inputs(8)
    both = value_and_grad(loss, (0, 1))(hidden, w, labels, rows(3))[1]
    wanted = 1 if frozen == "hidden" else 0
    with FlopCounterMode(display=False) as counter:
        alone = value_and_grad(loss, wanted)(hidden, w, labels, rows(3))[1]
    assert torch.equal(alone, both[wanted])
    # the forward, one gradient, and the logits of two of three chunks again
    assert counter.get_total_flops() == 2 * D * Z * (8 + 8 + 6)


def test_live_logits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen chunks of the tokens: one of them lives, in the forward and in the backward."""
    monkeypatch.setattr(kernels, "_SUMMED", 64)  # the columns in one part: fewer programs
    hidden, w = torch.randn(64, D, device=DEVICE), torch.randn(D, Z, device=DEVICE)
    labels = torch.randint(0, Z, (64,), device=DEVICE)
    logits = 64 * Z * 4
    peaks = {}
    for bound in (logits, logits // 16):
        with live_bytes() as live:
            value_and_grad(loss, (0, 1))(hidden, w, labels, bound)
        peaks[bound] = live.peak
        assert live.largest is not None
        assert live.largest.nbytes <= max(bound, hidden.nbytes)
    # hidden without the ignored and its gradient, that of w, and some numbers per token
    others = 3 * hidden.nbytes + w.nbytes + 16 * 64 * 4
    assert logits < peaks[logits] < logits + others  # the measure sees what is to be avoided
    assert peaks[logits // 16] < logits // 16 + others


def test_first_order_only() -> None:
    """And one cotangent at a time: the gradient is written over the logits of all of them."""
    hidden, w, labels = inputs(2)
    hidden.requires_grad_()
    (grad,) = torch.autograd.grad(loss(hidden, w, labels), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match=r"head_cross_entropy \(triton\) is first order only"):
        grad.sum().backward()
    with pytest.raises(RuntimeError, match=r"head_cross_entropy \(triton\): several cotangents"):
        torch.func.jacrev(loss)(hidden.detach(), w, labels)


def test_refusals() -> None:
    hidden, w, labels = inputs(2)
    with pytest.raises(ValueError, match="the gradient of the logits is written over them"):
        torch.func.vmap(loss, (0, None, None))(torch.stack([hidden, hidden]), w, labels)
    for args, reason in (
        ((hidden, w[1:], labels), r"hidden is \[\*rows D\], w \[D Z\]"),
        ((hidden, w, labels[:1]), r"labels \[\*rows\], got"),
        ((hidden, w[:, :0], labels), "no column"),
        ((hidden.double(), w.double(), labels), "it computes torch.bfloat16, torch.float32"),
    ):
        with (
            use_impl(head_cross_entropy="triton"),
            pytest.raises(ValueError, match=reason),
        ):
            head_cross_entropy(*args)


def test_a_captured_call_has_the_bits_of_an_eager_one() -> None:
    """On a GPU by the kernels, in two chunks; the recorder for the CPU sees no kernel, so there by
    the reference.
    """
    on_gpu = DEVICE == "cuda"
    impl = "triton" if on_gpu else "reference"

    def step(hidden: Tensor, w: Tensor, labels: Tensor) -> Any:
        def total(hidden: Tensor, w: Tensor) -> Tensor:
            with use_impl(head_cross_entropy=impl):
                bound = rows(4) if on_gpu else rows(2)
                return linear_cross_entropy(hidden[None], w, labels[None], logits_bytes=bound).total

        return value_and_grad(total, (0, 1))(hidden, w)

    with captures_on_cpu():
        captured = jit(step, strict=True)
        for _ in range(4):
            args = inputs(8)
            value, grads = captured(*args)
            expected, expected_grads = step(*args)
            assert torch.equal(value, expected)
            assert all(map(torch.equal, grads, expected_grads))


def test_which_runs_by_default() -> None:
    hidden, w, labels = inputs(2)
    with record_impls() as ran:
        linear_cross_entropy(hidden[None], w, labels[None])
        linear_cross_entropy(hidden[None].double(), w.double(), labels[None])
    names = {name for op, name in ran if op == "head_cross_entropy"}
    assert names == ({"triton", "reference"} if DEVICE == "cuda" else {"reference"})


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("chunk", [1000, 400])
def test_at_size(dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative L2 against float64, and against the reference: 1e-6 in float32. Twenty repeats are
    bit-identical.
    """
    monkeypatch.setattr(kernels, "_SUMMED", 4096)
    width, columns = 512, 20000
    hidden = torch.randn(1000, width, device=DEVICE).to(dtype)
    w = (torch.randn(width, columns, device=DEVICE) / width**0.5).to(dtype)
    labels = torch.randint(0, columns, (1000,), device=DEVICE)
    labels[::7] = IGNORED
    bound = chunk * columns * dtype.itemsize
    value, grads = value_and_grad(loss, (0, 1))(hidden, w, labels, bound)
    for _ in range(20):
        again, more = value_and_grad(loss, (0, 1))(hidden, w, labels, bound)
        assert torch.equal(again, value)
        assert all(map(torch.equal, more, grads))

    def reference(hidden: Tensor, w: Tensor) -> Tensor:
        with use_impl(head_cross_entropy="reference"):
            return linear_cross_entropy(hidden[None], w, labels[None]).total

    for wide in (dtype, torch.float64):
        expected = value_and_grad(reference, (0, 1))(hidden.to(wide), w.to(wide))
        limit = 1e-6 if dtype == torch.float32 else 1e-2
        for ours, theirs in zip((value, *grads), (expected[0], *expected[1]), strict=True):
            off = (ours.double() - theirs.double()).norm() / theirs.double().norm()
            assert off < limit, (wide, float(off))
