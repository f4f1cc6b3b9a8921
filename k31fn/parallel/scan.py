"""Layers one after the other, whose weights are gathered just in time.

One reverse rule over the whole chain. Forward: the weights of layer i + 1 are asked for, then layer
i runs. Backward, from the last layer: the weights of layer i - 1 are asked for, layer i runs again
and backward, then its gradients start to be reduce-scattered, behind the backward of layer i - 1::

    forward   gather 0 | gather 1, run 0 | gather 2, run 1 | ...
    backward  gather n | gather n-1, pull n | scatter n, gather n-2, pull n-1 | ...

At most two layers' weights are there at once. What is kept of a layer is what it added to the carry
(a tensor that several carries share is kept once), its decisions, and of the functions inside
those that ``keep`` names. With ``every`` carries are kept at every so many layers only; those
between are made again, from the first of such a run on, before its backward::

    backward  light n-7 .. n-1, carry n-7 .. n | gather n | ...

For that only the part of the weights is gathered that layers need when their functions are kept
(``light``). It needs no cotangent: :func:`rebuilds` lets the caller begin before one is there.

Where weights are frozen the backward does what that of a loop would: no product is computed and
nothing sent for them, no cotangent goes below the first layer that it is for, and a layer through
which none has to pass is not gathered, run or kept again. What a carry depends on is known from the
forward, which notes it on a graph of one layer at a time where some weights of a layer are trained
and its carry depends on none yet.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k31fn import tree
from k31fn.autodiff.ambient import Ambient
from k31fn.autodiff.custom_vjp import custom_vjp, differentiable, stop_gradient
from k31fn.autodiff.keep import can_keep_graphs
from k31fn.autodiff.replay import call_recorded, pull_replayed, replay, run_recorded
from k31fn.autodiff.transforms import taping
from k31fn.autodiff.weight_grads import current_weight_tape
from k31fn.parallel.fsdp.fused_gather import start_gather, start_scatter, wait_gather, wait_scatter
from k31fn.parallel.fsdp.placement import Placements

__all__ = ["Prefetch", "RematPlan", "Step", "rebuilds", "scan"]

Step = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""``(weights, carry, shared, own) -> (carry, aux)``: one layer."""


@dataclass(frozen=True)
class RematPlan:
    """What a scan keeps for its backward besides decisions.

    Attributes:
        keep: names of functions that do not run again (:func:`~k31fn.autodiff.keep`).
        every: carries are kept at layers 0, ``every``, 2 ``every``, ...
        light: of a layer's weights (or their placements) what it needs where ``keep`` holds.
    """

    keep: frozenset[str] = frozenset()
    every: int = 1
    light: Callable[[Any], Any] = lambda weights: weights


class Prefetch:
    """Gathered weights of layers in a given order; the next ones travel while those handed out are
    used.
    """

    def __init__(
        self, params: Sequence[Any], placements: Sequence[Placements], order: Iterable[int]
    ) -> None:
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


class _Whole(Prefetch):
    """Weights that are whole already, or are gathered by the layers."""

    def take(self) -> Any:
        return self._params[next(self._order)]

    def _start(self) -> None:
        pass


