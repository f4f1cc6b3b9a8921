"""Saving and restoring a tree of tensors, one folder per run."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from k31fn import tree
from k31fn.checkpoint import process, structure, writer

__all__ = ["CheckpointError", "Checkpointer", "DamagedCheckpointError"]

_LOCK_WAIT_S = 30.0


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. Nothing that was complete before has been lost."""


class DamagedCheckpointError(CheckpointError):
    """A complete checkpoint no longer holds what was saved."""


class Checkpointer:
    """The checkpoints of one run: ``DIRECTORY/<step>``, each complete or absent.

    Use it in a ``with`` block: leaving it waits for the last save and ends the writer process, which starts with the
    first request. A writing checkpointer holds a lock on its directory until then. If the training process is killed,
    its writer finishes the save that was under way and exits.

    Args:
        directory: made if it is missing.
        keep: newest complete steps to keep; older ones are deleted after each save.
        read_only: changes nothing in the directory and may be used while a run writes there.

    Raises:
        ValueError: a bad argument.
        CheckpointError: another process is writing there.
    """

    def __init__(self, directory: str | Path, *, keep: int = 2, read_only: bool = False) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1: the newest complete step is never deleted")
        self.directory = Path(directory)
        self._keep = 0 if read_only else keep
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"directory={str(directory)!r} is a file; checkpoints need a folder")
        self._lock: tuple[int, ...] = ()
        if not read_only:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = (_lock(self.directory),)
        self._buffer = process.open_buffer()
        self._writer: process.WriterProcess | None = None
        self._open: tuple[str, int] | None = None  # the request under way: its operation and step

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # the error that ends the block stays the one that is seen

    def close(self) -> None:
        """Waits for the last save, ends the writer and lets go of the directory. A second call does nothing.

        Raises:
            CheckpointError: as :meth:`wait`.
        """
        try:
            self.wait()
        finally:
            self._stop_writer()
            for descriptor in (*self._lock, *((self._buffer,) if self._buffer >= 0 else ())):
                os.close(descriptor)
            self._lock, self._buffer = (), -1

    def steps(self) -> list[int]:
        """The complete steps, ascending."""
        return writer.complete_steps(self.directory)

    def latest(self, *, on_damage: Callable[[str], object] | None = None) -> int | None:
        """The newest complete step, or None if there is none.

        Args:
            on_damage: if given, every tensor of that step is read and checked. A damaged step is set aside (renamed to
                ``<step>.damaged``, unless read-only), ``on_damage`` is called with what happened, and the step
                before it is tried. If not given, an older step is never returned in place of a damaged one.

        Raises:
            DamagedCheckpointError: without ``on_damage``, the newest step's manifest is damaged.
            CheckpointError: the writer failed.
        """
        for step in reversed(self.steps()):
            try:
                self._manifest(step)
                if on_damage:
                    self.wait()
                    self._ask("verify", step)
            except DamagedCheckpointError as error:
                if not on_damage:
                    raise
                on_damage(f"{error}{self._set_aside(step)}")
            else:
                return step
        return None

    def metadata(self, step: int) -> dict[str, Any]:
        """What was given to :meth:`save` at that step.

        Raises:
            ValueError: there is no such complete step.
            DamagedCheckpointError: its manifest is damaged.
        """
        return self._manifest(step)["metadata"]

    def save(self, step: int, state: Any, metadata: Mapping[str, Any] | None = None) -> None:
        """Saves a tree of tensors; returns when they are copied, the files are written in the background.

        Waits first for the save before it. Afterwards the tensors may be changed at once. Names are the tree's paths.

        Args:
            step: the number of steps done.
            state: tensors on any device.
            metadata: whatever else resuming needs, as JSON data.

        Raises:
            ValueError: a bad argument, or the step is complete already: what is saved is not overwritten.
            CheckpointError: the save before this one failed, or there is no memory for the copy; this step has not
                been saved.
        """
        if not self._keep:
            raise ValueError("read_only=True: this checkpointer cannot save; open the directory for writing")
        if type(step) is not int or step < 0:
            raise ValueError(f"step={step!r} must be an int of at least 0")
        tensors = structure.named_tensors(state, "state")
        slots = process.pack(tensors)
        content = {"tensors": {n: s._asdict() for n, s in slots.items()}, "metadata": dict(metadata or {})}
        try:
            header = json.dumps(content, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise ValueError(f"metadata is not JSON data: {error}; tensors belong in state") from error
        self.wait()
        if step in self.steps():
            raise ValueError(
                f"step={step} is complete in {self.directory} and is not overwritten; saved: {self.steps()}"
            )
        for name, room in self._map(slots, header).items():
            room.copy_(tensors[name].detach())
        self._request("save", step, header=len(header))

    def wait(self) -> None:
        """Waits for the save under way, if there is one: afterwards it is complete, on disk.

        Raises:
            CheckpointError: it failed. Said once; the next save starts afresh.
        """
        if self._open is None:
            return
        operation, step = self._open
        answer = self._answer()
        if operation == "save" and answer.error:  # any other was interrupted by an exception: its answer is for nobody
            complete = self.steps()
            became = "is saved, but cleaning up after it failed" if step in complete else "is not saved"
            raise CheckpointError(
                f"{self.directory}: step {step} {became}: {answer.error}; complete steps: {complete or 'none'}"
            )

    def restore(self, step: int, like: Any, *, partial: bool = False, device: torch.device | str | None = None) -> Any:
        """The tree that was saved at ``step``, in new tensors, bit by bit.

        Args:
            step: a complete step.
            like: a tree of tensors with the structure, shapes and dtypes of what was saved; meta tensors will do.
            partial: ``like`` may lack parts of what was saved, such as the optimiser's state.
            device: where to put the tensors; if None, each where its counterpart in ``like`` is, and for
                a meta tensor the CPU.

        Raises:
            ValueError: there is no such complete step, or ``like`` differs from what was saved; lists all differences.
            DamagedCheckpointError: a tensor is not what was saved; names it.
            CheckpointError: the writer failed, or an earlier save that was still under way.
        """
        wanted = structure.named_tensors(like, "like")
        structure.check_alike(self.directory / str(step), self._manifest(step)["tensors"], wanted, partial)
        self.wait()
        slots = process.pack(wanted)
        header = json.dumps({"tensors": {n: s._asdict() for n, s in slots.items()}}).encode()
        read = self._map(slots, header)
        self._ask("read", step, header=len(header))

        def place(name: str, x: Tensor) -> Tensor:
            target = device or (x.device if not x.is_meta else "cpu")
            return read[name].to(target, copy=True)

        return tree.map_with_path(place, like)

    def _manifest(self, step: int) -> dict[str, Any]:
        try:
            return writer.read_manifest(self.directory, step)
        except writer.DamagedError as error:
            if step in self.steps():
                raise DamagedCheckpointError(f"{self.directory / str(step)}: {error}") from error
            complete = self.steps() or "none"
            raise ValueError(f"step={step} is not complete in {self.directory}; complete: {complete}") from None

    def _opened_buffer(self) -> int:
        if self._buffer < 0:
            raise ValueError(f"the checkpointer of {self.directory} is closed; make a new one")
        return self._buffer

    def _map(self, slots: dict[str, process.Slot], header: bytes) -> dict[str, Tensor]:
        buffer = self._opened_buffer()
        try:
            return process.map_tensors(buffer, slots, header)
        except OSError as error:
            size = sum(s.nbytes for s in slots.values())
            raise CheckpointError(f"no memory to copy a state of {size:,} bytes for the writer: {error}") from error

    def _ask(self, operation: str, step: int, **fields: Any) -> None:
        """A request whose answer is waited for."""
        self._request(operation, step, **fields)
        answer = self._answer()
        if answer.error:
            kind = DamagedCheckpointError if answer.damaged else CheckpointError
            raise kind(f"{self.directory / str(step)}: {answer.error}")

    def _request(self, operation: str, step: int, **fields: Any) -> None:
        assert self._open is None
        if self._writer is not None and not self._writer.running():
            self._stop_writer()
        if self._writer is None:
            buffer = self._opened_buffer()
            try:
                self._writer = process.WriterProcess(self.directory, buffer, keep=self._keep, inherited=self._lock)
            except OSError as error:
                raise CheckpointError(f"the checkpoint writer cannot be started: {error}") from error
        self._open = (operation, step)
        self._writer.request(op=operation, step=step, **fields)

    def _answer(self) -> process.Answer:
        assert self._writer is not None
        answer = self._writer.answer()
        self._open = None
        return answer

    def _set_aside(self, step: int) -> str:
        if not self._keep:
            return ""
        names = (f"{step}.damaged{n or ''}" for n in range(1000))
        name = next(n for n in names if not (self.directory / n).exists())
        os.rename(self.directory / str(step), self.directory / name)
        return f"; set aside as {name}"

    def _stop_writer(self) -> None:
        if self._writer is not None:
            self._writer.stop()
            self._writer = None


def _lock(directory: Path) -> int:
    """A descriptor that holds the directory's lock as long as this process or its writer has it open."""
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:  # perhaps the writer of a run that was killed, at its last save
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise CheckpointError(f"{directory}: another process is writing checkpoints here") from None
            time.sleep(0.1)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                return descriptor  # a file system without locks; the lock only guards against a second run by mistake
            os.close(descriptor)
            raise
