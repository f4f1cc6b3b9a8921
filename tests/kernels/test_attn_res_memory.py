"""What a stack of residual attentions keeps for its backward: under remat, no more than a plain
residual stack.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from k31fn.autodiff import remat
from k31fn.layers import attn_res
from k31fn.layers.attn_res import Carry, Config, Params

LAYERS, SHAPE = 7, (1, 16, 64)
CONFIG = Config(block_size=2)
WIDTH = SHAPE[-1]


def f(w: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(h @ w)


def plain(weights: list[Tensor], x: Tensor) -> Tensor:
    for w in weights:
        x = remat(lambda w, x: x + f(w, x))(w, x)
    return x


def sublayer(w: Tensor, params: Params[Tensor], carry: Carry, opens_block: bool) -> Carry:
    return attn_res.connect(
        params, carry, CONFIG, lambda h: (f(w, h), ()), opens_block=opens_block
    )[0]


def mixed(
    weights: list[Tensor], x: Tensor, wrap: Callable[..., Callable[..., Carry]] = remat
) -> Tensor:
    params = Params(query=torch.randn(WIDTH), norm=torch.ones(WIDTH))
    carry = attn_res.start(x, CONFIG)
    for i, w in enumerate(weights):
        opens = i % CONFIG.block_size == 0
        carry = wrap(lambda w, params, carry, opens=opens: sublayer(w, params, carry, opens))(
            w, params, carry
        )
    return carry.prefix


def kept_streams(run: Callable[..., Tensor]) -> int:
    """Tensors as large as the stream that the backward holds, counted once for each storage;
    weights are smaller.
    """
    stream = torch.Size(SHAPE).numel()
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    weights = [0.1 * torch.randn(WIDTH, WIDTH // 8).repeat(1, 8) for _ in range(LAYERS)]
    x = torch.randn(SHAPE, requires_grad=True)
    parameters = {w.requires_grad_().untyped_storage().data_ptr() for w in weights}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = run(weights, x)
    assert out.requires_grad
    return sum(n // stream for pointer, n in kept.items() if pointer not in parameters)


def test_under_remat_as_many_streams_as_a_plain_residual() -> None:
    """A sublayer's input, once: the frozen blocks are inputs that were kept before."""
    assert kept_streams(plain) == LAYERS
    assert kept_streams(mixed) == LAYERS


def test_without_remat_it_would_be_more() -> None:
    assert kept_streams(lambda weights, x: mixed(weights, x, wrap=lambda step: step)) > 2 * LAYERS


@pytest.mark.parametrize("wrap", [remat, lambda step: step])
def test_gradients_are_the_same(wrap: Callable[..., Callable[..., Carry]]) -> None:
    torch.manual_seed(0)
    weights, x = [0.1 * torch.randn(WIDTH, WIDTH) for _ in range(LAYERS)], torch.randn(SHAPE)

    def loss(x: Tensor, wrap: Callable[..., Callable[..., Carry]]) -> Tensor:
        torch.manual_seed(1)
        return mixed(weights, x, wrap).square().sum()

    expected = torch.func.grad(lambda x: loss(x, lambda step: step))(x)
    assert torch.equal(torch.func.grad(lambda x: loss(x, wrap))(x), expected)
