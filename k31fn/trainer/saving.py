"""The checkpoints of a run: what they hold, and how its ranks write and read them together."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from k31fn import data, tree
from k31fn.checkpoint.checkpointer import Checkpointer
from k31fn.checkpoint.errors import CheckpointError
from k31fn.trainer.adapter_base import check_base, fingerprint
from k31fn.trainer.console import View
from k31fn.trainer.layout import RankLayout
from k31fn.trainer.place import Place
from k31fn.trainer.ranks.agreement import OtherRankError, Ranks
from k31fn.trainer.state import TrainState, abstract_state, checkpoint_layout, completed, saved

__all__ = ["Saves"]


class Saves:
    """The checkpoints in a run's folder, seen from one rank. Every rank calls the same; what fails,
    fails on all.

    Args:
        layout: of the run on this rank.
        folder: its checkpoints'.
        text: the fingerprint of what it trains on.
        view: is told of another run that writes there, of damaged checkpoints, and of another text.
        ranks: of the run.
        hurried_s: for how many seconds the run has wanted to end.

    Raises:
        ValueError: the base of the run's adapters is no folder that they can be for.
        CheckpointError: another run writes there.
        OSError: the folder cannot be written.
        OtherRankError: one of these on the first rank, as in all methods.
    """

    def __init__(
        self,
        layout: RankLayout,
        folder: Path,
        text: str,
        view: View,
        ranks: Ranks,
        hurried_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        recipe = layout.recipe
        self._layout = layout
        self._recipe = recipe
        self._text = text
        self._view = view
        self._ranks = ranks
        # Of the base as it is now, when the run reads it: what is there at a later save may be
        # another one.
        self._base = str(ranks.on_first(lambda: fingerprint(recipe)))
        self._hurried_s = hurried_s
        self._place: Place | None = None
        # of the folder of the run; of a rank that reads no other files its checkpoints' will do
        ranks.on_first(lambda: self._hold(folder))
        self._checkpoints = self._open(folder)
        self._on_disk = checkpoint_layout(recipe)
        self._complete = 0  # newest step that is known to be saved
        self._under_way = 0  # a later one that is being saved

    def _hold(self, folder: Path) -> None:
        run = folder.parent
        try:
            self._place = Place(run)
            # without its parents, or a run that is renamed now had a second folder of its name
            folder.mkdir(exist_ok=True)
        except FileNotFoundError as error:
            raise ValueError(
                f"{run} is not there any more: it was renamed or removed as the run began; start "
                "it again"
            ) from error

    def _open(self, folder: Path) -> Checkpointer:
        recipe = self._recipe
        return self._ranks.alike(
            lambda: Checkpointer(
                folder,
                keep=recipe.keep,
                keep_every=recipe.keep_every,
                keep_best=recipe.keep_best,
                axes=self._ranks.axes,
                on_wait=self._view.note,
                hurried_s=self._hurried_s,
            )
        )

    def latest(self) -> int | None:
        """The newest complete step that is not damaged; None if nothing was ever saved.

        Raises:
            CheckpointError: all that was saved is damaged: a run that began anew would overwrite
                what it wrote down.
        """
        newest = self._ranks.alike(lambda: self._checkpoints.latest(on_damage=self._view.note))
        if newest is None:
            self._ranks.on_first(self._refuse_to_begin_anew)
        self._complete = newest or 0
        return newest

    def _refuse_to_begin_anew(self) -> None:
        aside = self._checkpoints.set_aside()
        if aside:
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
        layout = self._layout
        self._ranks.on_first(lambda: self._check(self._checkpoints.metadata(step)))
        like = saved(abstract_state(layout), layout)
        # An optimiser's state that lives on the host may not fit on the device: read all to the
        # host, then move the rest.
        offload = self._recipe.optimizer.offload
        restore = functools.partial(
            self._checkpoints.restore,
            step,
            like,
            device=torch.device("cpu") if offload else device,
            layout=self._on_disk,
        )
        state = self._ranks.alike(restore)
        if offload:
            state = _placed(state, device)
        return completed(state, layout, device)

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
        part = saved(state, self._layout)
        self._ranks.alike(lambda: self._checkpoints.prepare(part, self._on_disk))

    def save(self, step: int, state: TrainState, scores: Mapping[int, float]) -> None:
        """Saves the state after so many steps, in the background, unless it is saved or being
        saved; see :meth:`Checkpointer.save`.

        Where the run's folder is now: one that was renamed is followed, one that was removed is
        made anew.

        Raises:
            CheckpointError: the save before this one failed, or there is no memory for the copy.
        """
        if step <= max(self._complete, self._under_way):
            return
        where = self._ranks.on_first(self._moved)
        if where:
            self._follow(Path(where))
        # that of a save which failed in deleting older steps is there all the same
        if self._ranks.on_first(lambda: step in self._checkpoints.steps()):
            self._complete = step
            return
        part = saved(state, self._layout)
        metadata = {"text": self._text, "base": self._base}
        save = functools.partial(
            self._checkpoints.save, step, part, metadata, layout=self._on_disk, scores=scores
        )
        self._watching(save)
        self._complete = self._under_way or self._complete
        self._under_way = step
        if where:
            self._view.note(f"the state after {step} steps goes to {where}")

    def _moved(self) -> str:
        assert self._place is not None, "only the first rank looks at folders"
        return self._place.moved()

    def _follow(self, run: Path) -> None:
        """Goes on in another folder of the run."""
        self._view.note(f"{self._checkpoints.directory.parent} is not there any more")
        # a save to where the folder was may have failed: this one takes its place
        with contextlib.suppress(CheckpointError, OtherRankError):
            self._checkpoints.close()
        self._checkpoints = self._open(run / "checkpoints")

    def poll(self) -> None:
        """Takes a save under way as far as it goes at once.

        Raises:
            CheckpointError: it failed.
        """
        self._watching(self._checkpoints.poll)

    def _watching(self, action: Callable[[], None]) -> None:
        """On all ranks; if it fails, the save under way is not there."""
        try:
            self._ranks.alike(action)
        except (CheckpointError, OtherRankError):
            self._under_way = 0
            raise

    def close(self, *, together: bool) -> None:
        """Waits for the last save if the ranks are together, else gives it up; a second call does
        nothing.

        Raises:
            CheckpointError: it failed.
        """
        if self._place is not None:
            self._place.close()
        self._ranks.alike(lambda: self._checkpoints.close(together=together))


def _placed(state: TrainState, device: torch.device) -> TrainState:
    """On the device, but for the optimiser's state, which stays on the host."""
    opt_state = state.opt_state
    if device.type != "cpu":
        # copies to a device run beside its work only from pinned memory
        opt_state = tree.map(lambda x: x.pin_memory(), opt_state)
    on_device = tree.map(lambda x: x.to(device), dataclasses.replace(state, opt_state=()))
    return dataclasses.replace(on_device, opt_state=opt_state)
