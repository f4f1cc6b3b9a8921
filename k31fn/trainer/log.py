"""What a run records of its steps, without making a step wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import metrics, trackers
from k31fn.config.codec import to_dict
from k31fn.config.recipe import Recipe
from k31fn.trainer.console import View
from k31fn.trainer.part_metrics import BAD_LEAF, BAD_LEAVES, MetricLabels
from k31fn.trainer.ranks.failure_report import StepTimes
from k31fn.trainer.step import Metrics

__all__ = ["MAX_NON_FINITE", "Log", "NonFiniteError", "PlanError", "open_trackers"]

MAX_NON_FINITE = 3  # one bad batch, or two, are skipped; a run that has diverged gives no other
_NO_LABELS = MetricLabels()


class NonFiniteError(RuntimeError):
    """Several steps in a row were not finite; none of them changed the parameters."""


class PlanError(NonFiniteError):
    """A plan of MoonEP broke its laws; the step changed nothing."""


class _Pending(NamedTuple):
    """A step whose numbers are perhaps still on the device."""

    step: int
    read: Callable[[], list[float]]
    lr: float
    tokens_per_second: float
    labels: MetricLabels


class Log:
    """Writes the numbers of a step when the next one has been queued, so that the device always has
    work.

    Without a ``file`` it only looks at them: on a rank that does not write.
    """

    def __init__(
        self,
        file: Path | None,
        tracker: trackers.Tracker,
        view: View,
        times: StepTimes | None = None,
    ) -> None:
        self._file = file
        self._times = times or StepTimes()
        self._tracker = tracker
        self._view = view
        self._pending: _Pending | None = None
        self._clock = time.perf_counter()
        self._non_finite = self._skipped = 0
        self._broken_plan = ""

    def push(
        self, step: int, numbers: Metrics, lr: float, tokens: int, labels: MetricLabels = _NO_LABELS
    ) -> None:
        """Keeps a step that has been queued, and writes the one before.

        Raises:
            NonFiniteError: the one before was the last of several in a row that were not finite.
            PlanError: the one before had a plan of MoonEP that broke its laws.
            OSError: the file cannot be written.
        """
        read = _to_host(numbers.flat())
        before = self._pending
        values = before.read() if before else []
        # Reading has waited for the end of the step before: from push to push it is a step's time,
        # though this step has only been queued.
        now = time.perf_counter()
        self._pending = _Pending(step, read, lr, tokens / (now - self._clock), labels)
        self._times.add(now - self._clock)
        self._clock = now
        if before:
            self._write_step(before, values)
            self._check(before.step)

    def flush(self) -> None:
        """Writes the step that is kept, if there is one.

        Raises:
            NonFiniteError: as :meth:`push`.
            OSError: the file cannot be written.
        """
        if self._pending:
            last, self._pending = self._pending, None
            self._write_step(last, last.read())
            self._check(last.step)

    def write(self, record: Mapping[str, Any]) -> None:
        """A record to the file and to the tracker."""
        if self._file is not None:
            metrics.append(self._file, record)
        self._tracker.log(record["step"], record)

    def restart_clock(self) -> None:
        """Leaves what was done since the last step (an evaluation, a rehearsal) out of tokens per
        second.
        """
        self._clock = time.perf_counter()

    def _write_step(self, pending: _Pending, numbers: list[float]) -> None:
        labels = pending.labels
        scalars = Metrics._fields[:-1]  # as Metrics.flat lays them out, the detail after them
        values = dict(zip(scalars, numbers[: len(scalars)], strict=True))
        record: dict[str, Any] = {
            "step": pending.step,
            "train/loss": values["loss"],
            "train/indexer_kl": values["indexer_kl"],
            "grad_norm": values["grad_norm"],
            "lr": pending.lr,
            "tokens_per_second": pending.tokens_per_second,
            "moe/load_max_over_mean": values["load_max_over_mean"],
            "skipped": int(values["skipped"]),
        }
        # Absent, not 0, where a run does not measure it: plots and tables then leave it out.
        if values["spike"]:
            record["spike"] = 1
        if values["replicas"]:
            record["moe/replicas"] = values["replicas"]
        if values["max_logit"]:
            record["max_logit"] = values["max_logit"]
        if labels.phase >= 0:
            record["phase"] = labels.phase
        if labels.utilisation:
            record["mfu"] = pending.tokens_per_second * labels.utilisation
        record |= zip(labels.names, numbers[len(scalars) :], strict=bool(labels.names))
        which = _bad_leaves(record, labels)
        self.write(record)
        self._view.step(record)
        if values["skipped"]:
            self._skipped += 1
            reason = "it had no label to learn from"
            if values["violation"]:
                reason = self._broken_plan = _broken_plan(int(values["violation"]), labels)
            elif values["non_finite"]:
                reason = "a gradient or the loss was not finite"
            elif values["spike"]:
                reason = (
                    f"loss {values['loss']:.4g} or gradient norm {values['grad_norm']:.4g} stands "
                    "out"
                )
            self._view.note(
                f"step {pending.step} skipped ({self._skipped} so far): {reason}; nothing was "
                f"changed{which}"
            )
        self._non_finite = self._non_finite + 1 if values["non_finite"] else 0

    def _check(self, step: int) -> None:
        if self._broken_plan:
            raise PlanError(
                f"step {step} changed nothing: {self._broken_plan}; set moe.slots=0, which "
                "suffices for any routes, or moe.placement='plain'"
            )
        if self._non_finite >= MAX_NON_FINITE:
            raise NonFiniteError(
                f"{MAX_NON_FINITE} steps in a row up to step {step} were not finite and changed "
                "nothing; lower optimizer.peak_lr, or look at the text"
            )


def _broken_plan(violation: int, labels: MetricLabels) -> str:
    layer, rank = divmod(violation - 1, labels.ranks)
    return (
        f"MoonEP's plan of layer {layer} breaks its laws on rank {rank}: more experts than slots, "
        "or ranks that count differently"
    )


def _bad_leaves(record: dict[str, Any], labels: MetricLabels) -> str:
    """Which gradients were not finite, for a reader; takes what says it out of the record."""
    # a step's record has no use for an index of -1
    first = int(record.pop(BAD_LEAF, -1))
    number = int(record.pop(BAD_LEAVES, 0))
    if first < 0:
        return ""
    record["non_finite"] = labels.leaves[first]
    others = f" and {number - 1} others" if number > 1 else ""
    return f"; not finite: the gradient of {labels.leaves[first]}{others}"


def _to_host(x: Tensor) -> Callable[[], list[float]]:
    """Starts copying ``x`` to the host, behind the work queued so far and no later work; the result
    waits for it.
    """
    if x.is_cpu:
        return x.tolist
    # an event, not a synchronisation: that would wait for the next step too, queued by then
    copy = x.to("cpu", non_blocking=True)
    copied = torch.Event(device=x.device)
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return copy.tolist()

    return read


def open_trackers(
    recipe: Recipe, run: Path, resumed_at: int | None, *, warn: Callable[[str], object]
) -> trackers.Tracker:
    """TensorBoard's events, and the services that the recipe names, as one tracker.

    Args:
        recipe: the run's.
        run: its folder.
        resumed_at: first step of a run that goes on; None: it begins.
        warn: takes a line that says what is missing.

    Raises:
        OSError: a service could not begin a run; those opened before it are closed.
    """
    opened = [trackers.tensorboard(run / "events", warn=warn, resumed_at=resumed_at)]
    try:
        for name in recipe.trackers:
            opened.append(
                trackers.service(
                    name,
                    project=recipe.name,
                    run=run.name,
                    config=to_dict(recipe),
                    directory=run,
                    warn=warn,
                )
            )
    except BaseException:
        trackers.Several(opened).close()
        raise
    return trackers.Several(opened)