def scan(
    steps: Sequence[Step],
    placements: Sequence[Placements],
    params: Sequence[Any],
    carry: Any,
    shared: Any,
    own: Any,
    plan: RematPlan = RematPlan(),
) -> tuple[Any, tuple[Any, ...]]:
    """Runs ``carry, aux[i] = steps[i](gather(params[i]), carry, shared, own[i])`` for each layer.

    The gradient keeps no gathered weights and, but for what ``plan`` names, nothing inside of a
    layer, which is run again. Derivatives are of first order; for higher ones gather in a loop of
    your own. Overlap is as in :mod:`k31fn.parallel.overlap`; here ``torch.func.grad`` on real ranks
    has it too. Under :func:`k31fn.autodiff.split_vjp` there is none: each layer gathers its weights
    inside.

    Args:
        steps: the layers; pure functions that capture no differentiated tensor.
        placements: of each layer's parameters; none: they are whole.
        params: this rank's parts of them.
        carry: what the first layer is handed.
        shared: what all layers are handed.
        own: what each is handed besides, by layer.
        plan: what is kept for the backward; within a ``torch.func`` transform all carries and no
            function.

    Returns:
        The last carry, and each layer's ``aux``.

    Raises:
        RuntimeError: (in the backward) at a second derivative, or at a second backward outside of
            ``torch.func``.
    """
    if not steps:
        return carry, ()
    if (
        placements and current_weight_tape() is not None
    ):  # weights that are gathered below would have no graph to their parts
        steps, placements = [_Gathering(*pair) for pair in zip(steps, placements, strict=True)], ()
    keeps = can_keep_graphs()
    trained = [tree.map(_tracked, p) for p in params]
    if placements:
        trained = [
            tree.map(lambda wanted, place: wanted and not place.frozen, *pair)
            for pair in zip(trained, placements, strict=True)
        ]
    reach = _Reach(trained, [tree.map(_tracked, carry)], tree.map(_tracked, (shared, list(own))))

    def fwd(given: Any, params: Any, carry: Any, shared: Any, own: Any) -> Any:
        carries, reports, made, saved = [], [], [], []
        ahead = _weights(params, placements, range(len(steps)))
        for i, step in enumerate(steps):
            carries.append(carry)
            before = given[i] if given else ()
            found = reach.run(i, step, (ahead.take(), carry, shared, own[i]), before, plan.keep)
            (carry, aux), decisions, kept = found
            reports.append(aux)
            made.append(decisions)
            saved.append(kept)
        ambient = Ambient((params, carry))
        if keeps:
            kept = _Kept(
                steps, placements, (params, shared, own), carries, made, saved, plan, reach
            )
            if plan.every > 1 and (found := _REBUILDS.get()) is not None:
                found.append(lambda: ambient.run(kept.rebuild))
            carries, saved = kept, ()
        return ((carry, tuple(reports)), made), (params, carries, shared, own, made, saved, ambient)

    def bwd(needs: Any, residuals: Any, ct: Any) -> tuple[Any, ...]:
        *rest, ambient = residuals
        wanted = reach.wanted(needs[1:])
        return (
            None,
            *ambient.run(lambda: _pull(steps, placements, plan.keep, wanted, *rest, *ct[0])),
        )

    rule = custom_vjp(
        fwd,
        bwd,
        opaque=True,
        needs=True,
        name="scan",
        instead="remat='none', or layers that gather inside remat",
    )
    carry, reports = call_recorded(rule, params, carry, shared, own)
    return tree.map(
        lambda x, reached: x if reached else stop_gradient(x), carry, reach.carries[-1]
    ), reports


def _tracked(x: Any) -> bool:
    """Whether a gradient may be asked for; within a ``torch.func`` transform tensors do not
    tell.
    """
    if not isinstance(x, Tensor) or not differentiable(x):
        return False
    return x.requires_grad and torch.is_grad_enabled() if can_keep_graphs() else True


