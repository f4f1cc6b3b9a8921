"""The checkpoints of a run: what they hold, and how its ranks write and read them together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from k31fn import data, tree
from k31fn.checkpoint.checkpointer import Checkpointer
from k31fn.checkpoint.errors import CheckpointError
from k31fn.config.recipe import Recipe
from k31fn.trainer.adapter_base import check_base, fingerprint
from k31fn.trainer.console import View
from k31fn.trainer.ranks.agreement import Ranks
from k31fn.trainer.state import TrainState, abstract_state, completed, layout_of, saved

__all__ = ["Saves"]


class Saves:
    """The checkpoints in a run's folder, seen from one rank. Every rank calls the same; what fails,
    fails on all.

    Args:
        recipe: the run.
        folder: its checkpoints'.
        text: the fingerprint of what it trains on.
        view: is told of another run that writes there, of damaged checkpoints, and of another text.
        ranks: of the run.

    Raises:
        ValueError: the base of the run's adapters is no folder that they can be for.
        CheckpointError: another run writes there.
        OSError: the folder cannot be written.
        OtherRankError: one of these on the first rank, as in all methods.
    """

    def __init__(self, recipe: Recipe, folder: Path, text: str, view: View, ranks: Ranks) -> None:
        self._recipe, self._text, self._view, self._ranks = recipe, text, view, ranks
        self._base = str(
            ranks.on_first(lambda: fingerprint(recipe))
        )  # as it is when the run reads it
        kept: Any = {
            "keep": recipe.keep,
            "keep_every": recipe.keep_every,
            "keep_best": recipe.keep_best,
        }
        self._checkpoints = ranks.alike(
            lambda: Checkpointer(folder, **kept, axes=ranks.axes, on_wait=view.note)
        )
        self._layout = layout_of(recipe)

    def latest(self) -> int | None:
        """The newest complete step that is not damaged; None if nothing was ever saved.

        Raises:
            CheckpointError: all that was saved is damaged: a run that began anew would overwrite
                what it wrote down.
        """
        newest = self._ranks.alike(lambda: self._checkpoints.latest(on_damage=self._view.note))
        if newest is None:
            self._ranks.on_first(self._refuse_to_begin_anew)
        return newest

    def _refuse_to_begin_anew(self) -> None:
        if aside := self._checkpoints.set_aside():
            raise CheckpointError(
                f"{self._checkpoints.directory} has no step that is intact, only "
                f"{', '.join(aside)}; put a good copy "
                "of one back under its number, or start a new run"
            )

    def restore(self, step: int, device: torch.device) -> TrainState:
        """This rank's part of the state after that many steps.

        Raises:
            ValueError: it is not of this recipe.
            CheckpointError: it cannot be read.
        """
        recipe, axes = self._recipe, self._ranks.axes
        self._ranks.on_first(lambda: self._check(self._checkpoints.metadata(step)))
        mine, host = saved(abstract_state(recipe, axes), recipe, axes), recipe.optimizer.offload
        where = torch.device("cpu") if host else device
        restore = functools.partial(
            self._checkpoints.restore, step, mine, device=where, layout=self._layout
        )
        state = self._ranks.alike(restore)
        return completed(_placed(state, device) if host else state, recipe, device, axes)

    def _check(self, metadata: Mapping[str, str]) -> None:
        check_base(self._recipe, metadata.get("base", ""), self._base)
        if metadata.get("text", self._text) != self._text:
            cfg = self._recipe.data
            source = (
                f"data.train={list(cfg.train)}"
                if isinstance(cfg, data.Prepared)
                else f"data.path={cfg.path!r}"
            )
            self._view.note(f"the text of {source} has changed since the checkpoint")

    def prepare(self, state: TrainState) -> None:
        """Has memory and a writer ready for the first save."""
        held = saved(state, self._recipe, self._ranks.axes)
        self._ranks.alike(lambda: self._checkpoints.prepare(held, self._layout))

    def save(self, step: int, state: TrainState, scores: Mapping[int, float]) -> None:
        """Saves the state after so many steps, in the background; see :meth:`Checkpointer.save`.

        Raises:
            CheckpointError: the save before this one failed, or there is no memory for the copy.
        """
        held, metadata = (
            saved(state, self._recipe, self._ranks.axes),
            {"text": self._text, "base": self._base},
        )
        save = functools.partial(
            self._checkpoints.save, step, held, metadata, layout=self._layout, scores=scores
        )
        self._ranks.alike(save)

    def poll(self) -> None:
        """Takes a save under way as far as it goes at once.

        Raises:
            CheckpointError: it failed.
        """
        self._ranks.alike(self._checkpoints.poll)

    def close(self, *, together: bool) -> None:
        """Waits for the last save if the ranks are together, else gives it up; a second call does
        nothing.

        Raises:
            CheckpointError: it failed.
        """
        self._ranks.alike(lambda: self._checkpoints.close(together=together))


def _placed(state: TrainState, device: torch.device) -> TrainState:
    """On the device, but for the optimiser's state, which stays on the host."""
    rest = {
        n: tree.map(lambda x: x.to(device), getattr(state, n))
        for n in ("step", "params", "balance", "key")
    }
    pinned = tree.map(lambda x: x if device.type == "cpu" else x.pin_memory(), state.opt_state)
    return dataclasses.replace(state, **rest, opt_state=pinned)
