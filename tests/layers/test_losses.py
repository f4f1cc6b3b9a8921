"""The language-model loss: against torch's, in pieces and whole, its memory, and the cases where
sums go wrong.
"""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from k31fn import segments as seg
from k31fn.autodiff import hessian, value_and_grad, vjp
from k31fn.layers.linear import dequantize
from k31fn.layers.losses import IGNORED, linear_cross_entropy, mean
from k31fn.params import LowRank, Quantized
from k31fn.testing import live_bytes

B, T, D, Z = 2, 7, 5, 23
ONE_PIECE, MANY_PIECES = 2**20, 4 * B * T * 8  # bytes: all columns; 4 in float64


def data() -> tuple[Tensor, Tensor, Tensor]:
    labels = torch.randint(0, Z, (B, T))
    labels[0, 2] = labels[1, -1] = IGNORED
    return torch.randn(B, T, D, dtype=torch.float64), torch.randn(D, Z, dtype=torch.float64), labels


def torchs(hidden: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        (hidden @ w).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


@pytest.mark.parametrize("logits_bytes", [ONE_PIECE, MANY_PIECES, 1])
def test_equals_torchs_loss(logits_bytes: int) -> None:
    """Whole, in six pieces of unequal width, and column by column."""
    hidden, w, labels = data()
    (out, pull), (expected, pull_expected) = (
        vjp(
            lambda h, w: linear_cross_entropy(h, w, labels, logits_bytes=logits_bytes).total,
            hidden,
            w,
        ),
        vjp(lambda h, w: torchs(h, w, labels), hidden, w),
    )
    one = torch.ones_like(out)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(pull(one), pull_expected(one), atol=1e-12, rtol=1e-12)
    assert linear_cross_entropy(hidden, w, labels).num_tokens == B * T - 2


def test_second_derivative_in_pieces() -> None:
    hidden, w, labels = data()
    hidden, labels = hidden[:1, :2], labels[:1, :2]
    ours = hessian(lambda h: linear_cross_entropy(h, w, labels, logits_bytes=200).total)(hidden)
    torch.testing.assert_close(
        ours, hessian(lambda h: torchs(h, w, labels))(hidden), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("logits_bytes", [ONE_PIECE, MANY_PIECES])
def test_per_sample_gradients_over_different_labels(logits_bytes: int) -> None:
    hidden, w, labels = data()

    def loss(w: Tensor, h: Tensor, y: Tensor) -> Tensor:
        return linear_cross_entropy(h[None], w, y[None], logits_bytes=logits_bytes).total

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(w, hidden, labels)
    for sample in range(B):
        alone = torch.func.grad(
            lambda w, i=sample: torchs(hidden[i : i + 1], w, labels[i : i + 1])
        )(w)
        torch.testing.assert_close(together[sample], alone, atol=1e-12, rtol=0)


@pytest.mark.parametrize("logits_bytes", [ONE_PIECE, MANY_PIECES])
def test_head_leaves(logits_bytes: int) -> None:
    """A low-rank adapter on a quantised head equals the dense weight it stands for, gradients
    included.
    """
    hidden, _, labels = data()
    quantized = Quantized(
        torch.randint(-7, 8, (6, Z), dtype=torch.int8), torch.rand(2, Z, dtype=torch.float64)
    )
    hidden = torch.cat([hidden, hidden[..., :1]], -1)
    a, b = torch.randn(6, 2, dtype=torch.float64), torch.randn(2, Z, dtype=torch.float64)

    def leaf(h: Tensor, scales: Tensor, a: Tensor, b: Tensor) -> Tensor:
        head = LowRank(Quantized(quantized.codes, scales), a, b)
        return linear_cross_entropy(h, head, labels, logits_bytes=logits_bytes).total

    def dense(h: Tensor, scales: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torchs(
            h, dequantize(Quantized(quantized.codes, scales), torch.float64) + a @ b, labels
        )

    args = (hidden, quantized.scales, a, b)
    results = [value_and_grad(f, argnums=(0, 1, 2, 3))(*args) for f in (leaf, dense)]
    torch.testing.assert_close(*results, atol=1e-12, rtol=1e-12)


def test_full_logits_never_live() -> None:
    """Forward and backward together stay near the bound of one piece, far below the logits of all
    columns.
    """
    hidden, w = torch.randn(1, 256, 8), torch.randn(8, 4096)
    labels, logits = torch.randint(0, 4096, (1, 256)), 4 * 256 * 4096
    peaks = {}
    for bound in (logits, logits // 32):
        with live_bytes() as live:
            value_and_grad(
                lambda h, w, n=bound: linear_cross_entropy(h, w, labels, logits_bytes=n).total,
                (0, 1),
            )(hidden, w)
        peaks[bound] = live.peak
        assert live.largest is not None
        assert live.largest.nbytes <= max(bound, w.nbytes)  # the gradient of w is a result
    assert peaks[logits] > logits  # the measure sees what is to be avoided
    assert peaks[logits // 32] < 6 * logits / 32 + 4 * (w.nbytes + hidden.nbytes)


@pytest.mark.parametrize("logits_bytes", [ONE_PIECE, MANY_PIECES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_valid_label(dtype: torch.dtype, logits_bytes: int) -> None:
    """The sum and every gradient are exactly zero, also of the mean over no token."""
    hidden, w, _ = data()
    labels = torch.full((B, T), IGNORED)

    def loss(h: Tensor, w: Tensor) -> Tensor:
        total, num_tokens = linear_cross_entropy(h, w, labels, logits_bytes=logits_bytes)
        return total + mean(total, num_tokens)

    value, grads = value_and_grad(loss, argnums=(0, 1))(1e3 * hidden.to(dtype), w.to(dtype))
    assert value == 0
    assert all((g == 0).all() for g in grads)


def test_mean_over_nothing_has_no_gradient() -> None:
    total = torch.tensor(3.0, requires_grad=True)
    for denominator, expected in (
        (torch.tensor(4), 0.25),
        (4, 0.25),
        (0, 0.0),
        (torch.tensor(0), 0.0),
    ):
        (grad,) = torch.autograd.grad(mean(total, denominator), total)
        assert grad == expected
        assert mean(total, denominator) == 3 * expected


def two_class(losses: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """A head of logits (0, h) and label 0: the token's loss is log(1 + e^h)."""
    h = torch.tensor([[[math.log(math.expm1(x))] for x in losses]], dtype=torch.float64)
    return (
        h,
        torch.tensor([[0.0, 1.0]], dtype=torch.float64),
        torch.zeros(1, len(losses), dtype=torch.int64),
    )


def test_micro_batches_of_unequal_size() -> None:
    """Token losses 1, 1, 1 and 5 have the mean 2, however they are split; the mean of the means is
    3.
    """
    h, w, labels = two_class([1, 1, 1, 5])

    def step(w: Tensor, cuts: list[int]) -> Tensor:
        parts = zip(h.split(cuts, 1), labels.split(cuts, 1), strict=True)
        return sum(
            (mean(linear_cross_entropy(x, w, y).total, 4) for x, y in parts), start=torch.zeros(())
        )

    results = [value_and_grad(step)(w, cuts) for cuts in ([4], [3, 1], [1, 1, 2])]
    for value, grad in results:
        torch.testing.assert_close(value, torch.tensor(2.0, dtype=torch.float64))
        torch.testing.assert_close(grad, results[0][1], atol=1e-14, rtol=0)
    wrong = [mean(*linear_cross_entropy(h[:, s], w, labels[:, s])) for s in (slice(3), slice(3, 4))]
    assert abs(sum(wrong) / 2 - 3.0) < 1e-12


def test_labels_of_packed_documents() -> None:
    """Documents 1 2 3 and 4 5: the token 3 is not trained to predict 4.

    Cut before sharding, a row loses no label.
    """
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    labels = seg.next_token_labels(tokens, seg.from_lengths([[3, 2]], 5))
    hidden, w = torch.randn(1, 5, D, dtype=torch.float64), torch.randn(D, Z, dtype=torch.float64)
    whole = linear_cross_entropy(hidden, w, labels)
    assert whole.num_tokens == 3
    grad = torch.func.grad(lambda h: linear_cross_entropy(h, w, labels).total)(hidden)
    assert [bool(g.any()) for g in grad[0]] == [True, True, False, True, False]
    ranks = [
        linear_cross_entropy(hidden[:, s], w, labels[:, s]) for s in (slice(0, 2), slice(2, 5))
    ]
    torch.testing.assert_close(ranks[0].total + ranks[1].total, whole.total, atol=1e-12, rtol=0)
    assert ranks[0].num_tokens + ranks[1].num_tokens == 3


def test_softmax_in_float32() -> None:
    """In bfloat16 the loss is that of the rounded logits; a bfloat16 softmax is off by a
    percent.
    """
    hidden, w = torch.randn(1, 64, 16).bfloat16(), torch.randn(16, 2000).bfloat16()
    labels = torch.randint(0, 2000, (1, 64))
    total = linear_cross_entropy(hidden, w, labels).total
    assert total.dtype == torch.float32
    torch.testing.assert_close(
        total.double(), torchs(hidden.double(), w.double(), labels), rtol=2e-3, atol=0
    )
    exact = F.cross_entropy((hidden @ w)[0].double(), labels[0], reduction="sum")
    torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=0)


def test_hidden_gradient_of_many_pieces_is_summed_in_float32() -> None:
    """100 pieces in bfloat16 are as exact as one product (0.6% with these sizes); a bfloat16 sum is
    1.6 times worse.
    """
    hidden, w = torch.randn(1, 32, 16).bfloat16(), torch.randn(16, 400).bfloat16()
    labels = torch.randint(0, 400, (1, 32))

    def grad(hidden: Tensor, w: Tensor, logits_bytes: int = ONE_PIECE) -> Tensor:
        total = functools.partial(
            linear_cross_entropy, w_head=w, labels=labels, logits_bytes=logits_bytes
        )
        return value_and_grad(lambda h: total(h).total)(hidden)[1].double()

    exact = grad(hidden.double(), w.double())
    whole, pieces = ((grad(hidden, w, n) - exact).norm() for n in (ONE_PIECE, 4 * 32 * 4))
    assert pieces < 1.2 * whole
