"""Waiting for a writer: said when it takes long, and ended when the run has no more time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Patience", "Wait"]

# Long enough for a busy disk; said again after twice as long each time.
_FIRST_NOTE_S = 10.0
# Pauses between two looks are a twentieth of the time waited so far: a short wait is over at once,
# and a long one costs the ranks few exchanges.
_SHORTEST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
_PAUSE_FRACTION = 0.05


class Patience(NamedTuple):
    """What a rank's run thinks of waiting.

    Attributes:
        on_wait: is told what is waited for long.
        hurried_s: for how many seconds the run has wanted to end; 0: it has time.
    """

    on_wait: Callable[[str], object] = lambda text: None
    hurried_s: Callable[[], float] = lambda: 0.0


class Wait:
    """A wait that begins now.

    Args:
        patience: of the run.
        what: says what is waited for.
    """

    def __init__(self, patience: Patience, what: Callable[[], str]) -> None:
        self._patience = patience
        self._what = what
        self._began = time.monotonic()
        self._next_note_s = _FIRST_NOTE_S

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._began

    def pause(self) -> None:
        """Sleeps until the next look, and says that it goes on where that is due."""
        if self.seconds > self._next_note_s:
            self._next_note_s *= 2
            self._patience.on_wait(f"{self._what()}, since {self.seconds:.0f} s")
        pause = min(max(_SHORTEST_PAUSE_S, _PAUSE_FRACTION * self.seconds), _LONGEST_PAUSE_S)
        time.sleep(pause)

    def is_over(self, limit_s: float) -> bool:
        """Whether the run has wanted to end, and this has lasted, for longer than ``limit_s``."""
        return min(self._patience.hurried_s(), self.seconds) > limit_s
