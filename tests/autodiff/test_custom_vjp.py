from __future__ import annotations

import doctest
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vjp, vmap

from k31fn import autodiff
from k31fn.autodiff import custom_vjp, hessian, remat, stop_gradient
from k31fn.testing import check_grads, live_bytes
from tests.autodiff.functions import (
    F64,
    Pair,
    Params,
    close,
    exponential,
    flat,
    fused,
    normal,
    params,
    same_bits,
    value_and_grad,
)


def product(p: Params, x: Tensor, power: int, name: str) -> Pair:
    y = p.w @ x
    return Pair(y**power, {name: y.sum() * p.rest["b"]})


def _product_fwd(p: Params, x: Tensor, power: int, name: str) -> tuple[Pair, Any]:
    return product(p, x, power, name), {"p": p, "x": x}


def _product_bwd(power: int, name: str, res: dict[str, Any], ct: Pair) -> tuple[Any, Any]:
    p, x = res["p"], res["x"]
    y = p.w @ x
    dy = ct.product * power * y ** (power - 1) + (ct.parts[name] * p.rest["b"]).sum()
    db = ct.parts[name] * y.sum()
    return Params(torch.outer(dy, x), {"b": db, "steps": None, "none": ()}), p.w.T @ dy


ruled = custom_vjp(_product_fwd, _product_bwd, nondiff_argnums=(3, 2), name="product")


def reduce(pair: Pair) -> Tensor:
    return (pair.product * torch.arange(1, 5)).sum() + pair.parts["s"].pow(2).sum()


def by_rule(p: Params, x: Tensor) -> Tensor:
    return reduce(ruled(p, x, 3, "s"))


def by_torch(p: Params, x: Tensor) -> Tensor:
    return reduce(product(p, x, 3, "s"))


def test_custom_vjp_gives_the_value_and_its_structure():
    p, x = params(), normal(4)
    same_bits(ruled(p, x, 3, "s"), product(p, x, 3, "s"))
    assert isinstance(ruled(p, x, 3, "s"), Pair)


@pytest.mark.parametrize("argnum", [0, 1, 2])
def test_custom_vjp_under_every_reverse_transform(argnum: int):
    p, x = params(), normal(4)
    args = (p.w, p.rest["b"], x)
    ours, theirs = flat(by_rule, p), flat(by_torch, p)
    close(grad(ours, argnum)(*args), grad(theirs, argnum)(*args))
    close(value_and_grad(ours, argnum)(*args), (theirs(*args), grad(theirs, argnum)(*args)))
    close(
        vjp(ours, *args)[1](torch.tensor(2.0, dtype=F64)),
        vjp(theirs, *args)[1](torch.tensor(2.0, dtype=F64)),
    )
    close(hessian(ours, argnum)(*args), jacrev(jacrev(theirs, argnum), argnum)(*args))
    close(
        jacrev(hessian(ours, argnum), argnum)(*args),
        jacrev(jacrev(jacrev(theirs, argnum), argnum), argnum)(*args),
    )
    rows, expected = (flat(lambda *a, f=f: f(*a, 3, "s").product, p) for f in (ruled, product))
    close(jacrev(rows, argnum)(*args), jacrev(expected, argnum)(*args))
    inputs = [a.clone().requires_grad_() for a in args]
    ours(*inputs).backward()
    close(inputs[argnum].grad, grad(theirs, argnum)(*args))


@pytest.mark.parametrize("in_dims", list(itertools.product((None, 0), repeat=3))[1:], ids=str)
def test_custom_vjp_under_vmap_of_grad(in_dims: tuple[int | None, ...]):
    """Also the gradient of what is not batched, which comes back per sample; and grad of vmap."""
    p, x = params(), normal(4)
    args = [
        a if d is None else torch.stack([a, 0.5 * a, a.flip(0)])
        for a, d in zip((p.w, p.rest["b"], x), in_dims, strict=True)
    ]
    every = (0, 1, 2)
    close(
        vmap(grad(flat(by_rule, p), every), in_dims)(*args),
        vmap(grad(flat(by_torch, p), every), in_dims)(*args),
    )
    total = lambda f: lambda *a: vmap(flat(f, p), in_dims)(*a).sum()  # noqa: E731
    close(grad(total(by_rule), every)(*args), grad(total(by_torch), every)(*args))
    close(value_and_grad(total(by_rule), every)(*args)[1], grad(total(by_torch), every)(*args))


