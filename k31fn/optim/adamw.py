"""AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from k31fn import tree
from k31fn.optim import _fused
from k31fn.optim.storage import Storage
from k31fn.optim.transform import Leaves, Transform, Where
from k31fn.typing import Bool, Float, Tensor

__all__ = ["AdamWState", "adamw"]


@tree.dataclass
class AdamWState:
    """Everything that AdamW remembers.

    Attributes:
        step: float32, steps taken; a skipped one is not.
        mu: running mean of the gradients, like the parameters; kept as
            :class:`~k31fn.optim.storage.Storage` says.
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
    storage: Storage = Storage(),  # noqa: B008 (frozen)
    where: Where | None = None,
) -> Transform:
    """AdamW on the leaves for which ``where(path, spec)`` holds (None: all) and that are not
    ``frozen``.

    With bias corrections ``m = mu / (1 - beta1^t)``, ``v = nu / (1 - beta2^t)``::

        p <- (1 - lr weight_decay) p - lr m / (sqrt(v) + eps)

    without the decay on leaves tagged ``no_decay``. torch's fused kernel takes the step where there
    is one for the device; the numbers are those of ``torch.optim.AdamW``.

    Differentiable with ``donate=False``; where a gradient was zero in every step, sqrt(v) has the
    derivative 0.

    Raises:
        ValueError: a number out of its range.
    """
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must be in [0, 1)")
    if not (eps > 0 and weight_decay >= 0):
        raise ValueError(f"eps={eps} must be positive, weight_decay={weight_decay} not negative")
    storage.check_decay(beta1=beta1, beta2=beta2)
    leaves = Leaves(specs, where)
    decays = [0.0 if "no_decay" in spec.tags else weight_decay for spec in leaves.specs]

    def init(params: Any) -> AdamWState:
        masters = leaves.masters(params, kept := leaves.init_masters(params))
        device = masters[0].device if masters else None
        mu, nu = (leaves.to_tree([storage.zeros(m) for m in masters]) for _ in range(2))
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
        moments: list[tuple[Any, ...]] = list(
            zip(tree.leaves(state.mu), tree.leaves(state.nu), strict=True)
        )
        step = state.step + 1
        with torch.set_grad_enabled(torch.is_grad_enabled() and not donate):
            stepped: list[Tensor] = []
            for some in _together(masters, moments):
                rows = []
                for i in some:
                    fetched = (storage.fetch(kept, masters[i]) for kept in moments[i])
                    rows.append((masters[i], gradients[i], *fetched, decays[i]))
                new = (_step_in_place if donate else _step_apart)(rows, step, numbers, skip)
                for i, (p, *fresh) in zip(some, new, strict=True):
                    stepped.append(p)
                    pairs = zip(moments[i], fresh, strict=True)
                    moments[i] = tuple(storage.store(kept, x, donate=donate) for kept, x in pairs)
            params, kept = leaves.with_masters(params, stepped, donate=donate)
            (step,) = _keep(skip, (step,), (state.step,))
            step = state.step.copy_(step) if donate else step
        storage.settle(masters[0].device if masters else None)
        mu, nu = (
            leaves.to_tree(list(x)) for x in (zip(*moments, strict=True) if moments else ((), ()))
        )
        return params, AdamWState(step, mu, nu, kept)

    return Transform(init, update, frozenset(leaves.paths))


_Row = tuple[Tensor, Tensor, Tensor, Tensor, float]  # parameter, gradient, mu, nu, weight decay
_New = tuple[Tensor, Tensor, Tensor]  # parameter, mu, nu


def _together(masters: Sequence[Tensor], moments: Sequence[tuple[Any, ...]]) -> list[list[int]]:
    """Numbers of leaves that are stepped at once, in order: all, but each alone whose moments have
    to be fetched.
    """
    groups: list[list[int]] = []
    together = False
    for i, (p, (mu, _)) in enumerate(zip(masters, moments, strict=True)):
        here = mu.dtype == p.dtype and mu.device == p.device
        if here and together:
            groups[-1].append(i)
        else:
            groups.append([i])
        together = here
    return groups


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
) -> _New:
    """New parameter, mu and nu, from plain operations."""
    t = step.to(p.dtype)
    correction1 = (
        -torch.expm1(t * math.log(beta1)) if beta1 else 1.0
    )  # 1 - beta^t would lose half the digits at t = 1
    correction2 = -torch.expm1(t * math.log(beta2)) if beta2 else 1.0
    mu = torch.lerp(mu, g, 1 - beta1)
    nu = beta2 * nu + (1 - beta2) * g * g
    v = nu / correction2
    root = torch.where(v > 0, v, 1).sqrt() * (v > 0)  # sqrt has no derivative at 0
    return (1 - lr * decay) * p - (lr / correction1) * mu / (root + eps), mu, nu


def _step_apart(
    rows: Sequence[_Row], step: Tensor, numbers: dict[str, Any], skip: Tensor | None
) -> list[_New]:
    """The step number ``step`` of these leaves; nothing is written into."""
    return [_keep(skip, _step(*row, step, **numbers), (row[0], row[2], row[3])) for row in rows]


def _step_in_place(
    rows: Sequence[_Row], step: Tensor, numbers: dict[str, Any], skip: Tensor | None
) -> list[_New]:
    """The same in place, fused where the device has the kernel, one call for all leaves of a
    kind.
    """
    kinds: dict[Any, list[_Row]] = {}
    for p, g, mu, nu, decay in rows:
        if _fused.supports(p) and mu.is_contiguous() and nu.is_contiguous():
            kinds.setdefault((p.device, p.dtype, decay), []).append(
                (p, g.contiguous(), mu, nu, decay)
            )
            continue
        old = (p, mu, nu)
        for tensor, new in zip(
            old, _keep(skip, _step(p, g, mu, nu, decay, step, **numbers), old), strict=True
        ):
            tensor.copy_(new)
    found = None if skip is None else skip.to(torch.float32)
    for (_, _, decay), group in kinds.items():
        p, g, mu, nu, _ = zip(*group, strict=True)
        _fused.adamw_(p, g, mu, nu, step, weight_decay=decay, skip=found, **numbers)
    return [(p, mu, nu) for p, _, mu, nu, _ in rows]


def _keep(skip: Tensor | None, new: Any, old: tuple[Tensor, ...]) -> Any:
    if skip is None:
        return new
    return tuple(torch.where(skip, o, n) for n, o in zip(new, old, strict=True))
