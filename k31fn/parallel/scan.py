"""Layers one after the other, whose weights are gathered just in time.

One reverse rule over the whole chain. Forward: the weights of layer i + 1 are asked for, then layer i runs. Backward,
from the last layer: the weights of layer i - 1 are asked for, layer i runs again and backward, then its gradients start
to be reduce-scattered, behind the backward of layer i - 1::

    forward   gather 0 | gather 1, run 0 | gather 2, run 1 | ...
    backward  gather n | gather n-1, pull n | scatter n, gather n-2, pull n-1 | ...

At most two layers' weights are there at once. What is kept of a layer is what it added to the carry (a tensor that
several carries share is kept once), and its decisions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from k31fn import _functorch, tree
from k31fn.autodiff import custom_vjp, remat, stop_gradient
from k31fn.autodiff.custom_vjp import differentiable
from k31fn.autodiff.deferred import current_tape
from k31fn.autodiff.remat import Ambient, call_recorded, pull_replayed, run_recorded
from k31fn.parallel.bundle import start_gather, start_scatter, wait_gather, wait_scatter
from k31fn.parallel.fsdp import Placements

__all__ = ["Prefetch", "Step", "scan"]

Step = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""``(weights, carry, shared, own) -> (carry, aux)``: one layer."""


class Prefetch:
    """Gathered weights of layers in a given order; the next ones travel while those handed out are used."""

    def __init__(self, params: Sequence[Any], placements: Sequence[Placements], order: Iterable[int]) -> None:
        """Asks for the first layer's."""
        self._params, self._placements, self._order = params, placements, iter(order)
        self._start()

    def take(self) -> Any:
        """Waits for the next layer's weights, and asks for those of the one after."""
        assert self._pending is not None
        weights = wait_gather(self._pending)
        self._start()
        return weights

    def _start(self) -> None:
        i = next(self._order, None)
        self._pending = None if i is None else start_gather(self._params[i], self._placements[i])


class _Kept:
    """Carries that each are given up when they are used; passes through a tree as one opaque leaf."""

    def __init__(self, carries: Sequence[Any]) -> None:
        # Detached: some are outputs of the rule, which would be kept by the graph that they keep.
        self.carries: list[Any] = [tree.map(torch.Tensor.detach, c) for c in carries]

    def take(self) -> Any:
        if not self.carries:
            raise RuntimeError("scan: its backward ran already, and what it kept is freed; run the forward again")
        return self.carries.pop()


def scan(
    steps: Sequence[Step], placements: Sequence[Placements], params: Sequence[Any], carry: Any, shared: Any, own: Any
) -> tuple[Any, tuple[Any, ...]]:
    """Runs ``carry, aux[i] = steps[i](gather(params[i]), carry, shared, own[i])`` for each layer.

    The gradient keeps no gathered weights and nothing inside of a layer, which is run again. Derivatives are of first
    order; for higher ones gather in a loop of your own. Overlap is as in :mod:`k31fn.parallel.overlap`; here
    ``torch.func.grad`` on real ranks has it too. Under :func:`k31fn.autodiff.split_vjp` there is none: each layer
    gathers its weights inside of a remat.

    Args:
        steps: the layers; pure functions that capture no differentiated tensor.
        placements: of each layer's parameters.
        params: this rank's parts of them.
        carry: what the first layer is handed.
        shared: what all layers are handed.
        own: what each is handed besides, by layer.

    Returns:
        The last carry, and each layer's ``aux``.

    Raises:
        RuntimeError: (in the backward) at a second derivative, or at a second backward outside of ``torch.func``.
    """
    if not steps:
        return carry, ()
    if current_tape() is not None:  # weight gradients are put off, for which the rule below leaves no graph
        return _each_in_remat(steps, placements, params, carry, shared, own)
    layers, gives_up = range(len(steps)), not _functorch.transforms_active()

    def fwd(given: Any, params: Any, carry: Any, shared: Any, own: Any) -> Any:
        carries, reports, made = [], [], []
        ahead = Prefetch(params, placements, layers)
        for i in layers:
            carries.append(carry)
            before = given[i] if given else ()
            (carry, aux), decisions, _ = run_recorded(steps[i], (ahead.take(), carry, shared, own[i]), before)
            reports.append(aux)
            made.append(decisions)
        kept = _Kept(carries) if gives_up else carries
        return ((carry, tuple(reports)), made), (params, kept, shared, own, made, Ambient((params, carry)))

    def bwd(residuals: Any, ct: Any) -> tuple[Any, ...]:
        *kept, ambient = residuals
        return (None, *ambient.run(lambda: _pull(steps, placements, *kept, *ct[0])))

    rule = custom_vjp(scan, opaque=True, instead="remat='none', or layers that gather inside remat").defvjp(fwd, bwd)
    return call_recorded(rule, params, carry, shared, own)


