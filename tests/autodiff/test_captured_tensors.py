"""A tensor that a function holds without being given it would have a zero gradient, silently."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from k31fn.autodiff import custom_vjp, remat
from tests.autodiff.functions import F64, Params, close, normal, value_and_grad


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(normal(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


class Holder:
    """A plain object with a tensor."""

    def __init__(self, w: Tensor) -> None:
        self.w = w

    def __call__(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()

    def method(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def closures(w: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Ways in which a function of x can hold w."""

    def inner(x: Tensor) -> Tensor:
        return (w * x).sum()

    held, trees, holder = {"a": [w]}, Params(w, {}), Holder(w)
    return {
        "closure": lambda x: (w * x).sum(),
        "pytree in a closure": lambda x: (held["a"][0] * x).sum(),
        "dataclass in a closure": lambda x: (trees.w * x).sum(),
        "default": lambda x, w=w: (w * x).sum(),
        "keyword default": functools.wraps(lambda x: x)(lambda x, *, w=w: (w * x).sum()),
        "partial": functools.partial(lambda w, x: (w * x).sum(), w),
        "partial keyword": functools.partial(lambda x, w: (w * x).sum(), w=w),
        "inner function": lambda x: inner(x),
        "inner function in a list": lambda x, fs=[inner]: fs[0](x),
        "inner remat": lambda x: remat(inner)(x),
        "object in a closure": lambda x: (holder.w * x).sum(),
        "callable object": holder,
        "bound method": holder.method,
    }


HOLDS = list(closures(torch.zeros(())))
DIFFERENTIATE = {
    "grad": grad,
    "value_and_grad": value_and_grad,
    "plain autograd": lambda f: lambda w: f(w.clone().requires_grad_()).backward(),
    "vmap of grad": lambda f: lambda w: vmap(grad(f))(w[None]),
}


@pytest.mark.parametrize("by", DIFFERENTIATE)
@pytest.mark.parametrize("hold", HOLDS)
def test_a_captured_tensor_is_refused(hold: str, by: str):
    x = normal(3)
    with pytest.raises(
        ValueError,
        match=r"captured a differentiated tensor of shape \(3,\).*Pass it as an argument",
    ):
        DIFFERENTIATE[by](lambda w: remat(closures(w)[hold])(x))(normal(3))


@pytest.mark.parametrize("hold", HOLDS)
def test_a_captured_constant_is_no_fault(hold: str):
    c, x = normal(3), normal(3)
    close(value_and_grad(lambda x: remat(closures(c)[hold])(x))(x)[1], c)
    close(vmap(grad(lambda x: remat(closures(c)[hold])(x)))(x[None])[0], c)


@pytest.mark.parametrize(
    "f",
    [lambda m: m, lambda m: m.forward, lambda m: lambda x: m(x), lambda m: functools.partial(m)],
)
def test_a_captured_module_is_refused(f: Callable[..., Any]):
    module = Scale()
    with pytest.raises(ValueError, match="captured a differentiated tensor"):
        remat(f(module))(normal(3))
    module.requires_grad_(False)
    remat(f(module))(normal(3))


GLOBAL_WEIGHT = torch.zeros(3, dtype=F64)


def test_a_captured_global_is_refused():
    def f(x: Tensor) -> Tensor:
        return (lambda: (GLOBAL_WEIGHT * x).sum())()

    remat(f)(normal(3))
    GLOBAL_WEIGHT.requires_grad_()
    try:
        with pytest.raises(ValueError, match="captured a differentiated tensor"):
            remat(f)(normal(3))
    finally:
        GLOBAL_WEIGHT.requires_grad_(False)


def by_global(x: Tensor) -> tuple[Tensor, Tensor]:
    return GLOBAL_WEIGHT * x, x


def test_a_plain_rule_is_searched_for_globals_at_each_call():
    """No search is made of a function without closure: its globals are looked up all the same."""
    rule = custom_vjp(by_global, lambda x, ct: (ct * GLOBAL_WEIGHT,))
    rule(normal(3))
    GLOBAL_WEIGHT.requires_grad_()
    try:
        with pytest.raises(ValueError, match="captured a differentiated tensor"):
            rule(normal(3))
    finally:
        GLOBAL_WEIGHT.requires_grad_(False)


def test_rules_refuse_captured_tensors_too():
    """Also through a function passed as a static argument."""

    def scale(w):
        return custom_vjp(lambda x: (x * w, w), lambda r, ct: (ct * r,), name="scale")

    apply = custom_vjp(
        lambda f, x: (f(x), x),
        lambda f, res, ct: (ct * f(res),),
        nondiff_argnums=(0,),
        name="apply",
    )
    for f in (
        lambda w: scale(w)(normal(3)).sum(),
        lambda w: apply(lambda x: w * x, normal(3)).sum(),
    ):
        for by in (grad, value_and_grad):
            with pytest.raises(ValueError, match="captured a differentiated tensor"):
                by(f)(normal(3))


def test_a_mask_made_inside_a_transform_is_an_argument():
    def loss(x: Tensor, give: bool) -> Tensor:
        mask = x.detach() > 0
        return (
            remat(lambda x, m: (x * m).sum())(x, mask)
            if give
            else remat(lambda x: (x * mask).sum())(x)
        )

    x = normal(2, 3)
    close(vmap(grad(lambda x: loss(x, True)))(x), (x > 0).to(F64))
    with pytest.raises(ValueError, match=r"torch\.bool.*mask or an index"):
        vmap(grad(lambda x: loss(x, False)))(x)
