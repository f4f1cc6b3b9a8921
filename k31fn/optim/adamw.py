"""AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from k31fn import precision, tree
from k31fn.kernels.adamw import adamw_step
from k31fn.kernels.adamw.reference import Constants, stepped
from k31fn.kernels.philox.reference import Draws
from k31fn.optim.storage import Storage
from k31fn.optim.transform import Leaves, Transform, Where, refuse_differentiated
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

    without the decay on leaves tagged ``no_decay``. A donated step is the op ``adamw_step``, a call
    for each leaf: nothing is widened as a whole. On a CPU its numbers are those of
    ``torch.optim.AdamW(fused=True)``.

    Differentiable unless donated; where a gradient was zero in every step, sqrt(v) has the
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
    constants = [Constants(beta1, beta2, eps, decay) for decay in decays]
    rule = _AdamW(leaves, constants, storage)
    return Transform(rule.init, rule.update, frozenset(leaves.paths))


@dataclass(frozen=True, eq=False)
class _AdamW:
    """The two functions of :func:`adamw`.

    Attributes:
        leaves: that it steps.
        constants: of each.
        storage: of the moments.
    """

    leaves: Leaves
    constants: list[Constants]
    storage: Storage

    def init(self, params: Any, *, masters: bool = True) -> _AdamWState:
        """The state before the first step."""
        copies = self.leaves.init_masters(params, masters)
        values = self.leaves.of_params(params)
        device = values[0].device if values else None
        # float32, on the device: kernels read it there, and it must not be waited for.
        step = torch.zeros((), dtype=torch.float32, device=device)
        mu = self.leaves.to_tree(list(map(self.storage.zeros, values)))
        nu = self.leaves.to_tree(list(map(self.storage.zeros, values)))
        return _AdamWState(step, mu, nu, copies)

    def update(
        self,
        grads: Any,
        state: _AdamWState,
        params: Any,
        *,
        lr: float | Tensor,
        scale: Float[Tensor, ""] | None = None,
        skip: Bool[Tensor, ""] | None = None,
        draws: Mapping[str, Draws] | None = None,
        donate: bool = False,
    ) -> tuple[Any, _AdamWState]:
        """See :class:`~k31fn.optim.transform.Update`."""
        if not donate:
            return self._apart(grads, state, params, lr, scale, skip, draws)
        refuse_differentiated(grads, params, lr, scale)
        return self._in_place(grads, state, params, lr, scale, skip, draws)

    @torch.no_grad()
    def _in_place(
        self,
        grads: Any,
        state: _AdamWState,
        params: Any,
        lr: float | Tensor,
        scale: Tensor | None,
        skip: Tensor | None,
        draws: Mapping[str, Draws] | None,
    ) -> tuple[Any, _AdamWState]:
        leaves = self.leaves
        storage = self.storage
        masters = leaves.masters(params, state.master, draws)
        gradients = leaves.of_grads(grads)
        mus = tree.leaves(state.mu)
        nus = tree.leaves(state.nu)
        step = state.step + 1
        for i, p in enumerate(masters):
            mus[i] = storage.adopt(mus[i], p)
            nus[i] = storage.adopt(nus[i], p)
            drawn = draws.get(leaves.paths[i]) if draws else None
            numbers = (step, lr, self.constants[i], scale, skip)
            if not storage.away(p):
                adamw_step(p, gradients[i], mus[i], nus[i], *numbers, drawn)
                continue
            for index in precision.slices(p.shape):
                stored = (mus[i][index], nus[i][index])
                mu, nu = (storage.fetch(x, p) for x in stored)
                of_slice = drawn.at(index) if drawn else None
                adamw_step(p[index], gradients[i][index], mu, nu, *numbers, of_slice)
                storage.store(stored[0], mu)
                storage.store(stored[1], nu)
        params, copies = leaves.with_masters(params, state.master, masters)
        (step,) = _unless(skip, (step,), (state.step,))
        storage.settle(masters[0].device if masters else None)
        mu, nu = (leaves.to_tree(x) for x in (mus, nus))
        return params, _AdamWState(state.step.copy_(step), mu, nu, copies)

    def _apart(
        self,
        grads: Any,
        state: _AdamWState,
        params: Any,
        lr: float | Tensor,
        scale: Tensor | None,
        skip: Tensor | None,
        draws: Mapping[str, Draws] | None,
    ) -> tuple[Any, _AdamWState]:
        """The same in differentiable operations; nothing is written into."""
        leaves = self.leaves
        storage = self.storage
        gradients = leaves.of_grads(grads)
        mus = tree.leaves(state.mu)
        nus = tree.leaves(state.nu)
        values = leaves.masters(params, state.master, draws)
        step = state.step + 1
        for i, value in enumerate(values):
            p = precision.upcast(value)
            g = gradients[i].to(p.dtype)
            if scale is not None:
                g = g * scale.to(p.dtype)
            mu = storage.fetch(mus[i], p).to(p.dtype)
            nu = storage.fetch(nus[i], p).to(p.dtype)
            new = stepped(p, g, mu, nu, step, lr, self.constants[i])
            values[i], mu, nu = _unless(skip, new, (p, mu, nu))
            mus[i] = storage.keep(mu)
            nus[i] = storage.keep(nu)
        params, copies = leaves.with_new(params, values, draws)
        (step,) = _unless(skip, (step,), (state.step,))
        return params, _AdamWState(step, leaves.to_tree(mus), leaves.to_tree(nus), copies)


def _unless(skip: Tensor | None, new: Any, old: tuple[Tensor, ...]) -> Any:
    """``new``, or ``old`` where ``skip`` says so: chosen on the device, without a wait."""
    if skip is None:
        return new
    return tuple(torch.where(skip, o, n) for n, o in zip(new, old, strict=True))
