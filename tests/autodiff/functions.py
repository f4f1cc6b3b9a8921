"""Functions and comparisons that the tests of autodiff share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value

from k31fn import autodiff, tree
from k31fn.autodiff import custom_vjp
from k31fn.testing import assert_close_trees

F64 = torch.float64
value_and_grad = autodiff.value_and_grad


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


def same_bits(actual: Any, expected: Any) -> None:
    assert_close_trees(actual, expected, rtol=0, atol=0)


def close(actual: Any, expected: Any) -> None:
    """Another order of summation in float64."""
    assert_close_trees(actual, expected, rtol=1e-11, atol=1e-13)


@tree.dataclass
class Params:
    w: Tensor
    rest: dict[str, Any]


def params() -> Params:
    return Params(normal(4, 4), {"b": normal(4), "steps": torch.arange(2), "none": ()})


def energy(p: Params, x: Tensor) -> Tensor:
    return torch.tanh(p.w @ x + p.rest["b"]).pow(3).sum()


def exponential(keep: str) -> Any:
    """exp with a residual that is its input, its output, or neither."""

    def fwd(x: Tensor) -> Any:
        y = x.exp()
        return y, {"input": x, "output": y, "neither": y.clone()}[keep]

    return custom_vjp(
        fwd, lambda res, ct: ((res.exp() if keep == "input" else res) * ct,), name="exponential"
    )


fused = custom_vjp(
    lambda w, x: (w @ x, (w, x)),
    lambda res, ct: (torch.outer(ct, res[1]), res[0].T @ ct),
    name="fused",
    opaque=True,
)


def their_value_and_grad(f: Callable[..., Any], argnums: Any = 0) -> Callable[..., Any]:
    return lambda *a: grad_and_value(f, argnums)(*a)[::-1]


def deep(f: Callable[..., Any]) -> Callable[..., Tensor]:
    """A net of ``f(w, x)`` layers."""

    def net(ws: list[Tensor], x: Tensor) -> Tensor:
        for w in ws:
            x = f(w, x)
        return x.square().sum()

    return net


def block(w: Tensor, x: Tensor) -> Tensor:
    return x + torch.tanh(torch.sin(x @ w)) @ w.T


class Pair(NamedTuple):
    product: Tensor
    parts: dict[str, Tensor]


def flat(f: Callable[..., Any], p: Params) -> Callable[..., Any]:
    """``f`` of the two floating leaves of ``p``, which torch.func can differentiate."""
    return lambda w, b, x: f(Params(w, {**p.rest, "b": b}), x)
