"""Ending a run from outside."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from k31fn.trainer.ranks.agreement import Ranks

__all__ = ["Stop"]

# what ranks tell each other of a time that is over: no signal's number, and less than a failure's
_TIME = 500
# Ctrl-C comes twice to a rank under torchrun, from the terminal and from torchrun: one, if so near.
_SAME_S = 1.0


class Stop:
    """Set by SIGINT (Ctrl-C), SIGTERM and SIGHUP while a run goes on, or by its time: it ends after
    the step under way, saved.

    Args:
        minutes: that the run may take, from now on.
    """

    def __init__(self, minutes: float = math.inf) -> None:
        self._until = time.monotonic() + 60 * minutes
        self._number = 0
        self._came_at = math.inf  # the cause
        self._interrupted_at = math.inf

    @property
    def cause(self) -> str:
        """Name of the signal that came, or the option that set the time; empty before."""
        if self._number == _TIME:
            return "--max-minutes"
        return signal.Signals(self._number).name if self._number else ""

    @property
    def since(self) -> float:
        """Seconds since there is a cause; 0 before."""
        return max(0.0, time.monotonic() - self._came_at)

    @contextlib.contextmanager
    def listening(self) -> Iterator[Stop]:
        """Listens in the block. Signals that follow change nothing, but a second Ctrl-C breaks
        off.
        """
        # A scheduler repeats SIGTERM and a closed terminal sends SIGHUP more than once: whoever
        # wants a run to end unsaved has SIGKILL.
        self._previous: dict[int, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if number == signal.SIGHUP and before == signal.SIG_IGN:
                continue  # nohup: the run outlives its terminal
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
        if self._number:
            self._came_at = min(self._came_at, time.monotonic())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # Nothing else is done here: the step under way goes on, and agree() tells the others.
        now = time.monotonic()
        self._came_at = min(self._came_at, now)
        self._number = self._number if 0 < self._number < _TIME else number
        if number != signal.SIGINT:
            return
        # the old handler takes the second, so that it ends a run that hangs
        if now - self._interrupted_at > _SAME_S:
            signal.signal(number, self._previous[number])
            signal.raise_signal(number)
        self._interrupted_at = min(self._interrupted_at, now)
