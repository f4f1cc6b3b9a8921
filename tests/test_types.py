"""Types that a user's editor shows: basedpyright checks this file, and pytest runs it."""

from __future__ import annotations

from typing import Any, NamedTuple, assert_type

import torch
from torch import Tensor

import k31fn
from k31fn import random
from k31fn.autodiff import value_and_grad
from k31fn.layers import kda, mlp

CFG = mlp.Config(4, 6)


class Sizes(NamedTuple):
    """What a loss may return besides its value."""

    total: Tensor


def loss(p: mlp.Params[Tensor], x: Tensor) -> Tensor:
    """A function of a parameter tree."""
    return mlp.apply(p, x, CFG).y.sum()


def loss_and_sizes(p: dict[str, Tensor], *, factor: float) -> tuple[Tensor, Sizes]:
    """A function with an auxiliary result and a keyword."""
    total = factor * p["w"].sum()
    return total, Sizes(total)


def test_a_gradient_has_the_type_of_the_argument():
    p = mlp.init(CFG, random.key(0), dtype=torch.float32)
    assert_type(p, mlp.Params[Tensor])
    x = torch.ones(1, 2, 4)
    value, grads = value_and_grad(loss)(p, x)
    assert_type(value, Tensor)
    assert_type(grads, mlp.Params[Tensor])
    assert grads.w_up.shape == (4, 6)

    w = {"w": torch.ones(2)}
    (value, sizes), of_w = value_and_grad(loss_and_sizes, has_aux=True)(w, factor=2.0)
    assert_type(sizes, Sizes)
    assert_type(of_w, dict[str, Tensor])

    # of several arguments, and of a lambda, a type cannot be told, and nothing is reported
    assert_type(value_and_grad(loss, (0, 1))(p, x), Any)
    assert value_and_grad(lambda w: w.square().sum())(torch.ones(2))[1].sum() == 4


def test_layers_are_there_by_attribute():
    cfg = k31fn.layers.kda.Config(8, 1, 4)
    assert_type(cfg, kda.Config)
    assert_type(k31fn.layers.kda.init(cfg, random.key(0)), kda.Params[Tensor])
    assert_type(k31fn.__version__, str)
