"""A rank's writer, started when it is first needed and again after it died, with the memory that
both share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from k31fn.checkpoint.errors import CheckpointError, DamagedCheckpointError
from k31fn.checkpoint.shared_buffer import BufferSlot, SharedBuffer
from k31fn.checkpoint.waits import Patience, Wait
from k31fn.checkpoint.writer_process import WriterAnswer, WriterProcess

__all__ = ["WriterSession"]

_READ_S = 5.0  # that a run which is to end still waits for a read


class WriterSession:
    """Requests to one writer.

    Args:
        setup: the fields of :class:`k31fn.checkpoint.writer.WriterSetup` but the buffer.
        lock: descriptors that a writer inherits.
        patience: with a writer that reads.
    """

    def __init__(self, setup: Mapping[str, Any], lock: tuple[int, ...], patience: Patience) -> None:
        self._setup = setup
        self._patience = patience
        self._lock = lock
        self._buffer = SharedBuffer()
        self.writer: WriterProcess | None = None

    def hold(
        self, slots: Mapping[str, BufferSlot], header: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], tuple[int, int]]:
        """Tensors in the shared memory, and the header behind them (:meth:`SharedBuffer.hold`).

        Raises:
            ValueError: the session is closed.
            CheckpointError: there is not so much memory.
        """
        self._check_open()
        try:
            return self._buffer.hold(slots, header)
        except OSError as error:
            size = sum(s.nbytes for s in slots.values())
            raise CheckpointError(
                f"no memory to copy a state of {size:,} bytes for the writer: {error}"
            ) from error

    def begin(self, operation: str, *, awaited: bool = True, **fields: Any) -> None:
        """Sends a request, and starts a writer if none runs; gives up answers to earlier ones.

        Raises:
            ValueError: the session is closed.
            CheckpointError: the writer cannot be started.
        """
        self._check_open()
        # A writer that was killed costs the save that it was at, not the next one.
        if self.writer is not None and not self.writer.running():
            self._stop()
        if self.writer is None:
            setup = {**self._setup, "buffer": self._buffer.descriptor}
            try:
                self.writer = WriterProcess(setup, self._lock)
            except OSError as error:
                raise CheckpointError(
                    f"the checkpoint writer cannot be started: {error}"
                ) from error
        self.writer.forget()
        self.writer.request(op=operation, awaited=awaited, **fields)

    def then(self, operation: str, *, awaited: bool = True, **fields: Any) -> None:
        """Sends a request to the writer that the one before went to."""
        assert self.writer is not None
        self.writer.request(op=operation, awaited=awaited, **fields)

    def ask(self, operation: str, **fields: Any) -> None:
        """Sends a request and waits for its answer.

        Raises:
            DamagedCheckpointError: what was read is not what was saved.
            CheckpointError: it failed.
        """
        self.begin(operation, **fields)
        wait = Wait(self._patience, lambda: f"{self._setup['directory']}: waits to {operation}")
        while not self.answered():
            # nothing is lost with what is only read
            if wait.is_over(_READ_S):
                raise CheckpointError(
                    f"the checkpoint writer has not answered for {wait.seconds:.0f} s"
                )
            wait.pause()
        answer = self.answer()
        if answer.error:
            kind = DamagedCheckpointError if answer.damaged else CheckpointError
            raise kind(answer.error)

    def answer(self) -> WriterAnswer:
        """Waits for the next answer."""
        assert self.writer is not None
        return self.writer.answer()

    def answered(self) -> bool:
        """Whether the next answer is there."""
        assert self.writer is not None
        return self.writer.answered()

    def close(self, *, wait: bool = True) -> None:
        """Ends the writer after what it was asked to do, and lets go of the memory. A second call
        does nothing.

        Args:
            wait: for its end.
        """
        self._stop(wait=wait)
        self._buffer.close()

    def _stop(self, *, wait: bool = True) -> None:
        if self.writer is not None:
            self.writer.stop(wait=wait)
            self.writer = None

    def _check_open(self) -> None:
        if self._buffer.descriptor < 0:
            raise ValueError(
                f"the checkpointer of {self._setup['directory']} is closed; make a new one"
            )
