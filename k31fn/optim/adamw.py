"""AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from k31fn import tree
from k31fn.optim import _fused
from k31fn.optim.storage import Storage
from k31fn.optim.transform import Leaves, Transform, Where, rates
from k31fn.typing import Bool, Float, Tensor

__all__ = ["adamw"]


@tree.dataclass
class _AdamWState:
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
    storage: Storage = Storage(),  # noqa: B008 (frozen, so one default for all calls is safe)
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
    decays = leaves.decays(weight_decay)

    def init(params: Any) -> _AdamWState:
        copies = leaves.init_masters(params)
        masters = leaves.masters(params, copies)
        device = masters[0].device if masters else None
        # float32, on the device: the fused kernel reads it there, and it must not be waited for.
        step = torch.zeros((), dtype=torch.float32, device=device)
        mu = leaves.to_tree(list(map(storage.zeros, masters)))
        nu = leaves.to_tree(list(map(storage.zeros, masters)))
        return _AdamWState(step, mu, nu, copies)

    def update(
        grads: Any,
        state: _AdamWState,
        params: Any,
        *,
        lr: float | Tensor,
        skip: Bool[Tensor, ""] | None = None,
        donate: bool = True,
    ) -> tuple[Any, _AdamWState]:
        masters = leaves.masters(params, state.master)
        numbers = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
        gradients = leaves.of_grads(grads)
        mus = tree.leaves(state.mu)
        nus = tree.leaves(state.nu)
        step = state.step + 1
        take_steps = _step_in_place if donate else _step_apart
        # A donated step writes in place, which autograd must not see.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not donate):
            stepped: list[Tensor] = []
            # Group by group: moments on the host are fetched for one leaf at a time.
            for group in _groups(masters, mus):
                rows: list[_Row] = []
                for i in group:
                    p = masters[i]
                    mu = storage.fetch(mus[i], p)
                    nu = storage.fetch(nus[i], p)
                    rows.append((p, gradients[i].to(p.dtype), mu, nu, decays[i]))
                new_rows = take_steps(rows, step, numbers, skip)
                for i, (new_p, new_mu, new_nu) in zip(group, new_rows, strict=True):
                    stepped.append(new_p)
                    mus[i] = storage.store(mus[i], new_mu, donate=donate)
                    nus[i] = storage.store(nus[i], new_nu, donate=donate)
            params, copies = leaves.with_masters(params, stepped, donate=donate)
            (step,) = _unless(skip, (step,), (state.step,))
            step = state.step.copy_(step) if donate else step
        storage.settle(masters[0].device if masters else None)
        return params, _AdamWState(step, leaves.to_tree(mus), leaves.to_tree(nus), copies)

    return Transform(init, update, frozenset(leaves.paths))


_Row = tuple[Tensor, Tensor, Tensor, Tensor, float]  # parameter, gradient, mu, nu, weight decay
_New = tuple[Tensor, Tensor, Tensor]  # parameter, mu, nu


def _groups(masters: Sequence[Tensor], mus: Sequence[Tensor]) -> list[list[int]]:
    """Numbers of leaves that are stepped at once, in order.

    All of them, but each alone whose moments have to be fetched: so only one leaf's are there.
    """
    groups: list[list[int]] = []
    was_at_hand = False
    for i, (p, mu) in enumerate(zip(masters, mus, strict=True)):
        at_hand = mu.dtype == p.dtype and mu.device == p.device
        if at_hand and was_at_hand:
            groups[-1].append(i)
        else:
            groups.append([i])
        was_at_hand = at_hand
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


def _step_apart(
    rows: Sequence[_Row], step: Tensor, numbers: dict[str, Any], skip: Tensor | None
) -> list[_New]:
    """The step number ``step`` of these leaves; nothing is written into."""
    new_rows = []
    for p, g, mu, nu, decay in rows:
        new = _step(p, g, mu, nu, decay, step, **numbers)
        new_rows.append(_unless(skip, new, (p, mu, nu)))
    return new_rows


def _step_in_place(
    rows: Sequence[_Row], step: Tensor, numbers: dict[str, Any], skip: Tensor | None
) -> list[_New]:
    """The same in place, fused where the device has the kernel, one call for all leaves of a
    kind.
    """
    # The kernel takes tensors of one device and dtype, and one decay.
    kinds: dict[tuple[Any, ...], list[_Row]] = {}
    stepped: list[_New] = []  # the tensors that were given, which then hold what is new
    for p, g, mu, nu, decay in rows:
        stepped.append((p, mu, nu))
        if _fused.supports(p) and mu.is_contiguous() and nu.is_contiguous():
            row = (p, g.contiguous(), mu, nu, decay)
            kinds.setdefault((p.device, p.dtype, decay), []).append(row)
            continue
        old = (p, mu, nu)
        new = _unless(skip, _step(p, g, mu, nu, decay, step, **numbers), old)
        for old_tensor, new_tensor in zip(old, new, strict=True):
            old_tensor.copy_(new_tensor)
    skip_number = None if skip is None else skip.to(torch.float32)
    for (_, _, decay), group in kinds.items():
        params, grads, mus, nus, _ = zip(*group, strict=True)
        _fused.adamw_(
            params, grads, mus, nus, step, weight_decay=decay, skip=skip_number, **numbers
        )
    return stepped


def _unless(skip: Tensor | None, new: Any, old: tuple[Tensor, ...]) -> Any:
    """``new``, or ``old`` where ``skip`` says so: chosen on the device, without a wait."""
    if skip is None:
        return new
    return tuple(torch.where(skip, o, n) for n, o in zip(new, old, strict=True))
