"""AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from k31fn import tree
from k31fn.optim import _fused
from k31fn.optim.transform import Leaves, Transform, Where
from k31fn.typing import Bool, Float, Tensor

__all__ = ["AdamWState", "adamw"]


@tree.dataclass
class AdamWState:
    """Everything that AdamW remembers.

    Attributes:
        step: float32, steps taken; a skipped one is not.
        mu: running mean of the gradients, like the parameters; at least float32.
        nu: running mean of their squares.
        master: float32 copies of the parameters that are narrower.
    """

    step: Float[Tensor, ""]
    mu: Any
    nu: Any
    master: Any


def adamw(
    specs: Any,
    *,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    where: Where | None = None,
) -> Transform:
    """AdamW on the leaves for which ``where(path, spec)`` holds (None: all) and that are not ``frozen``.

    With bias corrections ``m = mu / (1 - beta1^t)``, ``v = nu / (1 - beta2^t)``::

        p <- (1 - lr weight_decay) p - lr m / (sqrt(v) + eps)

    without the decay on leaves tagged ``no_decay``. torch's fused kernel takes the step where there is one for the
    device; the numbers are those of ``torch.optim.AdamW``.

    Differentiable with ``donate=False``; where a gradient was zero in every step, sqrt(v) has the derivative 0.

    Raises:
        ValueError: a number out of its range.
    """
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must be in [0, 1)")
    if not (eps > 0 and weight_decay >= 0):
        raise ValueError(f"eps={eps} must be positive, weight_decay={weight_decay} not negative")
    leaves = Leaves(specs, where)
    decays = [0.0 if "no_decay" in spec.tags else weight_decay for spec in leaves.specs]

    def init(params: Any) -> AdamWState:
        masters = leaves.masters(params, kept := leaves.init_masters(params))
        device = masters[0].device if masters else None
        mu, nu = (leaves.to_tree([torch.zeros_like(m) for m in masters]) for _ in range(2))
        return AdamWState(torch.zeros((), dtype=torch.float32, device=device), mu, nu, kept)

    def update(
        grads: Any,
        state: AdamWState,
        params: Any,
        *,
        lr: float | Tensor,
        skip: Bool[Tensor, ""] | None = None,
        donate: bool = True,
    ) -> tuple[Any, AdamWState]:
        masters = leaves.masters(params, state.master)
        numbers = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
        gradients = [g.to(m.dtype) for g, m in zip(leaves.of_grads(grads), masters, strict=True)]
        rows = list(zip(masters, gradients, tree.leaves(state.mu), tree.leaves(state.nu), decays, strict=True))
        if donate:
            with torch.no_grad():
                _step_in_place(rows, state.step, numbers, skip)
                params, kept = leaves.with_masters(params, masters, donate=True)
            return params, AdamWState(state.step, state.mu, state.nu, kept)
        step = state.step + 1
        new = [_keep(skip, _step(*row, step, **numbers), (row[0], row[2], row[3])) for row in rows]
        params, kept = leaves.with_masters(params, [n[0] for n in new], donate=False)
        mu, nu = (leaves.to_tree([n[i] for n in new]) for i in (1, 2))
        return params, AdamWState(_keep(skip, (step,), (state.step,))[0], mu, nu, kept)

    return Transform(init, update, frozenset(leaves.paths))


_Row = tuple[Tensor, Tensor, Tensor, Tensor, float]  # parameter, gradient, mu, nu, weight decay


def _step(
    p: Tensor,
    g: Tensor,
    mu: Tensor,
    nu: Tensor,
    decay: float,
    step: Tensor,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """New parameter, mu and nu, from plain operations."""
    t = step.to(p.dtype)
    correction1 = -torch.expm1(t * math.log(beta1)) if beta1 else 1.0  # 1 - beta^t would lose half the digits at t = 1
    correction2 = -torch.expm1(t * math.log(beta2)) if beta2 else 1.0
    mu = torch.lerp(mu, g, 1 - beta1)
    nu = beta2 * nu + (1 - beta2) * g * g
    v = nu / correction2
    root = torch.where(v > 0, v, 1).sqrt() * (v > 0)  # sqrt has no derivative at 0
    return (1 - lr * decay) * p - (lr / correction1) * mu / (root + eps), mu, nu


def _step_in_place(rows: Sequence[_Row], step: Tensor, numbers: dict[str, Any], skip: Tensor | None) -> None:
    """The same in place, fused where the device has the kernel, one call for all leaves of a kind."""
    taken = torch.ones_like(step) if skip is None else (~skip).to(step.dtype)
    number = step + 1
    kinds: dict[Any, list[_Row]] = {}
    for p, g, mu, nu, decay in rows:
        if _fused.supports(p) and mu.is_contiguous() and nu.is_contiguous():
            kinds.setdefault((p.device, p.dtype, decay), []).append((p, g.contiguous(), mu, nu, decay))
            continue
        old = (p, mu, nu)
        for tensor, new in zip(old, _keep(skip, _step(p, g, mu, nu, decay, number, **numbers), old), strict=True):
            tensor.copy_(new)
    found = None if skip is None else skip.to(torch.float32)
    for (_, _, decay), group in kinds.items():
        p, g, mu, nu, _ = zip(*group, strict=True)
        _fused.adamw_(p, g, mu, nu, number, weight_decay=decay, skip=found, **numbers)
    step.add_(taken)


def _keep(skip: Tensor | None, new: tuple[Tensor, ...], old: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if skip is None:
        return new
    return tuple(torch.where(skip, o, n) for n, o in zip(new, old, strict=True))
