from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from k31fn import autodiff
from k31fn.autodiff import hessian, remat, stop_gradient
from tests.autodiff.functions import (
    F64,
    Params,
    close,
    energy,
    exponential,
    flat,
    fused,
    normal,
    params,
    same_bits,
    their_value_and_grad,
    value_and_grad,
)


def test_vjp_returns_zeros_for_unused_leaves_and_nothing_for_integers():
    p, x = params(), normal(4)
    out, pull = autodiff.vjp(lambda p, x: {"y": p.w @ x, "n": p.rest["steps"] + 1}, p, x)
    assert not out["y"].requires_grad
    dp, dx = pull({"y": torch.ones(4, dtype=F64), "n": torch.zeros(2, dtype=torch.int64)})
    close(
        dp,
        Params(x.expand(4, 4).clone(), {"b": torch.zeros(4, dtype=F64), "steps": (), "none": ()}),
    )
    close(dx, p.w.sum(0))


@pytest.mark.parametrize(
    "transform", [lambda f: f, lambda f: lambda x: vmap(f)(x[None])[0]], ids=["plain", "vmap"]
)
def test_a_pullback_runs_once(transform: Callable[..., Any]):
    def twice(x: Tensor) -> Tensor:
        out, pull = autodiff.vjp(torch.sin, x)
        pull(out)
        return pull(out)[0]

    with pytest.raises(RuntimeError, match=r"called already|a second time"):
        transform(twice)(normal(3))


def test_a_pullback_names_a_cotangent_of_another_structure():
    _, pull = autodiff.vjp(lambda x: (x, x * 2), normal(3))
    with pytest.raises(ValueError, match="cotangent has 1 leaves, the output 2"):
        pull((normal(3),))


def test_argnums_select_and_keep_structure():
    p, x = params(), normal(4)
    value, (dx, dp) = value_and_grad(energy, (1, 0))(p, x)
    assert torch.equal(value, energy(p, x))
    assert isinstance(dp, Params)
    assert dp.rest["steps"] == ()
    functional = grad(flat(energy, p), (0, 1, 2))(p.w, p.rest["b"], x)
    same_bits((dp.w, dp.rest["b"], dx), functional)
    same_bits(value_and_grad(energy, 1)(p, x)[1], functional[2])
    with pytest.raises(ValueError, match="names an argument twice"):
        value_and_grad(energy, (1, 1))


@pytest.mark.parametrize("under", ["nothing", "vmap", "grad"])
def test_has_aux_takes_any_tree(under: str):
    """torch.func itself takes tensors only."""

    def f(x: Tensor) -> tuple[Tensor, Any]:
        return x.pow(2).sum(), {"twice": 2 * x, "n": 3, "name": "a", "i": x.argmax()}

    def taken(x: Tensor) -> Tensor:
        (value, aux), gradient = value_and_grad(f, has_aux=True)(x)
        assert (aux["n"], aux["name"]) == (3, "a")
        assert not aux["i"].is_floating_point()
        return value + aux["twice"].sum() + gradient.sum()

    x = normal(3)
    expected = x.pow(2).sum() + 4 * x.sum()
    if under == "vmap":
        close(vmap(taken)(torch.stack([x, x]))[0], expected)
    elif under == "grad":
        close(grad(taken)(x), 2 * x + 4)  # an outer derivative goes through value, aux and gradient
    else:
        close(taken(x), expected)


def test_integer_outputs_under_transforms():
    def f(x: Tensor) -> Tensor:
        (y, i), pull = autodiff.vjp(lambda x: (x.pow(2).sum(), x.argmax()), x)
        return pull((torch.ones_like(y), torch.zeros_like(i)))[0]

    x = normal(2, 3)
    close(vmap(f)(x), 2 * x)
    close(torch.stack([f(x[0]), f(x[1])]), 2 * x)


@pytest.mark.parametrize(
    "value", [lambda x: x, lambda x: x.argmax(), lambda x: 3.0, lambda x: (x.sum(),)]
)
def test_the_value_must_be_a_floating_scalar(value: Callable[..., Any]):
    with pytest.raises(ValueError, match="must return a floating scalar"):
        value_and_grad(value)(normal(3))


def test_none_is_refused_with_its_path():
    with pytest.raises(ValueError, match=r"tree leaf '0\.b' is None.*write \(\)"):
        value_and_grad(lambda p: p["a"].sum())({"a": normal(2), "b": None})


