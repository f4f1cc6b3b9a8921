from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from k31fn import autodiff
from k31fn.autodiff import custom_vjp, hessian, keep, remat
from k31fn.kernels.registry import OPS, Implementation, Op, record_impls, use_impl
from tests.autodiff.functions import (
    F64,
    Pair,
    Params,
    block,
    close,
    deep,
    normal,
    params,
    same_bits,
    their_value_and_grad,
    value_and_grad,
)

WRAPS = {
    "each layer": lambda: deep(remat(block)),
    "the whole": lambda: remat(deep(block)),
    "nested": lambda: remat(deep(remat(block))),
    "twice nested": lambda: remat(remat(deep(remat(remat(block))))),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_remat_changes_no_bit_under_any_transform(wrap: str):
    f, plain = WRAPS[wrap](), deep(block)
    ws, x = [normal(3, 4) for _ in range(3)], normal(2, 3)
    assert torch.equal(f(ws, x), plain(ws, x))
    expected = grad(plain, (0, 1))(ws, x)
    same_bits(grad(f, (0, 1))(ws, x), expected)
    same_bits(value_and_grad(f, (0, 1))(ws, x)[1], expected)
    leaves = [w.clone().requires_grad_() for w in ws]
    f(leaves, x).backward()
    same_bits([w.grad for w in leaves], expected[0])
    close(hessian(f, 1)(ws, x), jacrev(jacrev(plain, 1), 1)(ws, x))
    xs = torch.stack([x, -x, 2 * x])
    close(vmap(grad(f, (0, 1)), (None, 0))(ws, xs), vmap(grad(plain, (0, 1)), (None, 0))(ws, xs))
    total = lambda f: lambda ws, xs: vmap(f, (None, 0))(ws, xs).sum()  # noqa: E731
    close(grad(total(f))(ws, xs), grad(total(plain))(ws, xs))
    close(value_and_grad(total(f))(ws, xs)[1], grad(total(plain))(ws, xs))


def test_remat_takes_trees_strings_numbers_and_integers():
    def f(p: Params, options: dict[str, Any], empty: tuple[()]) -> Pair:
        y = p.w[p.rest["steps"]] * options["scale"]
        return Pair(
            y if options["name"] == "a" else -y, {"index": p.rest["steps"] + 1, "b": p.rest["b"]}
        )

    p = params()
    same_bits(remat(f)(p, {"scale": 3, "name": "a"}, ()), f(p, {"scale": 3, "name": "a"}, ()))
    gradient = value_and_grad(lambda p: remat(f)(p, {"scale": 3, "name": "a"}, ()).product.sum())(
        p
    )[1]
    close(gradient.w, torch.tensor([3.0, 3.0, 0.0, 0.0], dtype=F64)[:, None].expand(4, 4).clone())
    assert gradient.rest["steps"] == ()


def test_remat_of_a_function_without_gradient():
    same_bits(remat(lambda i: i + 1)(torch.arange(3)), torch.arange(1, 4))
    close(
        grad(lambda x: (remat(lambda x, i: x[i].detach())(x, torch.arange(2)) * x[0]).sum())(
            normal(3)
        )[1:],
        torch.zeros(2, dtype=F64),
    )


def test_a_kept_graph_may_be_run_twice():
    x = normal(3).requires_grad_()
    y = remat(lambda x: (x**3).sum())(x)
    y.backward(retain_graph=True)
    y.backward()
    close(x.grad, 6 * x.detach() ** 2)


def on_another_thread(f: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(f())
        except BaseException as e:
            results.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


@pytest.fixture
def tripling() -> Any:
    """An op whose second implementation is visibly another function."""
    op = Op("autodiff_double", lambda x: 2 * x)
    op.register(Implementation("triple", ("cpu",), lambda x: 3 * x, lambda x: ""))
    yield op
    del OPS["autodiff_double"]


@pytest.mark.parametrize("wrap", [remat, lambda f: remat(remat(f))], ids=["remat", "nested"])
@pytest.mark.parametrize(
    "backward_on", [lambda f: f(), on_another_thread], ids=["same thread", "another thread"]
)
def test_a_replay_uses_the_implementation_of_its_forward(tripling: Op, wrap: Any, backward_on: Any):
    x = normal(3)
    f = wrap(lambda x: tripling(x).pow(2).sum())
    with use_impl(autodiff_double="reference"), record_impls() as ran:
        value, pull = autodiff.vjp(f, x)
    with use_impl(autodiff_double="triple"):  # not what the forward ran under
        (gradient,) = backward_on(lambda: pull(torch.ones_like(value)))
    close(gradient, 8 * x)
    assert set(ran) == {("autodiff_double", "reference")}
    assert ran["autodiff_double", "reference"] >= 2  # the replay counts


def test_an_implementation_chosen_around_plain_autograd_is_replayed(tripling: Op):
    x = normal(3).requires_grad_()
    with use_impl(autodiff_double="reference"):
        y = remat(lambda x: tripling(x).pow(2).sum())(x)
    on_another_thread(y.backward)
    close(x.grad, 8 * x.detach())


def test_a_replay_runs_in_the_context_of_its_forward():
    scale: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
    token = scale.set(5.0)
    value, pull = autodiff.vjp(remat(lambda x: (scale.get() * x**2).sum()), normal(3))
    scale.reset(token)
    x = on_another_thread(lambda: pull(torch.ones_like(value)))[0]
    assert torch.equal(x, autodiff.vjp(lambda y: 5 * y, x)[0] / 5)
    assert float(value) > 0


@pytest.mark.parametrize(
    "backward_on", [lambda f: f(), on_another_thread], ids=["same thread", "another thread"]
)
@pytest.mark.parametrize("forward_in", [True, False], ids=["autocast", "no autocast"])
def test_a_replay_runs_under_the_autocast_of_its_forward(forward_in: bool, backward_on: Any):
    w, x = torch.randn(8, 8), torch.randn(8, 8)

    def f(w: Tensor, x: Tensor) -> Tensor:
        return (torch.tanh(x @ w) @ w).to(torch.float32).sum()

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward_in):
        value, plain = autodiff.vjp(f, w, x)
        _, recomputed = autodiff.vjp(remat(f), w, x)
    one = torch.ones_like(value)
    expected = plain(one)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not forward_in):
        same_bits(backward_on(lambda: recomputed(one)), expected)


