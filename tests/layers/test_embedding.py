"""The embedding: a lookup with the gradient of one, and the host check of token ids."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from k31fn import params as P
from k31fn import random
from k31fn.autodiff import value_and_grad, vjp
from k31fn.layers import embedding
from k31fn.layers.embedding import Config, Params, check_tokens
from k31fn.layers.losses import IGNORED
from k31fn.testing import live_bytes

CFG = Config(vocab_size=9, hidden_size=4, init_std=0.5)


def lookup(weight: Tensor, tokens: Tensor) -> Tensor:
    return embedding.apply(Params(weight), tokens, CFG)


def test_value_and_gradient_are_those_of_a_product_with_one_hot_rows() -> None:
    weight, tokens = torch.randn(9, 4, dtype=torch.float64), torch.tensor([[3, 0, 3], [8, 3, 0]])
    ct = torch.randn(2, 3, 4, dtype=torch.float64)

    def dense(weight: Tensor) -> Tensor:
        return F.one_hot(tokens, 9).double() @ weight

    assert torch.equal(lookup(weight, tokens), dense(weight))
    grads = [
        torch.func.grad(lambda w, f=f: (f(w).sin() * ct).sum())(weight)
        for f in (lambda w: lookup(w, tokens), dense)
    ]
    torch.testing.assert_close(*grads, atol=1e-14, rtol=0)
    assert torch.equal(grads[0][5], torch.zeros(4, dtype=torch.float64))
    narrow = torch.func.grad(lambda w: (lookup(w, tokens.int()).sin() * ct).sum())(weight)
    assert torch.equal(narrow, grads[0])


def test_gradient_is_deterministic() -> None:
    tokens, ct = torch.randint(0, 9, (4, 500)), torch.randn(4, 500, 4)
    grads = [
        value_and_grad(lambda w: (lookup(w, tokens) * ct).sum())(torch.ones(9, 4))[1]
        for _ in range(3)
    ]
    assert all(torch.equal(g, grads[0]) for g in grads)


def test_bfloat16_gradient_is_summed_in_float32() -> None:
    """5000 times the same token: a sum in bfloat16 stops at 256."""
    tokens = torch.zeros(1, 5000, dtype=torch.int64)
    grad = torch.func.grad(lambda w: lookup(w, tokens).float().sum())(
        torch.ones(9, 4, dtype=torch.bfloat16)
    )
    assert grad.dtype == torch.bfloat16
    assert torch.equal(grad[0], torch.full((4,), 5000.0).bfloat16())


def test_per_sample_gradients() -> None:
    weight, tokens = torch.randn(9, 4, dtype=torch.float64), torch.tensor([[3, 0, 3], [8, 3, 0]])

    def loss(weight: Tensor, row: Tensor) -> Tensor:
        return lookup(weight, row[None]).square().sum()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, tokens)
    for sample in range(2):
        assert torch.equal(together[sample], torch.func.grad(loss)(weight, tokens[sample]))


def test_the_table_is_not_kept_for_the_backward() -> None:
    """A gathered one is freed when it was looked up."""
    weight, tokens = torch.ones(1000, 4), torch.zeros(1, 2, dtype=torch.int64)
    for keeps, f in (
        (False, lookup),
        (True, lambda w, t: (w * w)[t]),
    ):  # the measure sees what is to be avoided
        with live_bytes() as live:
            y, _ = vjp(lambda w, f=f: f(w * 2, tokens), weight)
            assert y.shape == (1, 2, 4)
            assert (live.current > weight.nbytes) == keeps


def test_initial_table() -> None:
    table = P.init(
        embedding.specs(Config(2000, 50, init_std=0.5)), random.key(0), dtype=torch.float32
    ).weight
    assert abs(table.std().item() - 0.5) < 0.005  # sd of the estimate: 0.5 / sqrt(2 * 1e5) = 0.0011
    spec = embedding.specs(CFG).weight
    assert (spec.shape, spec.axes, "matrix" in spec.tags) == ((9, 4), ("vocab", "hidden"), False)


def test_refusals() -> None:
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="reverse over reverse"):
        lookup(torch.ones(9, 4), torch.tensor([[1]]))
    for field, value in (("vocab_size", 0), ("hidden_size", 0), ("init_std", -1.0)):
        with pytest.raises(ValueError, match=rf"embedding\.Config\.{field}={value}"):
            Config(**{"vocab_size": 2, "hidden_size": 2, field: value})


def test_check_tokens_names_the_first_bad_one() -> None:
    good = torch.tensor([[0, 1, 8], [2, 3, 4]])
    check_tokens(good, 9, "tokens")
    with pytest.raises(
        ValueError, match=r"tokens\[1, 2\]=9: must be in \[0, 9\), as is not so for 1 of 6"
    ):
        check_tokens(good + torch.tensor([[0, 0, 0], [0, 0, 5]]), 9, "tokens")
    with pytest.raises(ValueError, match=r"tokens\[0, 0\]=-1.*2 of 6"):
        check_tokens(good - torch.tensor([[1, 0, 9], [0, 0, 0]]), 9, "tokens")
    labels = torch.tensor([[IGNORED, 3]])
    check_tokens(labels, 9, "labels", ignored=IGNORED)
    with pytest.raises(ValueError, match=r"labels\[0, 0\]=-100"):
        check_tokens(labels, 9, "labels")
    with pytest.raises(ValueError, match=r"labels\[0, 1\]=-99: must be in \[0, 9\) or -100"):
        check_tokens(torch.tensor([[IGNORED, -99]]), 9, "labels", ignored=IGNORED)
