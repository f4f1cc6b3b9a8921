"""Both sides of a paired run, step by step on the same rows."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from k31fn import data, model, params, tree
from k31fn import device as devices
from k31fn.kernels.registry import record_impls, watch_calls
from k31fn.pair.judge import Probes
from k31fn.pair.operators import Sample, compare
from k31fn.pair.sides import Side, precise
from k31fn.testing.memory import live_bytes
from k31fn.trainer.gradient import make_gradient
from k31fn.trainer.layout import lay_out
from k31fn.trainer.phases import learning_rate
from k31fn.trainer.state import TrainState
from k31fn.trainer.step import make_batches, make_step, rows_at

__all__ = ["Runs", "Step"]

_UNTIMED = 3  # first steps, in which kernels are compiled and memory is found


class _Probe(NamedTuple):
    """Losses and gradients at the same parameters.

    Attributes:
        losses: of side a, side b and the wider dtype.
        apart: by parameter, ``|g_b - g_a| / |g_a|``; and ``""``: of all together.
    """

    losses: tuple[float, float, float]
    apart: dict[str, float]


class Step(NamedTuple):
    """A step of all runs.

    Attributes:
        number: of the step.
        losses: by run: "a", "b" and, if there is one, "noise".
        norms: of their gradients.
        probe: what was compared at the parameters of side a before it; None: nothing.
    """

    number: int
    losses: dict[str, float]
    norms: dict[str, float]
    probe: _Probe | None


@dataclass
class _SideRun:
    """One of the runs.

    Attributes:
        side: whose recipe and operators.
        state: after the steps done.
        reverse: whether the rows of a batch are taken in reverse order.
        seconds: of the steps that were timed.
        peak: most bytes that a step held besides what there was before it.
    """

    side: Side
    state: TrainState
    reverse: bool = False
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    advance: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.advance = make_step(lay_out(self.side.recipe))

    def step(self, rows: data.Example, number: int, device: torch.device, timed: bool) -> Any:
        """Takes a step and returns its metrics."""
        rate = learning_rate(self.side.recipe, number)
        batches = make_batches(self.side.recipe, _reversed(rows) if self.reverse else rows, device)
        devices.synchronize(device)
        before = devices.memory_allocated(device)
        began = time.perf_counter()
        devices.reset_peak_memory(device)
        with self.side.chosen():
            # a process has no peak that could be reset, so on a CPU one step, not the first, is
            # watched tensor by tensor; that is slow, and its time does not count
            if device.type == "cpu" and not self.peak and number:
                with live_bytes() as live:
                    self.state, step_metrics = self.advance(self.state, batches, rate)
                self.peak = live.peak
                return step_metrics
            self.state, step_metrics = self.advance(self.state, batches, rate)
        devices.synchronize(device)  # without it the clock stops when the work is queued
        if timed:
            self.seconds.append(time.perf_counter() - began)
        if device.type != "cpu":
            self.peak = max(self.peak, devices.peak_memory(device) - before)
        return step_metrics


def _reversed(rows: data.Example) -> data.Example:
    # whole rows: their tokens stay in order, and every sum over rows runs the other way
    return tree.map(lambda x: x.flip(0), rows)


class Runs:
    """Side a and side b from one state; and side a again with the rows of every batch reversed.

    The third is the noise: the same sums over tokens in another order. A batch of one row has no
    other order, and then there is none.

    Args:
        a: side a; the steps of its recipe include those done.
        b: side b.
        states: where the two begin; their tensors are given up.
        done: steps that these have behind them.
        device: of all.
        every: steps from probe to probe.

    Attributes:
        probes: gradients of the parameters.
        operators: those of the arguments of each operator that the sides compute differently.
        runs: "a", "b" and "noise".
    """

    def __init__(
        self,
        a: Side,
        b: Side,
        states: Sequence[TrainState],
        done: int,
        device: torch.device,
        every: int,
    ) -> None:
        self._device, self._done, self._every = device, done, every
        self._a, self._b = a, b
        self._exact = precise(a)
        # the coarser dtype of the two: a side computed more narrowly differs by its rounding alone
        coarsest = max(_rounding(a), _rounding(b))
        self.probes = Probes(coarsest)
        self.operators = Probes(coarsest)
        self._sample = Sample()
        self.runs = {"a": _SideRun(a, states[0]), "b": _SideRun(b, states[1])}
        if a.recipe.batch_size > 1:
            # a copy: a step writes into its own state
            self.runs["noise"] = _SideRun(a, tree.map(torch.clone, states[0]), reverse=True)
        self._layouts = [lay_out(side.recipe) for side in (a, b, self._exact)]
        self._gradients = [make_gradient(layout) for layout in self._layouts]

    def steps(self, dataset: data.Dataset | data.Mixture) -> Iterator[Step]:
        """All steps, one after the other."""
        for i, number in enumerate(range(self._done, self._a.recipe.steps)):
            rows = rows_at(dataset, number)
            # before the step: it is taken at the parameters that the step starts from
            probe = None if i % self._every else self._probe(rows)
            losses, norms = {}, {}
            for name, run in self.runs.items():
                step_metrics = run.step(rows, number, self._device, timed=i >= _UNTIMED)
                losses[name] = float(step_metrics.loss)
                norms[name] = float(step_metrics.grad_norm)
            yield Step(number, losses, norms, probe)

    @property
    def model(self) -> model.Config:
        """Side a's; side b's has the same parameters."""
        return self._a.recipe.model

    def milliseconds(self, name: str) -> float:
        """Median of a run's steps; 0 if none was timed."""
        seconds = self.runs[name].seconds
        return 1e3 * statistics.median(seconds) if seconds else 0.0

    def _probe(self, rows: data.Example) -> _Probe:
        """Both sides, and the exact one, at the parameters of side a."""
        losses, grads, ran = [], [], []
        sides = (self._a, self._b, self._exact)
        for side, layout, gradient in zip(sides, self._layouts, self._gradients, strict=True):
            if side is self._a and grads:  # side a is in float64: nothing is wider
                losses.append(losses[0])
                grads.append(grads[0])
                continue
            # side a's parameters in the dtype of each, since only one state is compared
            weights = params.cast(
                self.runs["a"].state.params, layout.specs, side.recipe.precision.param
            )
            state = dataclasses.replace(self.runs["a"].state, params=weights)
            batches = make_batches(side.recipe, rows, self._device)
            with (
                side.chosen(),
                record_impls() as impls,
                watch_calls(self._sample.watcher(side is self._a)),
            ):
                sums, of_params = gradient(state, batches)
            losses.append(float(sums.total))
            grads.append(of_params)
            ran.append(impls)
        # outside of the sides' runs: what is compared alone must not be sampled again
        for op, named in self._sample.taken(ran[0], ran[1]):
            compare(op, named, self._a, self._b, self._exact, self.operators)
        return _Probe((losses[0], losses[1], losses[2]), self.probes.add(*grads))


def _rounding(side: Side) -> float:
    """The relative rounding error of the side's dtype."""
    return torch.finfo(getattr(torch, side.recipe.compute)).eps