@pytest.mark.parametrize("wrap", [lambda f: f, remat], ids=["rule", "remat of the rule"])
def test_an_unbatched_output_beside_a_batched_one_is_not_counted_per_sample(
    wrap: Callable[..., Any],
):
    """torch's own generated rule would: grad over vmap gives 3 * 3 * 2 for the first part (torch
    2.11, 2.13).
    """
    rule = wrap(
        custom_vjp(
            lambda w, x: ((2 * w, w * x), (w, x)),
            lambda res, ct: (2 * ct[0] + ct[1] * res[1], ct[1] * res[0]),
        )
    )
    w, xs = normal(4), normal(3, 4)

    def total(w: Tensor) -> Tensor:
        parts = vmap(lambda x: sum(rule(w, x)))(xs)
        return parts.sum()

    for gradient in (grad(total)(w), value_and_grad(total)(w)[1]):
        close(gradient, 3 * 2 + xs.sum(0))


def test_custom_vjp_gradients_by_finite_differences():
    check_grads(lambda p, x: ruled(p, x, 3, "s"), (params(), normal(4)), order=2)


def test_static_arguments_reach_both_rules_by_position():
    seen: list[Any] = []

    def bwd(*parts: Any) -> tuple[Any]:
        seen.append(parts[:-2])
        return (parts[-1],)

    rule = custom_vjp(
        lambda a, x, b: (seen.append((a, b)), (x * 1, ()))[1], bwd, nondiff_argnums=(2, 0)
    )
    value_and_grad(lambda x: rule("a", x, "b").sum())(normal(2))
    assert seen == [("a", "b"), ("a", "b")]


def test_python_leaves_and_integer_leaves_pass_through():
    rule = custom_vjp(
        lambda a: ((a["x"] * a["k"], a["i"] + 1), a),
        lambda r, ct: ({"i": None, "k": None, "x": ct[0] * r["k"]},),
    )
    i = torch.arange(3)
    out, pull = autodiff.vjp(lambda x: rule({"x": x, "k": 2.5, "i": i}), normal(3))
    assert torch.equal(out[1], i + 1)
    same_bits(
        pull((torch.ones(3, dtype=F64), torch.zeros_like(i))), (torch.full((3,), 2.5, dtype=F64),)
    )


def test_more_than_a_hundred_leaves():
    names = [f"k{i}" for i in range(150)]
    tensors = {n: normal(2) for n in names}
    rule = custom_vjp(
        lambda a: ({n: v**2 for n, v in a.items()}, a),
        lambda r, ct: ({n: 2 * r[n] * ct[n] for n in r},),
    )
    for f in (rule, remat(rule)):
        gradient = grad(lambda a, f=f: sum(v.sum() for v in f(a).values()))(tensors)
        close(gradient, {n: 2 * v for n, v in tensors.items()})


@pytest.mark.parametrize("keep", ["input", "output", "neither"])
def test_residuals_alias_inputs_and_outputs(keep: str):
    x = normal(250)
    with live_bytes() as live:
        _, pull = autodiff.vjp(exponential(keep), x)
        held = live.current // 2000
        (gradient,) = pull(torch.ones(250, dtype=F64))
    assert held == (2 if keep == "neither" else 1)  # the value itself is one
    close(gradient, x.exp())


@pytest.mark.parametrize("place", ["residual", "output"])
def test_a_constant_that_a_rule_captured_stays_one(place: str):
    constant = torch.ones(3, dtype=F64)

    def fwd(x: Tensor) -> tuple[Any, Any]:
        return (x * constant, constant) if place == "output" else (x * constant, x), (x, constant)

    rule = custom_vjp(fwd, lambda res, ct: (ct[0] * res[1],), name="captures")
    x = torch.randn(3, dtype=F64, requires_grad=True)
    assert rule(x)[0].requires_grad
    assert not constant.requires_grad
    assert constant.grad_fn is None


@pytest.mark.parametrize(
    "by", [lambda f: hessian(f), lambda f: value_and_grad(lambda x: value_and_grad(f)(x)[1].sum())]
)
def test_second_derivatives_flow_through_inputs_and_outputs_only(by: Callable[..., Any]):
    x = normal(3)
    for keep in ("input", "output"):
        f = exponential(keep)
        close(hessian(lambda x, f=f: f(x).sum())(x), torch.diag(x.exp()))
    with pytest.raises(
        RuntimeError, match="exponential: a second derivative needs the gradient of a residual"
    ):
        by(lambda x: exponential("neither")(x).sum())(x)


