"""Ending a run from outside."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from types import FrameType

from k31fn.trainer.ranks.agreement import Ranks

__all__ = ["Stop"]

# what ranks tell each other of a time that is over: no signal's number, and less than a failure's
_TIME = 500


class Stop:
    """Set by SIGINT (Ctrl-C) and SIGTERM while a run goes on, or by its time: it ends after the
    step under way, saved.

    Args:
        minutes: that the run may take, from now on.
    """

    def __init__(self, minutes: float = math.inf) -> None:
        self._until = time.monotonic() + 60 * minutes
        self._number = 0

    @property
    def cause(self) -> str:
        """Name of the signal that came, or the option that set the time; empty before."""
        if self._number == _TIME:
            return "--max-minutes"
        return signal.Signals(self._number).name if self._number else ""

    @contextlib.contextmanager
    def listening(self) -> Iterator[Stop]:
        """Listens in the block; a second signal of the same kind acts as it did before."""
        self._previous = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)
        try:
            yield self
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def agree(self, ranks: Ranks, error: Exception | None) -> None:
        """Makes the cause of one rank that of all; raises on all what failed on one
        (:meth:`Ranks.agree`).
        """
        # a signal that came is kept: it says more about why the run ends
        if not self._number and time.monotonic() > self._until:
            self._number = _TIME
        self._number = ranks.agree(self._number, error)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # Nothing else is done here: the step under way goes on, and agree() tells the others. The
        # old handler comes back, so that a second signal ends a run that hangs.
        self._number = number
        signal.signal(number, self._previous[signal.Signals(number)])
