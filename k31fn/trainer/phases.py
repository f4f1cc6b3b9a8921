"""A run in phases: other rows, other trained parameters, another learning rate from some step on.

The state of the run has the structure of the whole recipe, in every phase: what a phase freezes is
left as it is, with its optimiser state, and goes on in a phase that trains it again. So a
checkpoint does not know the phase.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from k31fn import data, model, optim, tree
from k31fn.config.phase import spans
from k31fn.config.recipe import Recipe
from k31fn.parallel.mesh import MeshAxes
from k31fn.trainer.state import TrainState, abstract_state
from k31fn.trainer.step import Metrics, make_step

__all__ = ["Step", "learning_rate", "make_phase_step", "over_phases"]

_Rows = data.Dataset | data.Mixture
Step = Callable[[TrainState, Sequence[model.Batch], float], tuple[TrainState, Metrics]]


def learning_rate(recipe: Recipe, step: int) -> float:
    """Of a step: by the schedule of its phase, if that has one, else by that of the run."""
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
    parts, starts, used = [], [], dict[int, int]()
    for start, stop in spans(recipe.phases, recipe.steps):
        now = recipe.at(start)
        if now.length not in by_length:
            by_length[now.length] = make(now)
        first = used.get(now.length, 0)
        parts.append(
            dataclasses.replace(by_length[now.length], batch_size=now.batch_size, first_row=first)
        )
        starts.append(start)
        used[now.length] = first + (stop - start) * now.batch_size
    return data.Curriculum(tuple(parts), tuple(starts))


def make_phase_step(recipe: Recipe, step: int, axes: MeshAxes) -> Step:
    """:func:`make_step` for the phase of ``step``, of the state of the whole recipe."""
    now = recipe.at(step)
    run = make_step(now, axes)
    if now.trainable == recipe.trainable:
        return run
    like = abstract_state(now, axes).opt_state

    def part(
        state: TrainState, batches: Sequence[model.Batch], lr: float
    ) -> tuple[TrainState, Metrics]:
        held = dict(tree.flatten_with_paths(state.opt_state))
        own = tree.map_with_path(lambda path, _: held[path], like)
        new, numbers = run(dataclasses.replace(state, opt_state=own), batches, lr)
        stepped = dict(tree.flatten_with_paths(new.opt_state))
        whole = tree.map_with_path(lambda path, old: stepped.get(path, old), state.opt_state)
        return dataclasses.replace(new, opt_state=whole), numbers

    return part