def _each_in_remat(
    steps: Sequence[Step], placements: Sequence[Placements], params: Sequence[Any], carry: Any, shared: Any, own: Any
) -> tuple[Any, tuple[Any, ...]]:
    """The same values and gradients without prefetch: each layer gathers inside of a remat."""
    reports = []
    for step, place, layer, mine in zip(steps, placements, params, own, strict=True):

        def run(layer: Any, *args: Any, step: Step = step, place: Any = place) -> Any:
            return step(wait_gather(start_gather(layer, place)), *args)

        carry, aux = remat(run)(layer, carry, shared, mine)
        reports.append(aux)
    return carry, tuple(reports)


def _pull(
    steps: Sequence[Step],
    placements: Sequence[Placements],
    params: Sequence[Any],
    kept: Any,
    shared: Any,
    own: Sequence[Any],
    made: Sequence[list[Any]],
    g: Any,
    g_aux: Sequence[Any],
) -> tuple[Any, Any, Any, Any]:
    """Gradients of the parameters' parts, of the first carry, of ``shared`` and of ``own``."""
    grads, g_own, scattering = [*params], [*own], None
    sums: list[Tensor | None] = [None] * len(tree.leaves(shared))
    ahead = Prefetch(params, placements, reversed(range(len(steps))))
    for i in reversed(range(len(steps))):
        carry = kept.take() if isinstance(kept, _Kept) else kept[i]
        weights = ahead.take()
        step = functools.partial(_run_trained, steps[i], placements[i])
        pulled = pull_replayed(step, (weights, carry, shared, own[i]), (g, g_aux[i]), made[i])
        of_weights, g, of_shared, g_own[i] = pulled
        trained = tree.map(lambda x, place: not place.frozen and differentiable(x), weights, placements[i])
        of_weights, g = _filled(of_weights, weights, trained), _filled(g, carry, tree.map(differentiable, carry))
        del pulled, weights, carry  # before the gathered gradients' buffers are made
        sums = [b if a is None else a if b is None else a + b for a, b in zip(sums, _leaves(of_shared), strict=True)]
        if scattering is not None:
            grads[i + 1] = wait_scatter(scattering)
            scattering = None  # it holds the whole gradients
        scattering = start_scatter(of_weights, placements[i], params[i])
        del of_weights
    assert scattering is not None
    grads[0] = wait_scatter(scattering)
    return grads, g, tree.unflatten(tree.flatten(shared)[1], sums), g_own


def _run_trained(step: Step, placements: Placements, weights: Any, *args: Any) -> tuple[Any, Any]:
    """A layer, in whose backward nothing is computed for frozen weights."""
    return step(tree.map(lambda x, place: stop_gradient(x) if place.frozen else x, weights, placements), *args)


def _leaves(grads: Any) -> list[Tensor | None]:
    return tree.leaves(grads, allow_none=True)


def _filled(grads: Any, like: Any, wanted: Any) -> Any:
    """Zeros for absent gradients, which some ranks may have and others not; None for those that are not wanted."""
    values, structure = tree.flatten(like)
    rows = zip(_leaves(grads), values, tree.leaves(wanted), strict=True)
    return tree.unflatten(structure, [torch.zeros_like(x) if g is None and want else g for g, x, want in rows])