def test_an_output_may_be_an_input_and_may_appear_twice():
    same = custom_vjp(lambda x: ((x, x, x[1:]), ()), lambda res, ct: (ct[0] + ct[1],))
    squared = remat(lambda x: (lambda y: (y, y))(x * x))
    x = normal(3)
    for transform in (grad, lambda f: lambda x: value_and_grad(f)(x)[1]):
        close(
            transform(lambda x: (2 * same(x)[0] + 3 * same(x)[1]).sum())(x),
            torch.full((3,), 5.0, dtype=F64),
        )
        close(transform(lambda x: (squared(x)[0] + 2 * squared(x)[1]).sum())(x), 6 * x)


@pytest.mark.parametrize(
    ("bwd", "message"),
    [
        (lambda res, ct: ct, "bwd must return a tuple of 2 gradients"),
        (lambda res, ct: (ct,), "bwd must return a tuple of 2 gradients"),
        (lambda res, ct: (ct, ct), r"gradient of shape \(3,\) for an input of shape \(2,\)"),
        (lambda res, ct: ((ct, ct), None), "returned 2 gradient leaves for an argument with 1"),
    ],
)
def test_a_wrong_backward_is_named(bwd: Callable[..., Any], message: str):
    rule = custom_vjp(lambda x, y: (x * 1, ()), bwd, name="mine")
    with pytest.raises(ValueError, match=f"mine: .*{message}"):
        value_and_grad(lambda x, y: rule(x, y).sum(), (0, 1))(normal(3), normal(2))


def test_the_documented_example_runs():
    names = {"custom_vjp": custom_vjp, "torch": torch}
    (example,) = doctest.DocTestFinder(recurse=False).find(custom_vjp, "custom_vjp", globs=names)
    assert doctest.DocTestRunner().run(example) == (0, 7)


def test_outputs_are_tensors():
    with pytest.raises(ValueError, match="exp: its output has the leaf 3"):
        custom_vjp(lambda x: ((x, 3), ()), lambda res, ct: ct, name="exp")(normal(2))


def plain_second_order(f: Callable[..., Tensor]) -> Callable[..., Any]:
    def second(w: Tensor, x: Tensor) -> None:
        w = w.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(w, x), w, create_graph=True)
        first.sum().backward()

    return second


SECOND_ORDER = {
    "hessian": hessian,
    "jacrev of grad": lambda f: jacrev(grad(f)),
    "nested value_and_grad": lambda f: value_and_grad(
        lambda w, x: value_and_grad(f)(w, x)[1].sum()
    ),
    "plain autograd": plain_second_order,
    "value_and_grad of grad": lambda f: value_and_grad(lambda w, x: grad(f)(w, x).sum()),
    "grad of value_and_grad": lambda f: grad(lambda w, x: value_and_grad(f)(w, x)[1].sum()),
}


@pytest.mark.parametrize("by", SECOND_ORDER)
@pytest.mark.parametrize(
    "wrap", [lambda f: f, remat, lambda f: remat(remat(f))], ids=["plain", "remat", "nested"]
)
def test_an_opaque_rule_raises_at_second_order(by: str, wrap: Callable[..., Any]):
    f = wrap(lambda w, x: fused(w, x).pow(2).sum())
    with pytest.raises(RuntimeError, match=r"fused is first order only.*reference implementation"):
        SECOND_ORDER[by](f)(normal(4, 4), normal(4))


@pytest.mark.parametrize(
    "wrap", [lambda f: f, remat, lambda f: remat(remat(f))], ids=["plain", "remat", "nested"]
)
def test_an_opaque_rule_at_first_order_gives_no_false_alarm(wrap: Callable[..., Any]):
    f = wrap(lambda w, x: fused(w, x).pow(2).sum())
    w, x = normal(4, 4), normal(4)
    expected = grad(lambda w, x: (w @ x).pow(2).sum(), (0, 1))(w, x)
    close(grad(f, (0, 1))(w, x), expected)
    close(value_and_grad(f, (0, 1))(w, x)[1], expected)
    close(jacrev(f, (0, 1))(w, x), expected)
    samples = torch.stack([x, 2 * x, -x])
    close(
        vmap(grad(f, (0, 1)), (None, 0))(w, samples),
        tuple(
            torch.stack(g)
            for g in zip(
                *[grad(lambda w, x: (w @ x).pow(2).sum(), (0, 1))(w, s) for s in samples],
                strict=True,
            )
        ),
    )
    w_plain = w.clone().requires_grad_()
    torch.autograd.grad(f(w_plain, x), w_plain, create_graph=True)


