"""Plain torch forms of a step of AdamW: one that is differentiable, and one in place by slices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from k31fn import precision
from k31fn.kernels.philox import stochastic_round
from k31fn.kernels.philox.reference import Draws
from k31fn.typing import Bool, Float, Tensor

__all__ = ["Constants", "Moved", "adamw_step", "in_slices", "rates", "stepped"]

Moved = tuple[Tensor, Tensor, Tensor]
"""A parameter, mu and nu."""


class Constants(NamedTuple):
    """Numbers of AdamW that no step changes; ``decay`` is the weight decay of this leaf."""

    beta1: float
    beta2: float
    eps: float
    decay: float


def rates(
    lr: float | Tensor, decay: float, dtype: torch.dtype
) -> tuple[float | Tensor, float | Tensor]:
    """``(1 - lr decay, lr)`` as factors of a tensor of that dtype.

    Each is rounded to it once, as a Python number is that meets such a tensor: a float64 scalar
    gives the bits of the float.
    """
    if not isinstance(lr, Tensor):
        return 1 - lr * decay, lr
    return (1 - lr * decay).to(dtype), lr.to(dtype)


def stepped(
    p: Float[Tensor, "*shape"],
    g: Float[Tensor, "*shape"],
    mu: Float[Tensor, "*shape"],
    nu: Float[Tensor, "*shape"],
    step: Float[Tensor, ""],
    lr: float | Tensor,
    constants: Constants,
) -> Moved:
    """New parameter, mu and nu, all of one wide dtype, from plain differentiable operations."""
    beta1, beta2, eps, decay = constants
    t = step.to(p.dtype)
    # 1 - beta^t, which as it stands would lose half the digits at t = 1.
    correction1 = -torch.expm1(t * math.log(beta1)) if beta1 else 1.0
    correction2 = -torch.expm1(t * math.log(beta2)) if beta2 else 1.0
    mu = torch.lerp(mu, g, 1 - beta1)
    nu = beta2 * nu + (1 - beta2) * g * g
    v = nu / correction2
    # sqrt has no derivative at 0: the root of 1 is taken there and put out, with its derivative.
    root = torch.where(v > 0, v, 1).sqrt() * (v > 0)
    shrunk, rate = rates(lr, decay, p.dtype)
    return shrunk * p - (rate / correction1) * mu / (root + eps), mu, nu


def adamw_step(
    p: Float[Tensor, "*shape"],
    g: Float[Tensor, "*shape"],
    mu: Float[Tensor, "*shape"],
    nu: Float[Tensor, "*shape"],
    step: Float[Tensor, ""],
    lr: float | Tensor,
    constants: Constants,
    scale: Float[Tensor, ""] | None = None,
    skip: Bool[Tensor, ""] | None = None,
    draws: Draws | None = None,
) -> Moved:
    """The step in place.

    Args:
        p: the parameter.
        g: its gradient.
        mu: running mean of the gradients.
        nu: running mean of their squares.
        step: number of this step, from 1.
        lr: learning rate.
        constants: all other numbers.
        scale: factor of the gradient; None: 1.
        skip: true: nothing changes.
        draws: for the rounding of a bfloat16 parameter.

    Raises:
        ValueError: a bfloat16 parameter without ``draws``.
    """

    def rule(g: Tensor, *old: Tensor) -> None:
        p, mu, nu = old
        for before, after in zip(old, stepped(p, g, mu, nu, step, lr, constants), strict=True):
            before.copy_(after if skip is None else torch.where(skip, before, after))

    return in_slices(rule, (p, mu, nu), g, scale, draws)


@torch.no_grad()
def in_slices(
    rule: Callable[..., None], old: Moved, g: Tensor, scale: Tensor | None, draws: Draws | None
) -> Moved:
    """``rule(g, p, mu, nu)`` on wide contiguous slices, in which it writes; they are put back.

    Raises:
        ValueError: a parameter that is narrow without ``draws``.
    """
    p = old[0]
    wide = precision.island(p.dtype)
    if p.dtype != wide and draws is None:
        raise ValueError(
            f"adamw_step: p is {p.dtype} and has no draws: rounding to nearest would lose small "
            "steps; step a float32 copy, or give draws"
        )
    for index in precision.slices(p.shape):
        stored = [x[index] for x in old]
        held = [x.to(wide).contiguous() for x in stored]
        gradient = g[index].to(wide)
        if scale is not None:
            gradient = gradient * scale.to(wide)
        rule(gradient.contiguous(), *held)
        if p.dtype != wide and draws is not None:
            held[0] = stochastic_round(held[0], draws.at(index))
        for x, y in zip(stored, held, strict=True):
            # a slice that was wide and contiguous was stepped where it lies
            if y is not x:
                x.copy_(y)
        if p.is_meta:
            break  # the memory of one slice is that of all, and there is nothing to compute
    return old