@dataclass(frozen=True)
class _Reach:
    """What depends on something that a gradient is asked for: trees of bools.

    Attributes:
        trained: weights, by layer.
        carries: the carry in front of each layer, and after the last one of those that ran.
        others: ``(shared, own)``.
    """

    trained: list[Any]
    carries: list[Any]
    others: tuple[Any, list[Any]]

    def of(self, i: int) -> tuple[Any, ...]:
        """Of the arguments of a layer."""
        return self.trained[i], self.carries[i], self.others[0], self.others[1][i]

    def run(
        self, i: int, step: Step, args: tuple[Any, ...], given: Any, keep: frozenset[str]
    ) -> Any:
        """:func:`run_recorded` of a layer, and what its carry depends on.

        Once a part of a carry depends on something, all of the next ones are said to; so they are
        of functions that are kept, whose values have no graph, and within a transform.
        """
        flags = self.of(i)
        exact = (
            can_keep_graphs()
            and not keep
            and current_weight_tape() is None
            and not _any(self.carries[i])
        )
        if not (exact and _any(flags)):
            (carry, aux), *recorded = run_recorded(step, args, given, keep)
            after = tree.map(lambda x: _any(flags) and differentiable(x), carry)
        else:
            with taping():
                leaves = tree.map(lambda x, wanted: x.detach().requires_grad_(wanted), args, flags)
                out, *recorded = run_recorded(step, leaves, given, keep)
            after = tree.map(lambda x: x.requires_grad, out[0])
            same = {
                id(leaf): x for leaf, x in zip(tree.leaves(leaves), tree.leaves(args), strict=True)
            }
            carry, aux = tree.map(lambda x: same[id(x)] if id(x) in same else x.detach(), out)
        del self.carries[i + 1 :]  # of a run before
        self.carries.append(after)
        return (carry, aux), *recorded

    def wanted(self, needs: tuple[Any, Any, Any, Any]) -> list[tuple[Any, Any, Any, Any]]:
        """By layer: of which arguments gradients are computed; ``needs``: of which of the scan's
        they are used.
        """
        of_params, of_carry, of_shared, of_own = needs

        def both(a: Any, b: Any) -> Any:
            return tree.map(lambda a, b: a and b, a, b)

        carries = [both(self.carries[0], of_carry), *self.carries[1:-1]]
        rows = zip(self.trained, of_params, carries, of_own, strict=True)
        return [(both(trained, w), carry, of_shared, own) for trained, w, carry, own in rows]


def _any(flags: Any) -> bool:
    return any(tree.leaves(flags))


@dataclass(frozen=True)
class _Gathering:
    """A layer that gathers its weights itself."""

    step: Step
    placements: Placements

    def __call__(self, params: Any, *args: Any) -> tuple[Any, Any]:
        return self.step(wait_gather(start_gather(params, self.placements)), *args)


_REBUILDS: contextvars.ContextVar[list[Callable[[], None]] | None] = contextvars.ContextVar(
    "k31fn_rebuilds", default=None
)


@contextlib.contextmanager
def rebuilds() -> Iterator[list[Callable[[], None]]]:
    """Collects from each scan that runs inside and does not keep all carries a call that makes
    those of its last run.

    In the order in which they ran: the last one is needed first. The backward calls what has not
    been called.
    """
    found: list[Callable[[], None]] = []
    token = _REBUILDS.set(found)
    try:
        yield found
    finally:
        _REBUILDS.reset(token)


class _Kept:
    """What a backward needs of each layer, given up when it is used; passes through a tree as one
    opaque leaf.

    Detached: some tensors are outputs of the rule, which would be kept by the graph that they keep.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        placements: Sequence[Placements],
        args: tuple[Any, Any, Any],
        carries: Sequence[Any],
        made: Sequence[Any],
        saved: Sequence[Any],
        plan: RematPlan,
        reach: _Reach,
    ) -> None:
        self.steps, self.placements, self.made, self.plan = steps, placements, made, plan
        self.args, self.saved = _detached(args), [_detached(tuple(s)) for s in saved]
        self.pulled = [i for i in range(len(steps)) if _any(reach.of(i))]
        kept = self.pulled if plan.every == 1 else range(0, len(steps), plan.every)
        self.carries = {i: _detached(carries[i]) for i in kept}

    def take(self, i: int) -> tuple[Any, Any]:
        """A layer's carry, and what its functions keep; in descending order."""
        self._check(i)
        self.rebuild()
        return self.carries.pop(i), self.saved.pop()

    def skip(self, i: int) -> None:
        """Gives up what is kept of a layer; in the same order."""
        self._check(i)
        self.carries.pop(i, None)
        self.saved.pop()

    def _check(self, i: int) -> None:
        if len(self.saved) != i + 1:
            raise RuntimeError(
                "scan: its backward ran already, and what it kept is freed; run the forward again"
            )

    def rebuild(self) -> None:
        """Makes the carries up to the last layer that is left to pull, from the last one that is
        there.
        """
        last = max((i for i in self.pulled if i < len(self.saved)), default=-1)
        first = max((i for i in self.carries if i <= last), default=last)
        (params, shared, own), light = self.args, self.plan.light
        some = {i: light(params[i]) for i in range(first, last)}
        arriving = (
            {i: start_gather(some[i], light(self.placements[i])) for i in some}
            if self.placements
            else {}
        )
        for i, weights in some.items():
            step = self.steps[i]
            if isinstance(step, _Gathering):
                step = _Gathering(step.step, light(step.placements))
            args = (
                wait_gather(arriving.pop(i)) if arriving else weights,
                self.carries[i],
                shared,
                own[i],
            )
            with torch.no_grad():
                self.carries[i + 1], _ = replay(
                    step, args, self.made[i], self.saved[i], self.plan.keep
                )