def counted(residuals: str = "input") -> tuple[list[int], Callable[..., Any]]:
    """A kept exponential, and the list that grows by one with each run of its kernel."""
    runs: list[int] = []

    def fwd(x: Tensor, scale: float) -> Any:
        runs.append(1)
        y = (scale * x).exp()
        return y, (x, y, scale) if residuals == "both" else (x, scale)

    def bwd(*parts: Any) -> Any:
        static, res, ct = parts
        y = res[1] if residuals == "both" else (static * res[0]).exp()
        return (ct * static * y,)

    return runs, keep("exp", custom_vjp(fwd, bwd, nondiff_argnums=(1,), name="exp"))


@pytest.mark.parametrize("residuals", ["input", "both"])
@pytest.mark.parametrize("save", [(), ("exp",)])
@pytest.mark.parametrize("transform", ["value_and_grad", "grad", "vmap"])
def test_saved_ops_are_not_run_again(residuals: str, save: tuple[str, ...], transform: str):
    runs, exp = counted(residuals)
    f = remat(lambda w, x: exp(torch.tanh(w @ x), 0.5).pow(2).sum(), keep=save)
    reference = lambda w, x: (0.5 * torch.tanh(w @ x)).exp().pow(2).sum()  # noqa: E731
    w, x = normal(3, 3), normal(2, 3)
    if transform == "vmap":
        close(vmap(grad(f), (None, 0))(w, x), vmap(grad(reference), (None, 0))(w, x))
    else:
        by = value_and_grad if transform == "value_and_grad" else their_value_and_grad
        close(by(f)(w, x[0])[1], grad(reference)(w, x[0]))
    assert len(runs) == (1 if save else 2)


def test_in_nested_remats_the_innermost_says_what_is_saved():
    x = normal(3)
    for inner, outer, expected in ((("exp",), ("exp",), 2), ((), ("exp",), 3), (("exp",), (), 2)):
        runs, exp = counted()
        f = remat(
            lambda x, exp=exp, inner=inner: remat(lambda x: exp(x, 1.0).sum(), keep=inner)(x),
            keep=outer,
        )
        close(value_and_grad(f)(x)[1], x.exp())
        assert len(runs) == expected


def test_a_second_derivative_through_kept_residuals_is_right_or_refused():
    x = normal(3)
    for residuals in ("input", "both"):
        _, exp = counted(residuals)
        with pytest.raises(
            RuntimeError, match="second derivative needs the gradient of a residual"
        ):
            hessian(remat(lambda x, exp=exp: exp(2 * x, 1.0).sum(), keep=("exp",)))(x)
    _, exp = counted()
    close(hessian(remat(lambda x: exp(2 * x, 1.0).sum()))(x), torch.diag(4 * (2 * x).exp()))


def test_keep_needs_a_differentiable_first_argument():
    rule = custom_vjp(lambda x: (x, ()), lambda res, ct: (ct,), nondiff_argnums=(0,))
    with pytest.raises(ValueError, match="keep 'op': the first argument"):
        keep("op", rule)
