"""Ending a run from outside."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from k31fn.trainer.ranks import Ranks

__all__ = ["Stop"]


class Stop:
    """Set by SIGINT (Ctrl-C) and SIGTERM while a run goes on: it ends after the step under way, saved.

    Attributes:
        signal: name of the signal that came; empty before.
    """

    def __init__(self) -> None:
        self.signal = ""

    @contextlib.contextmanager
    def listening(self) -> Iterator[Stop]:
        """Listens in the block; a second signal of the same kind acts as it did before."""
        self._previous = {s: signal.signal(s, self._receive) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def agree(self, ranks: Ranks, error: Exception | None) -> None:
        """Makes the signal of one rank that of all; raises on all what failed on one (:meth:`Ranks.agree`)."""
        number = ranks.agree(signal.Signals[self.signal].value if self.signal else 0, error)
        self.signal = signal.Signals(number).name if number else ""

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        signal.signal(number, self._previous[signal.Signals(number)])
