"""Saving and restoring a tree of tensors, one folder per run."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from k31fn import tree
from k31fn.checkpoint import state_tree, step_folders
from k31fn.checkpoint.background_saver import BackgroundSaver
from k31fn.checkpoint.errors import CheckpointError, DamagedCheckpointError
from k31fn.checkpoint.lock import lock
from k31fn.checkpoint.rank_group import RankGroup
from k31fn.checkpoint.shared_buffer import pack
from k31fn.checkpoint.state_layout import StateLayout
from k31fn.checkpoint.waits import Patience
from k31fn.checkpoint.writer_session import WriterSession
from k31fn.parallel.mesh import MeshAxes

__all__ = ["Checkpointer"]

_ONE_RANK = MeshAxes()


class Checkpointer:
    """The checkpoints of one run: ``DIRECTORY/<step>``, each complete or absent.

    Use it in a ``with`` block: leaving it waits for the last save and ends the writer process,
    which starts with the first request. A writing checkpointer holds a lock on its directory until
    then. If the training processes are killed, their writers finish the save that was under way, if
    all ranks had made their copies, and exit.

    On several ranks, one process or thread each, every rank makes one and calls the same methods in
    the same order. Each writes what it owns and reads what it wants, all in one directory, which
    every host must see. An error is raised on all of them, with the rank and its place in the mesh.

    Args:
        directory: made if it is missing.
        keep: newest complete steps to keep; older ones are deleted after each save.
        keep_every: steps that are multiples of it also stay; 0: none.
        keep_best: so many steps with the lowest scores also stay.
        read_only: changes nothing in the directory and may be used while a run writes there.
        axes: of the ranks' mesh, bound to this one; none: it is the only rank.
        on_wait: is told if another process is writing there, before up to half a minute is waited
            for its end, and now and then while a writer takes long.
        hurried_s: for how many seconds this rank has wanted to end; 0: it has time. Once a rank
            has none, a save that does not come to its end is left to its writer.

    Raises:
        ValueError: a bad argument.
        CheckpointError: another process is writing there.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int = 2,
        keep_every: int = 0,
        keep_best: int = 0,
        read_only: bool = False,
        axes: MeshAxes = _ONE_RANK,
        on_wait: Callable[[str], object] = lambda text: None,
        hurried_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        if keep < 1:
            raise ValueError(
                f"keep={keep} must be at least 1: the newest complete step is never deleted"
            )
        if keep_every < 0 or keep_best < 0:
            raise ValueError(
                f"keep_every={keep_every}, keep_best={keep_best}: both must be at least 0; 0 "
                "keeps none"
            )
        self.directory = Path(directory)
        self._ranks = RankGroup(axes)
        self._lock: tuple[int, ...] = ()
        self._ranks.run_on_all(lambda: self._lock_directory(read_only, on_wait))
        # One for all ranks, drawn anew by each run: what a rank that outlived its run still writes
        # lies in a folder of another name.
        self._token = "" if read_only else str(self._ranks.from_first(secrets.token_hex(4)))
        setup = {
            "directory": str(self.directory.resolve()),
            "rank": self._ranks.rank,
            "ranks": self._ranks.size,
            "token": self._token,
            "keep": step_folders.Retention(keep, keep_every, keep_best),
        }
        patience = Patience(on_wait, hurried_s)
        # The writer inherits the lock: it lasts until the last save of a killed run is written.
        self._session = WriterSession(setup, self._lock, patience)
        self._saver = BackgroundSaver(
            self.directory, self._token, self._ranks, self._session, patience
        )

    def _lock_directory(self, read_only: bool, on_wait: Callable[[str], object]) -> None:
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(
                f"directory={str(self.directory)!r} is a file; checkpoints need a folder"
            )
        if self._ranks.first and not read_only:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = (lock(self.directory, on_wait),)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close(together=error is None or self._ranks.size == 1)
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # the error that ends the block stays the one that is seen

    def close(self, *, together: bool = True) -> None:
        """Waits for the last save, ends the writer and lets go of the directory. A second call does
        nothing.

        Args:
            together: all ranks call it. If not, since this rank failed or lost another, a save
                under way is left to the writers.

        Raises:
            CheckpointError: as :meth:`wait`.
        """
        try:
            if together:
                self.wait()
        finally:
            self._session.close(wait=together and not self._saver.gave_up)
            self._saver.drop()
            for descriptor in self._lock:
                os.close(descriptor)
            self._lock = ()

    def steps(self) -> list[int]:
        """The complete steps, ascending."""
        return step_folders.complete_steps(self.directory)

    def set_aside(self) -> list[str]:
        """The names of damaged steps that :meth:`latest` set aside, now or before."""
        if not self.directory.is_dir():
            return []
        return sorted(folder.name for folder in self.directory.glob("*.damaged*"))

    def latest(self, *, on_damage: Callable[[str], object] | None = None) -> int | None:
        """The newest complete step, or None if there is none.

        Args:
            on_damage: if given, every tensor of that step is read and checked, by each rank a
                share. A damaged step is set aside (renamed to ``<step>.damaged``, unless
                read-only), ``on_damage`` is called with what happened, and the step before it is
                tried. Else an older step is never returned in place of a damaged one.

        Raises:
            DamagedCheckpointError: without ``on_damage``, the newest step's manifest is damaged.
            CheckpointError: a writer failed.
        """
        if on_damage:
            self.wait()
        # The first rank's list: a network file system may show another rank an older folder.
        for step in reversed(self._ranks.from_first(self.steps())):
            try:
                self._ranks.run_on_all(lambda step=step: self._check(step, bool(on_damage)))
            except DamagedCheckpointError as error:
                if not on_damage:
                    raise
                note = self._ranks.run_on_all(lambda step=step: self._set_aside(step))
                on_damage(f"{error}{self._ranks.from_first(note)}")
            else:
                return step
        return None

    def _check(self, step: int, values: bool) -> None:
        self._manifest(step)
        if values:
            self._ask("verify", step, share=[self._ranks.rank, self._ranks.size])

    def metadata(self, step: int) -> dict[str, Any]:
        """What was given to :meth:`save` at that step.

        Raises:
            ValueError: there is no such complete step.
            DamagedCheckpointError: its manifest is damaged.
        """
        return self._manifest(step)["metadata"]

    def prepare(self, state: Any, layout: StateLayout | None = None) -> None:
        """Starts the writer and has it provide the memory for copies of such a state, so that no
        save waits for either.

        Waits for a save under way, whose copies are in that memory.

        Args:
            state: as for :meth:`save`.
            layout: as for it.

        Raises:
            CheckpointError: there is not so much memory, or the save before failed.
        """
        self._saver.prepare(state, layout)

    def save(
        self,
        step: int,
        state: Any,
        metadata: Mapping[str, Any] | None = None,
        *,
        layout: StateLayout | None = None,
        scores: Mapping[int, float] | None = None,
    ) -> None:
        """Saves a tree of tensors; returns when they are copied, the files are written in the
        background.

        Waits first for the save before it. Afterwards the tensors may be changed at once. Names are
        the tree's paths.

        Args:
            step: the number of steps done.
            state: what this rank holds, on any device.
            metadata: whatever else resuming needs, as JSON data; the first rank's is kept.
            layout: the whole state and how it is split; None: every rank holds the same, whole.
            scores: of steps saved before, the lower the better, for ``keep_best``.

        Raises:
            ValueError: a bad argument, or the step is complete already: what is saved is not
                overwritten.
            CheckpointError: the save before this one failed, or there is no memory for the copy;
                this step has not been saved.
        """
        if not self._token:
            raise ValueError(
                "read_only=True: this checkpointer cannot save; open the directory for writing"
            )
        if type(step) is not int or step < 0:
            raise ValueError(f"step={step!r} must be an int of at least 0")
        self._saver.save(step, state, metadata or {}, layout=layout, scores=scores or {})

    def wait(self) -> None:
        """Waits for the save under way, if there is one: afterwards it is complete, on disk.

        Raises:
            NotSavedError: it failed. Said once; the next save starts afresh.
        """
        self._saver.wait()

    def poll(self) -> None:
        """Takes the save under way, if there is one, as far as it goes without waiting for a
        writer.

        Call it now and then while training goes on, on every rank: on several, a step becomes
        complete in such a call.

        Raises:
            CheckpointError: as :meth:`wait`.
        """
        self._saver.poll()

    def restore(
        self,
        step: int,
        like: Any,
        *,
        partial: bool = False,
        device: torch.device | str | None = None,
        layout: StateLayout | None = None,
    ) -> Any:
        """The tree that was saved at ``step`` on whatever mesh, or this rank's part of it, in new
        tensors, bit by bit.

        Args:
            step: a complete step.
            like: a tree of tensors with the structure, shapes and dtypes of what this rank wants;
                meta tensors will do.
            partial: ``like`` may lack parts of what was saved, such as the optimiser's state.
            device: where to put the tensors; if None, each where its counterpart in ``like`` is,
                and for a meta tensor the CPU.
            layout: the whole state and how ``like`` splits it; None: ``like`` is whole.

        Raises:
            ValueError: there is no such complete step, or ``like`` differs from what was saved;
                lists all differences.
            DamagedCheckpointError: a tensor is not what was saved; names it, its part, and the rank
                that wrote it.
            CheckpointError: a writer failed, or an earlier save that was still under way.
        """
        self.wait()
        read = self._ranks.run_on_all(lambda: self._read(step, like, partial, layout))

        def place(name: str, x: Tensor) -> Tensor:
            target = device or (x.device if not x.is_meta else "cpu")
            # A copy also on the CPU: what was read lies in the memory that the next save uses.
            return read[name].to(target, copy=True)

        return tree.map_with_path(place, like)

    def _read(
        self, step: int, like: Any, partial: bool, layout: StateLayout | None
    ) -> dict[str, Tensor]:
        wanted = state_tree.named_tensors(like, "like")
        parts = state_tree.parts_of(wanted, layout, self._ranks.axes)
        whole = wanted if layout is None else dict(tree.flatten_with_paths(layout.whole))
        if partial:
            whole = {name: whole[name] for name in wanted}
        saved = self._manifest(step)["tensors"]
        state_tree.check_alike(self.directory / str(step), saved, whole, partial)
        slots = pack({name: (x, parts[name].box) for name, x in wanted.items()})
        read, header = self._session.hold(slots, {})
        self._ask("read", step, header=header)
        return read

    def _manifest(self, step: int) -> dict[str, Any]:
        try:
            return step_folders.read_manifest(self.directory, step)
        except step_folders.DamagedError as error:
            if step in self.steps():
                raise DamagedCheckpointError(f"{self.directory / str(step)}: {error}") from error
            complete = self.steps() or "none"
            raise ValueError(
                f"step={step} is not complete in {self.directory}; complete: {complete}"
            ) from None

    def _ask(self, operation: str, step: int, **fields: Any) -> None:
        """A request whose answer is waited for."""
        try:
            self._session.ask(operation, step=step, **fields)
        except CheckpointError as error:
            raise type(error)(f"{self.directory / str(step)}: {error}") from None

    def _set_aside(self, step: int) -> str:
        """Renames a damaged step, on the first rank; gives a note of it."""
        if not self._ranks.first or not self._token:
            return ""
        # The same step may have been set aside before, by a run that was started again.
        name = f"{step}.damaged"
        number = 0
        while (self.directory / name).exists():
            number += 1
            name = f"{step}.damaged{number}"
        os.rename(self.directory / str(step), self.directory / name)
        return f"; set aside as {name}"
