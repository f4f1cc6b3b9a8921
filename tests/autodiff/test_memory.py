"""What a gradient holds in memory at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

from k31fn import autodiff, tree
from k31fn.autodiff import remat
from k31fn.testing import live_bytes
from tests.autodiff.functions import deep, same_bits, value_and_grad

LAYERS, B, T, D = 12, 2, 64, 64


def wide(w: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """A layer whose insides are much larger than what it hands on."""
    return x + torch.tanh(torch.sin(torch.cos(x @ w[0]))) @ w[1]


def wide_net(f: Callable[..., Any]) -> tuple[Callable[..., Tensor], tuple[Any, Tensor]]:
    weights = [(torch.randn(D, 4 * D) / 8, torch.randn(4 * D, D) / 16) for _ in range(LAYERS)]
    return deep(f), (weights, torch.randn(B, T, D))


def peak_of(f: Callable[[], Any]) -> int:
    gc.collect()
    with live_bytes() as live:
        result = f()
    del result
    return live.peak


def bound(args: tuple[Any, Tensor]) -> float:
    """What training with remat per layer may hold besides its inputs."""
    weights, x = args
    own = peak_of(lambda: autodiff.vjp(wide, weights[0], x)[1](x))
    gradients = sum(t.nbytes for w in weights for t in w)
    return gradients + LAYERS * B * T * D * x.itemsize + 1.3 * own


def test_remat_per_layer_holds_one_layer_and_the_stream():
    net, args = wide_net(remat(wide))
    assert peak_of(lambda: value_and_grad(net)(*args)) <= bound(args)


def test_without_remat_that_bound_is_broken():
    net, args = wide_net(wide)
    assert peak_of(lambda: value_and_grad(net)(*args)) > 1.5 * bound(args)


def test_value_and_grad_is_lean():
    """torch.func.grad builds the graph of the backward too; the numbers are the same."""
    net, args = wide_net(remat(wide))
    ours, theirs = peak_of(lambda: value_and_grad(net)(*args)), peak_of(lambda: grad(net)(*args))
    assert theirs > 2 * ours
    plain, args = wide_net(wide)
    assert peak_of(lambda: grad(plain)(*args)) > 1.5 * peak_of(lambda: value_and_grad(plain)(*args))
    same_bits(value_and_grad(plain)(*args)[1], grad(plain)(*args))


def test_the_pullback_frees_the_residuals():
    net, args = wide_net(wide)
    gc.collect()
    with live_bytes() as live:
        value, pull = autodiff.vjp(net, *args)
        held = live.current
        gradients = pull(torch.ones_like(value))
        freed = live.current - sum(t.nbytes for t in tree.leaves(gradients))
    assert held > LAYERS * 3 * 4 * B * T * D * 4
    assert freed <= 8