NESTED = {
    "ours in ours": (value_and_grad, value_and_grad),
    "ours in theirs": (their_value_and_grad, value_and_grad),
    "theirs in ours": (value_and_grad, their_value_and_grad),
}


@pytest.mark.parametrize(
    "wrap", [lambda f: f, remat, lambda f: remat(remat(f))], ids=["plain", "remat", "nested"]
)
@pytest.mark.parametrize("nesting", NESTED)
@pytest.mark.parametrize("argnum", [0, 1])
def test_second_order_by_nesting(argnum: int, nesting: str, wrap: Callable[..., Any]):
    """The inner gradient is with respect to one argument, the outer with respect to both."""

    def f(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(w @ x).pow(3).sum()

    def penalty(by: Callable[..., Any], f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda w, x: by(f, argnum)(w, x)[1].pow(2).sum()

    outer, inner = NESTED[nesting]
    args = normal(4, 4), normal(4)
    close(
        outer(penalty(inner, wrap(f)), (0, 1))(*args)[1],
        grad(penalty(their_value_and_grad, f), (0, 1))(*args),
    )


@pytest.mark.parametrize("nesting", NESTED)
def test_second_order_by_nesting_under_vmap(nesting: str):
    def penalty(by: Callable[..., Any], f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: by(f)(x)[1].pow(2).sum()

    outer, inner = NESTED[nesting]
    f, x = remat(lambda x: x.sin().pow(2).sum()), normal(3, 4)
    expected = grad(lambda x: grad(lambda x: x.sin().pow(2).sum())(x).pow(2).sum())(x)
    close(vmap(outer(penalty(inner, f)))(x)[1], expected)
    close(outer(lambda x: vmap(penalty(inner, f))(x).sum())(x)[1], expected)


def test_a_derivative_inside_a_derivative_sees_what_its_function_captured():
    """The inner function does not take w at all; its gradient depends on w all the same."""
    w, x = normal(4, 4), normal(4)

    def penalty(by: Callable[..., Any]) -> Callable[..., Any]:
        return lambda w: by(lambda x: torch.tanh(w @ x).pow(3).sum())(x)[1].pow(2).sum()

    expected = grad(penalty(their_value_and_grad))(w)
    assert float(expected.abs().max()) > 0.1
    close(value_and_grad(penalty(value_and_grad))(w)[1], expected)
    close(grad(penalty(value_and_grad))(w), expected)
    plain = w.clone().requires_grad_()
    penalty(value_and_grad)(plain).backward()
    close(plain.grad, expected)


def test_at_the_top_the_result_is_detached_and_lean():
    value, gradient = value_and_grad(lambda x: x.pow(3).sum())(normal(3))
    assert not value.requires_grad
    assert not gradient.requires_grad


def test_stop_gradient_is_zero_at_every_order_and_level():
    x = normal(4)
    f = lambda x: (stop_gradient(x) * x.pow(2)).sum()  # noqa: E731
    close(grad(f)(x), 2 * x * x)
    close(value_and_grad(f)(x)[1], 2 * x * x)
    close(hessian(f)(x), torch.diag(2 * x))
    close(vmap(grad(f))(torch.stack([x, -x])), torch.stack([2 * x * x, -2 * x * x * -1]))
    close(
        jacrev(lambda y: grad(lambda x: (stop_gradient(y) * x.pow(2)).sum())(x))(x),
        torch.zeros(4, 4, dtype=F64),
    )
    plain = x.clone().requires_grad_()
    f(plain).backward()
    close(plain.grad, 2 * x * x)
    same_bits(
        stop_gradient({"x": x, "i": torch.arange(2), "k": 3}),
        {"x": x, "i": torch.arange(2), "k": 3},
    )


@pytest.mark.parametrize(
    "f",
    [remat(torch.sin), exponential("input"), lambda x: fused(torch.eye(3, dtype=F64), x)],
    ids=["remat", "custom_vjp", "opaque"],
)
@pytest.mark.filterwarnings(
    r"ignore:`torch\.jit\.script:DeprecationWarning"
)  # torch's own first use of jvp
def test_forward_mode_raises_and_says_what_to_use(f: Callable[[Tensor], Tensor]):
    x = normal(3)
    for forward in (
        lambda: torch.func.jvp(f, (x,), (x,)),
        lambda: torch.func.jacfwd(f)(x),
        lambda: torch.func.hessian(lambda x: f(x).sum())(x),
    ):
        with pytest.raises(
            RuntimeError,
            match=r"forward-mode differentiation.*reverse-mode only.*autodiff\.hvp or hessian",
        ):
            forward()