def test_a_second_derivative_that_does_not_pass_through_the_opaque_rule_is_allowed():
    w, x = normal(4, 4), normal(4)
    close(
        hessian(lambda x: x.pow(3).sum() + fused(w, stop_gradient(x)).sum())(x), torch.diag(6 * x)
    )


def test_an_opaque_rule_may_give_no_gradient_and_integers():
    rule = custom_vjp(
        lambda a, b: ((a * b, a.argmax()), (b,)),
        lambda r, ct: (ct[0] * r[0], None),
        opaque=True,
        name="mul",
    )
    a, b = normal(2, 3), normal(3)
    close(vmap(grad(lambda a: rule(a, b)[0].sum()))(a), b.expand(2, 3).clone())
    close(grad(lambda b: rule(a[0], b)[0].sum())(b), torch.zeros(3, dtype=F64))


def noting(seen: list[Any]) -> Callable[..., Any]:
    """``w["a"] x + w["b"] + n`` by a rule that notes what it was asked for and gives nothing
    else.
    """

    def bwd(needs: Any, res: Any, ct: Tensor) -> Any:
        w, x = res
        seen.append(needs)
        d_w = {"a": ct * x if needs[0]["a"] else None, "b": ct * 1 if needs[0]["b"] else None}
        return d_w, ct * w["a"] if needs[1] else None, None

    def fwd(w: Any, x: Tensor, n: Tensor) -> Any:
        return w["a"] * x + w["b"] + n, (w, x)

    return custom_vjp(fwd, bwd, needs=True, name="noting")


BY_SUBSET = {
    "grad": lambda f, x: grad(f)(x),
    "vjp": lambda f, x: vjp(f, x)[1](torch.tensor(1.0, dtype=F64))[0],
    "jacrev": lambda f, x: jacrev(f)(x),
    "value_and_grad": lambda f, x: value_and_grad(f)(x)[1],
    "vmap of grad": lambda f, x: vmap(grad(f))(torch.stack([x, x]))[1],
    "plain autograd": lambda f, x: torch.autograd.grad(f(leaf := x.clone().requires_grad_()), leaf)[
        0
    ],
    "second order": lambda f, x: grad(lambda x: (grad(f)(x) * x).sum())(x),
}


@pytest.mark.parametrize("by", BY_SUBSET)
@pytest.mark.parametrize(
    "wrap", [lambda f: f, remat, lambda f: remat(remat(f))], ids=["plain", "remat", "nested"]
)
def test_a_rule_learns_whose_gradients_are_used(by: str, wrap: Callable[..., Any]):
    seen: list[Any] = []
    f = wrap(noting(seen))
    a, b, x, n = normal(3), normal(3), normal(3), torch.tensor([1, 2, 3])
    close(BY_SUBSET[by](lambda x: f({"a": a, "b": b}, x, n).sum(), x), a)
    first = seen.copy()
    seen.clear()
    close(BY_SUBSET[by](lambda b: f({"a": a, "b": b}, x, n).sum(), b), torch.ones(3, dtype=F64))
    assert first
    assert all(needs == ({"a": False, "b": False}, True, False) for needs in first)
    assert seen
    assert all(needs == ({"a": False, "b": True}, False, False) for needs in seen)


def test_what_a_rule_gives_unasked_is_dropped():
    rule = custom_vjp(lambda a, b: (a * b, (a, b)), lambda r, ct: (ct * r[1], ct[:1]), name="mul")
    a, b = normal(3), normal(3)
    close(grad(lambda a: rule(a, b).sum())(a), b)
    with pytest.raises(
        ValueError, match=r"bwd returned a gradient of shape \(1,\) for an input of shape \(3,\)"
    ):
        grad(lambda b: rule(a, b).sum())(b)
