"""A run in phases: other rows, other trained parameters, another learning rate from some step on.

The state of the run has the structure of the whole recipe, in every phase: what a phase freezes is
left as it is, with its optimiser state, and goes on in a phase that trains it again. So a
checkpoint does not know the phase.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import Tensor

from k31fn import data, model, optim, tree
from k31fn.config.phase import spans
from k31fn.config.recipe import Recipe
from k31fn.trainer.layout import RankLayout, lay_out
from k31fn.trainer.state import TrainState, abstract_state
from k31fn.trainer.step import Metrics, Step, make_step

__all__ = ["learning_rate", "make_phase_step", "over_phases", "phase_layout"]

_Rows = data.Dataset | data.Mixture


def learning_rate(recipe: Recipe, step: int) -> float:
    """A step's rate: by the schedule of its phase, if that has one, else by that of the run."""
    # computed on the host for every step anew: a run that goes on needs no schedule's state
    o = recipe.optimizer
    number = recipe.phase_of(step)
    phase = recipe.phases[number] if recipe.phases else None
    if phase is None or not phase.peak_lr:
        warmup = min(o.warmup_steps, recipe.steps)
        ends = {"num_steps": recipe.steps, "warmup_steps": warmup}
        if o.schedule == "wsd":
            decay = min(round(o.decay_fraction * recipe.steps), recipe.steps - warmup)
            return optim.warmup_stable_decay(
                step, peak=o.peak_lr, decay_steps=decay, final_fraction=o.final_fraction, **ends
            )
        return optim.warmup_cosine(step, peak=o.peak_lr, final_fraction=o.final_fraction, **ends)
    start, stop = spans(recipe.phases, recipe.steps)[number]
    return optim.warmup_cosine(
        step - start,
        peak=phase.peak_lr,
        num_steps=stop - start,
        warmup_steps=min(phase.warmup_steps, stop - start),
        final_fraction=phase.final_fraction,
    )


def over_phases(recipe: Recipe, make: Callable[[Recipe], _Rows]) -> data.Rows:
    """The rows of the run: those that ``make`` gives for a recipe without phases, phase after
    phase.

    Rows of one length are numbered through all phases that have it.
    """
    if not recipe.phases:
        return make(recipe)
    by_length: dict[int, _Rows] = {}
    parts, starts = [], []
    used: dict[int, int] = {}  # rows by length that earlier phases have taken
    for start, stop in spans(recipe.phases, recipe.steps):
        now = recipe.at(start)
        # phases of one length share their rows, so that no text is seen twice before its epoch
        if now.length not in by_length:
            by_length[now.length] = make(now)
        first = used.get(now.length, 0)
        parts.append(
            dataclasses.replace(by_length[now.length], batch_size=now.batch_size, first_row=first)
        )
        starts.append(start)
        used[now.length] = first + (stop - start) * now.batch_size
    return data.Curriculum(tuple(parts), tuple(starts))


def phase_layout(layout: RankLayout, step: int) -> RankLayout:
    """The layout of the phase of ``step``; the run's own where it has no phases."""
    if not layout.recipe.phases:
        return layout
    return lay_out(layout.recipe.at(step), layout.axes)


def make_phase_step(layout: RankLayout, step: int) -> Step:
    """The step of the phase of ``step``, of the state of the whole recipe.

    Args:
        layout: of the whole run.
        step: any of the phase.
    """
    phase = phase_layout(layout, step)
    phase_step = make_step(phase)
    if phase.recipe.trainable == layout.recipe.trainable:
        return phase_step
    phase_opt_state = abstract_state(phase).opt_state

    def run_step(
        state: TrainState, batches: Sequence[model.Batch], lr: float | Tensor
    ) -> tuple[TrainState, Metrics]:
        # The phase's optimiser knows only what it trains: it is given that part of the state, and
        # the rest goes on as it was.
        before = dict(tree.flatten_with_paths(state.opt_state))
        trained = tree.map_with_path(lambda path, _: before[path], phase_opt_state)
        new, metrics = phase_step(dataclasses.replace(state, opt_state=trained), batches, lr)
        stepped = dict(tree.flatten_with_paths(new.opt_state))
        whole = tree.map_with_path(lambda path, old: stepped.get(path, old), state.opt_state)
        return dataclasses.replace(new, opt_state=whole), metrics

    return run_step
