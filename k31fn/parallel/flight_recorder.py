"""The last collectives of a process, for a report when a rank is lost."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["FlightRecorder", "IssuedCollective"]

# Some layers of a model: enough to see where a rank stands, and a report of a few pages.
_NUM_REMEMBERED = 256


@dataclass
class IssuedCollective:
    """One collective of a process.

    Attributes:
        number: which of its group's, from 1: equal on all ranks of the group, so a rank that is
            behind shows. Of a message, which to or from that rank.
        kind: the collective, or the message with its other end.
        axes: names of the atomic axes.
        shape: of the operand.
        dtype: of the operand.
        began: seconds on the clock of :func:`time.monotonic`.
        waited: when the host, or with a device its queue, had waited for it; 0: not yet.
    """

    number: int
    kind: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    began: float
    waited: float = 0.0


class FlightRecorder:
    """The last collectives of a process, for a report of what it was doing when a rank was lost.

    Written by the process's own threads and read by any; it keeps no tensor.
    """

    def __init__(self) -> None:
        self._last: deque[IssuedCollective] = deque(maxlen=_NUM_REMEMBERED)
        self._numbers: Counter[tuple[str, ...]] = Counter()

    def add(
        self, kind: str, axes: tuple[str, ...], shape: tuple[int, ...], dtype: str
    ) -> IssuedCollective:
        """Notes a collective that is about to be issued; the caller sets its ``waited``."""
        # Messages are numbered by their other end: unlike a collective, one concerns two ranks of
        # the group, and a number of the whole group would differ on each.
        counted = (*axes, kind) if kind.startswith(("send", "recv")) else axes
        self._numbers[counted] += 1
        issued = IssuedCollective(
            self._numbers[counted], kind, axes, shape, dtype, time.monotonic()
        )
        self._last.append(issued)
        return issued

    def as_json(self) -> list[dict[str, Any]]:
        """The collectives as JSON values, oldest first; times as seconds before now, ``waited``
        null for one that is not over.
        """
        now = time.monotonic()
        rows: list[dict[str, Any]] = []
        # A copy: another thread may add one meanwhile, and a deque may not change under a loop.
        for issued in list(self._last):
            row = asdict(issued)
            row["began"] = round(now - issued.began, 3)
            row["waited"] = round(now - issued.waited, 3) if issued.waited else None
            rows.append(row)
        return rows