def _detached(x: Any) -> Any:
    return tree.map(lambda t: t.detach() if isinstance(t, Tensor) else t, x)


def _weights(
    params: Sequence[Any], placements: Sequence[Placements], order: Iterable[int]
) -> Prefetch:
    return (Prefetch if placements else _Whole)(params, placements, order)


def _pull(
    steps: Sequence[Step],
    placements: Sequence[Placements],
    keep: frozenset[str],
    wanted: Sequence[tuple[Any, Any, Any, Any]],
    params: Sequence[Any],
    kept: Any,
    shared: Any,
    own: Sequence[Any],
    made: Sequence[list[Any]],
    saved: Sequence[Any],
    g: Any,
    g_aux: Sequence[Any],
) -> tuple[Any, Any, Any, Any]:
    """Gradients of the parameters' parts, of the first carry, of ``shared`` and of ``own``."""
    grads, g_own, scattering = [_absent(p) for p in params], [_absent(x) for x in own], None
    sums: list[Tensor | None] = [None] * len(tree.leaves(shared))
    pulled = [i for i in reversed(range(len(steps))) if _any(wanted[i])]
    if isinstance(kept, _Kept) and pulled:
        kept.rebuild()
    ahead = _weights(params, placements, pulled)
    for i in reversed(range(len(steps))):
        if i not in pulled:
            g = _absent(wanted[i][1])
            if isinstance(kept, _Kept):
                kept.skip(i)
            continue
        carry, own_saved = kept.take(i) if isinstance(kept, _Kept) else (kept[i], saved[i])
        weights = ahead.take()
        args, ct = _constant_but(wanted[i], (weights, carry, shared, own[i])), (g, g_aux[i])
        found = pull_replayed(steps[i], args, ct, made[i], own_saved, keep, needs=wanted[i])
        of_weights, g, of_shared, g_own[i] = found
        g = _filled(g, carry, wanted[i][1])
        if placements:
            sent = tree.map(
                lambda x, place: not place.frozen and differentiable(x), weights, placements[i]
            )
            of_weights = _filled(of_weights, weights, sent)
        del (
            found,
            args,
            ct,
            weights,
            carry,
            own_saved,
        )  # before the gathered gradients' buffers are made
        sums = [
            b if a is None else a if b is None else a + b
            for a, b in zip(sums, _leaves(of_shared), strict=True)
        ]
        if scattering is not None:
            above, pending = scattering
            grads[above] = wait_scatter(pending)
            scattering = pending = None  # it holds the whole gradients
        if placements:
            scattering = i, start_scatter(of_weights, placements[i], params[i])
        else:
            grads[i] = of_weights
        del of_weights
    if scattering is not None:
        grads[scattering[0]] = wait_scatter(scattering[1])
    return grads, g, tree.unflatten(tree.flatten(shared)[1], sums), g_own


def _constant_but(wanted: Any, args: Any) -> Any:
    return tree.map(lambda x, wanted: x if wanted else stop_gradient(x), args, wanted)


def _absent(like: Any) -> Any:
    return tree.map(lambda _: None, like)


def _leaves(grads: Any) -> list[Tensor | None]:
    return tree.leaves(grads, allow_none=True)


def _filled(grads: Any, like: Any, wanted: Any) -> Any:
    """Zeros for absent gradients, which some ranks may have and others not; None for those that are
    not wanted.
    """
    values, structure = tree.flatten(like)
    rows = zip(_leaves(grads), values, tree.leaves(wanted), strict=True)
    return tree.unflatten(
        structure, [torch.zeros_like(x) if g is None and want else g for g, x, want in rows]
    )
