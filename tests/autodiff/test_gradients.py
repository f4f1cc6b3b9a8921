"""What value_and_grad refuses, and products with a Hessian."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from k31fn import tree
from k31fn.autodiff import custom_vjp, hessian, hvp, remat, value_and_grad
from tests.autodiff.functions import close, normal


def f(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return (p["w"] * x).sin().sum() * p["b"] ** 2


def args() -> tuple[dict[str, Tensor], Tensor]:
    return {"w": normal(3), "b": normal()}, normal(3)


def dense_product(p: dict[str, Tensor], v: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """The product by the whole Hessian."""
    blocks = hessian(f)(p, x)
    products = {}
    for name in p:
        parts = [blocks[name][of].reshape(p[name].numel(), -1) @ v[of].flatten() for of in p]
        products[name] = sum(parts).reshape(p[name].shape)
    return products


@pytest.mark.parametrize("wrap", [lambda f: f, remat], ids=["plain", "remat"])
def test_hvp_is_the_hessian_times_a_vector(wrap):
    p, x = args()
    v = {"w": normal(3), "b": normal()}
    close(hvp(wrap(f), v, p, x), dense_product(p, v, x))
    many = {"w": normal(2, 3), "b": normal(2)}
    each = [dense_product(p, tree.map(lambda t, i=i: t[i], many), x) for i in range(2)]
    stacked = tree.map(lambda *t: torch.stack(t), *each)
    close(vmap(lambda v: hvp(wrap(f), v, p, x))(many), stacked)


def test_hvp_of_several_arguments_and_of_a_linear_function():
    a, b, u, v = (normal(3) for _ in range(4))
    got = hvp(lambda a, b: (a.square() * b).sum(), (u, v), a, b, argnums=(0, 1))
    close(got, (2 * b * u + 2 * a * v, 2 * a * u))
    close(hvp(lambda a: a.sum(), u, a), torch.zeros_like(a))


def test_a_third_derivative_goes_through_hvp():
    x, v = normal(3), normal(3)
    third = value_and_grad(lambda x: (hvp(lambda x: x.pow(4).sum(), v, x) * v).sum())(x)[1]
    close(third, 24 * x * v * v)


def test_hvp_names_what_does_not_fit():
    p, x = args()
    with pytest.raises(ValueError, match="hvp: v is not like argument 0: trees differ"):
        hvp(f, x, p, x)
    with pytest.raises(ValueError, match=r"v has a tensor of torch.float64 and shape \[2\] where"):
        hvp(f, {"w": normal(2), "b": normal()}, p, x)
    with pytest.raises(ValueError, match=r"leaf 'i' of argument 0 is a tensor of torch\.int64"):
        hvp(lambda p: p["x"].sum(), {"x": x, "i": x}, {"x": x, "i": torch.arange(3)})
    opaque = custom_vjp(lambda x: (x * x, x), lambda x, ct: (2 * x * ct,), opaque=True, name="op")
    with pytest.raises(RuntimeError, match="op is first order only"):
        hvp(lambda x: opaque(x).sum(), x, x)


class Pair(NamedTuple):
    value: Tensor
    aux: Tensor


BAD: dict[str, tuple[Any, Any, str]] = {
    "an integer argument": (
        lambda p: p["ids"].sum() * 0.5,
        {"ids": torch.arange(3)},
        r"leaf 'ids' of argument 0 is a tensor of torch.int64 and shape \[3\], which has no grad",
    ),
    "a number": (lambda x: x, 0.5, "argument 0 is float 0.5, which has no gradient"),
    "a module as an argument": (
        lambda m: m.weight.sum(),
        torch.nn.Linear(2, 2),
        "argument 0 is a Linear, .*functional_call",
    ),
    "no scalar": (
        lambda x: x * 2,
        torch.ones(1000),
        r"must return a floating scalar, got a tensor of torch.float32 and shape \[1000\]; take a",
    ),
    "aux unannounced": (lambda x: Pair(x.sum(), x), torch.ones(2), "got a Pair; .*has_aux=True"),
    "an integer value": (lambda x: x.argmax(), torch.ones(2), "got a tensor of torch.int64"),
}


@pytest.mark.parametrize("case", BAD)
def test_value_and_grad_says_what_it_was_given(case: str):
    f, x, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        value_and_grad(f)(x)


def test_value_and_grad_of_a_module_is_refused():
    with pytest.raises(ValueError, match=r"Linear is an nn\.Module, whose parameters are no arg"):
        value_and_grad(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="argnums names 1, but there are 1 arguments"):
        value_and_grad(f, (0, 1))(torch.ones(2))


def test_keywords_are_passed_on():
    def scaled(x: Tensor, *, factor: float) -> Tensor:
        return factor * x.sum()

    close(value_and_grad(scaled)(normal(2), factor=3.0)[1], torch.full((2,), 3.0).double())
