"""Values that live between the forward and the backward of a scan."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import tree
from k31fn.autodiff.ambient import Ambient
from k31fn.autodiff.replay import replay
from k31fn.parallel.fsdp.fused_gather import start_gather, wait_gather
from k31fn.parallel.fsdp.placement import Placements
from k31fn.parallel.scan.dependence import Dependence, any_true
from k31fn.parallel.scan.plan import GatheringStep, RematPlan, Step

__all__ = ["CarryTrees", "KeptLayers", "Residuals", "offer_rebuild", "rebuilds"]


class Residuals(NamedTuple):
    """All that the backward of a scan is given.

    Attributes:
        params: this rank's parts of each layer's parameters.
        shared: what all layers are handed.
        per_layer: what each is handed besides.
        decisions: of each layer.
        layers: :class:`KeptLayers`, or :class:`CarryTrees`.
        ambient: of the forward.
    """

    params: Any
    shared: Any
    per_layer: Any
    decisions: Any
    layers: Any
    ambient: Ambient


class CarryTrees(NamedTuple):
    """All carries, as a tree: nothing else passes through a ``torch.func`` transform.

    Attributes:
        carries: by layer.
        functions: by layer, what is kept of its functions.
    """

    carries: Any
    functions: Any

    def take(self, i: int) -> tuple[Any, Any]:
        """A layer's carry, and what its functions keep."""
        return self.carries[i], self.functions[i]

    def skip(self, i: int) -> None:
        """Nothing can be given up here."""

    def rebuild(self) -> None:
        """All are there."""


class KeptLayers:
    """The values of each layer that a backward needs, given up when they are used.

    Passes through a tree as one opaque leaf.

    Detached: some tensors are outputs of the rule, which would be kept by the graph that they keep.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        placements: Sequence[Placements],
        args: tuple[Any, Any, Any],
        carries: Sequence[Any],
        decisions: Sequence[Any],
        functions: Sequence[Any],
        plan: RematPlan,
        dependence: Dependence,
    ) -> None:
        self.steps = steps
        self.placements = placements
        self.decisions = decisions
        self.plan = plan
        self.args = _detached(args)
        self.functions = _detached(list(functions))
        # No other layer is pulled, whatever gradients are used in the end.
        self.pulled = [i for i in range(len(steps)) if any_true(dependence.of(i))]
        kept = self.pulled if plan.every == 1 else range(0, len(steps), plan.every)
        self.carries = {i: _detached(carries[i]) for i in kept}

    def take(self, i: int) -> tuple[Any, Any]:
        """A layer's carry, and what its functions keep; in descending order."""
        self._check(i)
        # Does nothing where the carry is there: in the run that was made again before.
        self.rebuild()
        return self.carries.pop(i), self.functions.pop()

    def skip(self, i: int) -> None:
        """Gives up what is kept of a layer; in the same order."""
        self._check(i)
        self.carries.pop(i, None)
        self.functions.pop()

    def _check(self, i: int) -> None:
        if len(self.functions) != i + 1:
            raise RuntimeError(
                "scan: its backward ran already, and what it kept is freed; run the forward again"
            )

    def rebuild(self) -> None:
        """Makes the carries up to the last layer that is left to pull, from the last one that is
        there.
        """
        last = max((i for i in self.pulled if i < len(self.functions)), default=-1)
        first = max((i for i in self.carries if i <= last), default=last)
        params, shared, per_layer = self.args
        light = self.plan.light
        parts: dict[int, Any] = {}
        arriving: dict[int, Any] = {}
        for i in range(first, last):
            parts[i] = light(params[i])
            if self.placements:
                # All at once: they are small, and the first layer waits for its own only.
                arriving[i] = start_gather(parts[i], light(self.placements[i]))
        for i, part in parts.items():
            step = self.steps[i]
            if isinstance(step, GatheringStep):
                step = GatheringStep(step.step, light(step.placements))
            weights = wait_gather(arriving.pop(i)) if arriving else part
            args = (weights, self.carries[i], shared, per_layer[i])
            # The values alone: the graph of the layer is made when it is pulled.
            with torch.no_grad():
                self.carries[i + 1], _ = replay(
                    step, args, self.decisions[i], self.functions[i], self.plan.keep
                )


def _detached(x: Any) -> Any:
    return tree.map(lambda t: t.detach() if isinstance(t, Tensor) else t, x)


# A context variable and no argument: between the caller that collects (a pipeline's engine) and the
# scan lie a stage, a model and a derivative, none of which has to do with it.
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
    calls: list[Callable[[], None]] = []
    token = _REBUILDS.set(calls)
    try:
        yield calls
    finally:
        _REBUILDS.reset(token)


def offer_rebuild(layers: KeptLayers, ambient: Ambient) -> None:
    """Hands an enclosing :func:`rebuilds` the call, where there is something to make."""
    calls = _REBUILDS.get()
    if calls is not None and layers.plan.every > 1:
        calls.append(lambda: ambient.run(layers.rebuild))
