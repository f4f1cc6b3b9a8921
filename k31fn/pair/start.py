"""The state in which the sides of a paired run begin: the same parameters, and each its own
optimiser's state.
"""

from __future__ import annotations

from pathlib import Path

import torch

from k31fn import params, tree
from k31fn.checkpoint.checkpointer import Checkpointer
from k31fn.pair.sides import Side, changed_text, differing
from k31fn.trainer import folder
from k31fn.trainer.adapter_base import check_base
from k31fn.trainer.init_source import start_from
from k31fn.trainer.layout import lay_out
from k31fn.trainer.ranks.agreement import Ranks
from k31fn.trainer.state import (
    TrainState,
    abstract_state,
    completed,
    first_state,
    init_state,
    saved,
)

__all__ = ["start"]


def start(
    a: Side, b: Side, device: torch.device, run: Path | None
) -> tuple[int, tuple[TrainState, TrainState]]:
    """Steps done, and the states of both: their recipes' first ones, or twice a run's newest
    checkpoint.

    Raises:
        ValueError: ``run`` has no checkpoint, or one of another model, or side b has not the state
            of side a.
    """
    layout = lay_out(a.recipe)
    if run is None:
        state = init_state(layout, device)
        if a.recipe.init:
            state = start_from(a.recipe.init, layout, state, Ranks(), device)
        return 0, (state, _beside(state, b))
    _check_states(a, b, run)
    with Checkpointer(folder.resolve(run) / "checkpoints", read_only=True) as checkpoints:
        done = checkpoints.latest()
        if done is None:
            raise ValueError(f"start={str(run)!r}: the run has no complete checkpoint")
        check_base(a.recipe, checkpoints.metadata(done).get("base", ""))
        stored = checkpoints.restore(done, saved(abstract_state(layout), layout), device=device)
    state = completed(stored, layout, device)
    # a copy: each run's step writes into its own state
    return done, (state, tree.map(torch.clone, state))


def _beside(state: TrainState, b: Side) -> TrainState:
    """The first state of side b with the parameters of ``state``, in its own dtype."""
    # drawn once and copied, not drawn again: side b may draw in another dtype
    copied = tree.map(torch.clone, state)
    layout = lay_out(b.recipe)
    weights = params.cast(copied.params, layout.specs, b.recipe.precision.param)
    return first_state(layout, weights, copied.balance)


def _check_states(a: Side, b: Side, run: Path) -> None:
    other = differing(_tensors(a), _tensors(b))
    if other:
        fields = changed_text(a.recipe, b.recipe)
        raise ValueError(
            f"start={str(run)!r}: a checkpoint has one state, and side b's ({fields}) is another "
            "than side a's "
            f"({len(other)} tensors, such as {other[0]}); set these for both, or begin without "
            "--start"
        )


def _tensors(side: Side) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of each tensor of the side's state."""
    # abstract: a checkpoint is refused before a side's memory is taken
    pairs = tree.flatten_with_paths(abstract_state(lay_out(side.recipe)))
    return {path: (x.shape, x.dtype) for path, x in pairs}
