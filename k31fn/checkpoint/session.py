"""A rank's writer, started when it is first needed and again after it died, with the memory that
both share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from k31fn.checkpoint.process import Answer, Buffer, Slot, WriterProcess
from k31fn.checkpoint.together import CheckpointError, DamagedCheckpointError

__all__ = ["Session"]


class Session:
    """Requests to one writer.

    Args:
        setup: the fields of :class:`k31fn.checkpoint.writer.Setup` but the buffer.
        lock: descriptors that a writer inherits.
    """

    def __init__(self, setup: Mapping[str, Any], lock: tuple[int, ...]) -> None:
        self._setup, self._lock = setup, lock
        self._buffer = Buffer()
        self.writer: WriterProcess | None = None

    def hold(
        self, slots: Mapping[str, Slot], header: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], tuple[int, int]]:
        """As :meth:`Buffer.hold`.

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
        """Asks for something; nobody waits any more for what was asked before.

        Raises:
            ValueError: the session is closed.
            CheckpointError: the writer cannot be started.
        """
        self._check_open()
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
        """Asks for something after what was asked before, of the same writer."""
        assert self.writer is not None
        self.writer.request(op=operation, awaited=awaited, **fields)

    def ask(self, operation: str, **fields: Any) -> None:
        """Asks for something and waits for it.

        Raises:
            DamagedCheckpointError: what was read is not what was saved.
            CheckpointError: it failed.
        """
        self.begin(operation, **fields)
        answer = self.answer()
        if answer.error:
            kind = DamagedCheckpointError if answer.damaged else CheckpointError
            raise kind(answer.error)

    def answer(self) -> Answer:
        """Waits for the next answer."""
        assert self.writer is not None
        return self.writer.answer()

    def answered(self) -> bool:
        """Whether it is there."""
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
