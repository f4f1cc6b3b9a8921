"""Choices that a replay must not make twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from k31fn.autodiff import custom_vjp, decision, hessian, record_decisions, remat, replay_decisions
from tests.autodiff.functions import (
    F64,
    close,
    normal,
    same_bits,
    their_value_and_grad,
    value_and_grad,
)

TIED = torch.tensor([1.0, 3.0, 3.0], dtype=F64)


@pytest.mark.parametrize(
    "wrap",
    [remat, lambda f: remat(remat(f)), lambda f: remat(lambda *a: remat(f)(*a) * 1)],
    ids=["remat", "nested", "around"],
)
@pytest.mark.parametrize("by", ["value_and_grad", "grad", "plain"])
def test_ties_are_decided_once(wrap: Callable[..., Any], by: str):
    """D26: the gradient must belong to the route that the forward took."""
    calls: list[int] = []
    values = normal(3)
    f = wrap(lambda x, v: v[decision("route", lambda s: chooser(s), x)] ** 2)

    def chooser(scores: Tensor) -> Tensor:
        calls.append(1)
        return torch.tensor(1 if len(calls) % 2 else 2)

    if by == "plain":
        leaf = values.clone().requires_grad_()
        value = f(TIED, leaf)
        value.backward()
        gradient = leaf.grad
    else:
        value, gradient = (value_and_grad if by == "value_and_grad" else their_value_and_grad)(
            f, 1
        )(TIED, values)
    assert len(calls) == 1
    same_bits(value.detach(), values[1] ** 2)
    same_bits(gradient, 2 * values * torch.tensor([0.0, 1.0, 0.0]))


def test_without_a_decision_the_replay_takes_another_route():
    """What decision() is for: the same function with the choice made in the open."""
    calls: list[int] = []

    def f(v: Tensor) -> Tensor:
        calls.append(1)
        return v[1 if len(calls) % 2 else 2] ** 2

    values = normal(3)
    _, gradient = value_and_grad(remat(f))(values)
    assert float(gradient[1]) == 0.0
    assert float(gradient[2]) != 0.0


def test_a_deterministic_replay_counts_tokens_once():
    """D23: the counter is a result of the function, so recomputing does not add to it."""

    def f(scores: Tensor) -> tuple[Tensor, Tensor]:
        chosen = decision("top", lambda s: s.topk(2).indices, scores)
        return scores.gather(-1, chosen).sum(), torch.bincount(chosen.flatten(), minlength=5)

    scores = normal(10, 5)
    for wrapped in (f, remat(f), remat(remat(f))):
        (_, count), _ = value_and_grad(wrapped, has_aux=True)(scores)
        assert int(count.sum()) == 20


def test_decisions_under_vmap_differ_per_sample():
    f = lambda x: x.gather(0, decision("max", lambda s: s.argmax(0, keepdim=True), x)).sum() ** 2  # noqa: E731
    x = normal(4, 5)
    expected = torch.stack([grad(f)(row) for row in x])
    assert len({int(row.abs().argmax()) for row in expected}) > 1
    for wrapped in (f, remat(f), remat(remat(f))):
        close(vmap(grad(wrapped))(x), expected)
        close(grad(lambda x, g=wrapped: vmap(g)(x).sum())(x), expected)
        close(value_and_grad(lambda x, g=wrapped: vmap(g)(x).sum())(x)[1], expected)
        close(hessian(wrapped)(x[0]), hessian(f)(x[0]))


def two_choices(x: Tensor) -> Tensor:
    return x[decision("max", lambda s: s.argmax(), x)] * x[decision("min", lambda s: s.argmin(), x)]


@pytest.mark.parametrize(
    "wrap", [lambda f: f, remat, lambda f: remat(remat(f))], ids=["plain", "remat", "nested"]
)
def test_recorded_decisions_are_replayed_at_another_point(wrap: Callable[..., Any]):
    x, other = torch.tensor([1.0, 5.0, -2.0]), torch.tensor([4.0, 3.0, 2.0])
    f = wrap(two_choices)
    with record_decisions() as made:
        assert float(f(x)) == -10.0
    with replay_decisions(made):
        assert float(f(other)) == 3.0 * 2.0
    with replay_decisions(made):
        same_bits(grad(f)(other), torch.tensor([0.0, 2.0, 3.0]))
    assert float(f(other)) == 8.0


def test_a_replay_that_asks_for_more_raises():
    x = normal(3)
    with record_decisions() as made:
        two_choices(x)
    with (
        pytest.raises(
            RuntimeError, match="replay asks for 'max', which the forward did not record"
        ),
        replay_decisions(made),
    ):
        two_choices(two_choices(x) * x)
    flips = itertools.count()
    with pytest.raises(RuntimeError, match=r"replay asks for 'max'.*not pure"):
        value_and_grad(remat(lambda x: two_choices(x) if next(flips) else x.sum()))(x)


def test_decisions_made_where_they_cannot_be_kept_are_refused():
    x = normal(2, 3)
    with pytest.raises(RuntimeError, match=r"'max' was made under a torch.func transform inside"):
        value_and_grad(remat(lambda x: vmap(two_choices)(x).sum()))(x)
    chosen = custom_vjp(
        lambda x: (lambda i: (x[i] * 2, (x, i)))(decision("max", lambda s: s.argmax(), x)),
        lambda res, ct: (torch.where(torch.arange(3) == res[1], 2 * ct, 0.0),),
        name="chosen",
    )
    close(vmap(grad(chosen))(x).sum(-1), torch.full((2,), 2.0, dtype=F64))
    with pytest.raises(RuntimeError, match="'max' is asked for inside the forward of a custom_vjp"):
        vmap(grad(remat(lambda x: chosen(x) ** 2)))(x)
    with pytest.raises(ValueError, match=r"decision 'twice' returned torch\.float64"):
        decision("twice", lambda s: 2 * s, x)


def test_a_decision_gives_no_gradient_to_its_arguments():
    seen: list[bool] = []

    def choose(s: Tensor) -> Tensor:
        seen.append(s.requires_grad)
        return s.argmax()

    decision("max", choose, normal(3).requires_grad_())
    assert seen == [False]
