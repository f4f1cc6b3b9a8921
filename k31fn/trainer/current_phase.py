"""What the steps of one phase have in common, and whether they are captured as one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from k31fn import model
from k31fn.config.recipe import Recipe
from k31fn.jit.function import jit
from k31fn.jit.recorders import recorder_of
from k31fn.kernels.reference_calls import ReferenceCalls
from k31fn.kernels.registry import watch_calls
from k31fn.trainer.layout import RankLayout
from k31fn.trainer.part_metrics import MetricLabels, label
from k31fn.trainer.phases import make_phase_step, phase_layout
from k31fn.trainer.state import TrainState
from k31fn.trainer.step import Metrics, Step

__all__ = ["CurrentPhase", "JitMode", "begin_phase", "check_jit"]

JitMode = Literal["auto", "on", "off"]


class CurrentPhase(NamedTuple):
    """The phase of a step; a run without phases is one.

    Attributes:
        number: of the phase.
        layout: of its recipe.
        step: of the whole run's state.
        labels: of the step's metrics.
    """

    number: int
    layout: RankLayout
    step: Step
    labels: MetricLabels


def begin_phase(
    layout: RankLayout,
    step: int,
    device: torch.device,
    mode: JitMode,
    note: Callable[[str], object],
) -> CurrentPhase:
    """The phase of ``step``.

    Args:
        layout: of the whole run.
        step: any of the phase.
        device: of this rank.
        mode: whether its steps are captured: "auto" where that works, "on", "off".
        note: is told what came of it, and on a GPU or NPU which operators ran by their references
            in the first step.
    """
    recipe = layout.recipe
    phase_step = make_phase_step(layout, step)
    now = phase_layout(layout, step)
    if mode != "off" and recorder_of(device.type) is not None:
        reason = _refusal(now.recipe, device, mode)
        if reason:
            note(f"jit: steps are not captured: {reason}")
        else:
            # A phase that ends takes its graph along: the next one's step is another function.
            phase_step = jit(phase_step, donate=(0,), strict=mode == "on", note=note)
    if device.type != "cpu":  # where nothing else is written
        phase_step = _telling(phase_step, note)
    return CurrentPhase(recipe.phase_of(step), now, phase_step, label(recipe, step, device))


def _telling(step: Step, note: Callable[[str], object]) -> Step:
    """The step, whose first call says which operators run by their references."""
    is_first = True

    def run(
        state: TrainState, batches: Sequence[model.Batch], lr: float | Tensor
    ) -> tuple[TrainState, Metrics]:
        nonlocal is_first
        if not is_first:
            return step(state, batches, lr)
        is_first = False
        calls = ReferenceCalls()
        with watch_calls(calls):
            result = step(state, batches, lr)
        for line in calls.lines():
            note(line)
        return result

    return run


def check_jit(recipe: Recipe, device: torch.device, mode: str) -> None:
    """Refuses to be asked for what cannot be.

    Raises:
        ValueError: ``mode`` is unknown; or it is "on" and the run's steps cannot be captured.
    """
    if mode not in ("auto", "on", "off"):
        raise ValueError(f"jit={mode!r} must be 'auto', 'on' or 'off'")
    if mode != "on":
        return
    if recorder_of(device.type) is None:
        raise ValueError(f"jit='on' on {device.type}, which has no graphs; use 'auto'")
    reason = _refusal(recipe, device, mode)
    if reason:
        raise ValueError(f"jit='on' cannot be: {reason}; use 'auto'")


def _refusal(recipe: Recipe, device: torch.device, mode: str) -> str:
    """What is known of a recipe before any step; empty: its steps can be captured."""
    mesh = recipe.mesh
    if mesh.ep > 1 and model.experts(recipe.model).placement == "plain":
        return (
            f"mesh.ep={mesh.ep}: the rows of each expert are counted on the host; with "
            "moe.placement='moonep' they are not"
        )
    if mesh.pp > 1:
        return f"mesh.pp={mesh.pp}: the schedule of a pipeline runs on the host"
    if recipe.optimizer.offload:
        return "optimizer.offload: a step waits for the copies to the host's memory"
    if mesh.world_size > 1 and mode == "auto":
        return "on several ranks only where it is asked for, with --jit on"
    if device.type == "npu" and mode == "auto":
        return "on an NPU, where nobody has run it, only where it is asked for, with --jit on"
    return ""
