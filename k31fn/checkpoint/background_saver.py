"""The save under way: copied for the writers, written by them, committed by the first one's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k31fn import tree
from k31fn.checkpoint import state_tree, step_folders
from k31fn.checkpoint.errors import NotSavedError
from k31fn.checkpoint.rank_group import RankGroup
from k31fn.checkpoint.shared_buffer import pack
from k31fn.checkpoint.state_layout import StateLayout
from k31fn.checkpoint.waits import Patience, Wait
from k31fn.checkpoint.writer_process import WriterAnswer
from k31fn.checkpoint.writer_session import WriterSession

__all__ = ["BackgroundSaver"]

# Who has no more time waits for a save three times as long as the longest took, and so much more.
# torchrun and most schedulers kill 30 s after their signal.
_LEAST_WAIT_S = 15.0
_WAIT_FACTOR = 3.0


@dataclass
class _PendingSave:
    """A save that the writers were asked for.

    Each rank's writer writes its part; when all are through, the first one's commits the step.

    Attributes:
        step: its number.
        commit: the fields of that request; only the first rank's say everything.
        committing: whether all parts are written.
        seconds: that this rank's writer has taken so far.
    """

    step: int
    commit: dict[str, Any]
    committing: bool = False
    seconds: float = 0.0


class BackgroundSaver:
    """One save at a time, of all ranks together.

    Args:
        directory: of the checkpoints.
        token: of this run, in the name of an unfinished step.
        ranks: that save together.
        session: with this rank's writer.
        patience: with a save that takes long.
    """

    def __init__(
        self,
        directory: Path,
        token: str,
        ranks: RankGroup,
        session: WriterSession,
        patience: Patience,
    ) -> None:
        self._directory = directory
        self._token = token
        self._ranks = ranks
        self._session = session
        self._patience = patience
        self._longest_s = 0.0  # that this rank's writer took for a save
        self._pending: _PendingSave | None = None
        self._known: list[int] = []  # complete steps, when last looked: a disk may hang by now
        self._gave_up = ""

    @property
    def gave_up(self) -> bool:
        """Whether a save was left to its writers, which may still end it."""
        return bool(self._gave_up)

    def drop(self) -> None:
        """Leaves a save under way to the writers: nobody here waits for it any more."""
        self._pending = None

    def prepare(self, state: Any, layout: StateLayout | None) -> None:
        """Starts the writer and provides memory (:meth:`Checkpointer.prepare`)."""
        self.wait()
        self._ranks.run_on_all(lambda: self._provide_memory(state, layout))

    def save(
        self,
        step: int,
        state: Any,
        metadata: Mapping[str, Any],
        *,
        layout: StateLayout | None,
        scores: Mapping[int, float],
    ) -> None:
        """Copies a state and starts its writing (:meth:`Checkpointer.save`)."""
        self.wait()
        if self._gave_up:
            # the writer that was left may still read from the memory for copies
            raise NotSavedError(
                f"{self._directory}: step {step} is not saved: {self._gave_up}", self._gave_up
            )
        header = self._ranks.run_on_all(lambda: self._copy(step, state, metadata, layout))
        self._known = self._ranks.from_first(step_folders.complete_steps(self._directory))
        scored = {str(s): float(score) for s, score in scores.items() if s in self._known}
        self._ranks.run_on_all(lambda: self._session.begin("write", step=step, header=header))
        pending = _PendingSave(step, {"header": header, "scores": scored})
        self._pending = pending
        if self._ranks.size == 1:
            # Queued behind the write, so that the step becomes complete without a call of ours.
            self._request_commit(pending)
        elif self._ranks.first:
            # If the training processes die before they can tell each other that all parts are
            # written, this writer looks for them itself.
            self._session.then("will", awaited=False, step=step, **pending.commit)

    def wait(self) -> None:
        """Waits for the save under way (:meth:`Checkpointer.wait`)."""
        wait = Wait(self._patience, self._describe)
        while True:
            # Rather than wait for this rank's writer: ranks hear of each other, and a writer that
            # hangs, as on a network's disk, holds nobody for ever.
            self.poll()
            if self._pending is None:
                return
            self._check_time(self._pending, wait)
            wait.pause()

    def poll(self) -> None:
        """Goes on with the save under way, without waiting (:meth:`Checkpointer.poll`)."""
        while self._pending is not None:
            if not all(self._ranks.gather(self._is_ready(self._pending))):
                return
            self._advance(self._pending)

    def _is_ready(self, pending: _PendingSave) -> bool:
        return not self._awaits_writer(pending) or self._session.answered()

    def _describe(self) -> str:
        assert self._pending is not None
        return (
            f"{self._directory}: waits for the save of step {self._pending.step} (complete steps: "
            f"{self._known or 'none'})"
        )

    def _check_time(self, pending: _PendingSave, wait: Wait) -> None:
        """Leaves a save to its writers once the run has no more time to wait for it."""
        over = wait.is_over(_LEAST_WAIT_S + _WAIT_FACTOR * self._longest_s)
        # One rank ends it for all, or the others would go on waiting for that one.
        if not any(self._ranks.gather(over)):
            return
        self._pending = None
        seconds = self._ranks.from_first(round(wait.seconds))
        self._gave_up = f"its writer has not answered for {seconds} s and is left to go on alone"
        raise NotSavedError(
            f"{self._directory}: step {pending.step} is not known to be saved: {self._gave_up}; "
            f"complete steps before it: {self._known or 'none'}",
            self._gave_up,
        )

    def _provide_memory(self, state: Any, layout: StateLayout | None) -> None:
        named = state_tree.named_tensors(state, "state")
        owned = state_tree.owned(named, layout, self._ranks.axes)
        self._session.hold(pack(owned), {})
        self._session.begin("touch", awaited=False)

    def _copy(
        self, step: int, state: Any, metadata: Mapping[str, Any], layout: StateLayout | None
    ) -> tuple[int, int]:
        """Copies what this rank owns into the writer's memory; gives the header's place there."""
        named = state_tree.named_tensors(state, "state")
        complete = step_folders.complete_steps(self._directory)
        if step in complete and not (self._directory / str(step) / step_folders.MANIFEST).exists():
            raise ValueError(
                f"step={step}: {self._directory / str(step)} is in the way, a folder without "
                f"{step_folders.MANIFEST}; move it elsewhere"
            )
        if step in complete:
            raise ValueError(
                f"step={step} is complete in {self._directory} and is not overwritten; saved: "
                f"{complete}"
            )
        owned = state_tree.owned(named, layout, self._ranks.axes)
        header: dict[str, Any] = {"metadata": _check_metadata(metadata)}
        if self._ranks.first:
            whole = named if layout is None else dict(tree.flatten_with_paths(layout.whole))
            header["tensors"] = {name: state_tree.declared(x) for name, x in whole.items()}
        copies, place = self._session.hold(pack(owned), header)
        # The caller may change its tensors as soon as we return, so the writer never sees them.
        for name, copy in copies.items():
            copy.copy_(owned[name][0].detach())
        return place

    def _awaits_writer(self, pending: _PendingSave) -> bool:
        """Whether this rank's writer has something to answer: only the first one's commits."""
        return self._ranks.first or not pending.committing

    def _request_commit(self, pending: _PendingSave) -> None:
        if self._ranks.first:
            self._session.then("commit", step=pending.step, **pending.commit)

    def _advance(self, pending: _PendingSave) -> None:
        """Waits for the answers to one request: the write's, then the commit's."""
        answer = self._session.answer() if self._awaits_writer(pending) else WriterAnswer()
        pending.seconds += answer.seconds
        error = self._ranks.failures(answer.error)
        if not error and not pending.committing:
            if self._ranks.size > 1:
                self._request_commit(pending)
            pending.committing = True
            return
        self._pending = None
        self._longest_s = max(self._longest_s, pending.seconds)
        if error:
            self._give_up(pending, error, bool(self._ranks.from_first(answer.committed)))

    def _give_up(self, pending: _PendingSave, error: str, committed: bool) -> None:
        if self._ranks.size == 1 and not pending.committing:
            self._session.answer()  # to the commit that was queued, which has failed in turn
        step = pending.step
        complete = self._ranks.from_first(step_folders.complete_steps(self._directory))
        # By the writer's word: another folder may have the step's name.
        became = "is saved, but cleaning up after it failed" if committed else "is not saved"
        if self._ranks.first and self._ranks.size > 1:
            # A single writer removes its own; of several, some have written whole parts.
            unfinished = step_folders.unfinished(self._directory, step, self._token)
            shutil.rmtree(unfinished, ignore_errors=True)
        raise NotSavedError(
            f"{self._directory}: step {step} {became}: {error}; complete steps: "
            f"{complete or 'none'}",
            error,
        )


def _check_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's metadata.

    Raises:
        ValueError: it is not JSON data.
    """
    try:
        json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata is not JSON data: {error}; tensors belong in state") from error
    return dict(metadata)
