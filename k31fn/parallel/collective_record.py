"""A record of the collectives that a rank issued, for tests and for reports of traffic."""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "CollectiveRecord",
    "Event",
    "current_records",
    "note_event",
    "record_collectives",
    "record_into",
]


class Event(NamedTuple):
    """One entry of a :class:`CollectiveRecord`, in the order in which they happened on a rank.

    Attributes:
        what: ``issue``, ``wait`` (its result is used from here on) or ``note``.
        kind: the collective, or the text of the note.
        axes: names of the atomic axes.
        nbytes: of the operand that the rank hands in.
    """

    what: str
    kind: str
    axes: tuple[str, ...] = ()
    nbytes: int = 0


@dataclass
class CollectiveRecord:
    """The collectives that one rank issued, backward passes and replays of ``remat`` included.

    In the simulated mesh all ranks are one, so it counts per rank as well. Under threads this is
    the record of rank 0, and ``ranks`` has them all.

    Attributes:
        events: everything in order.
        ranks: with the threads backend, the record of each rank.
    """

    events: list[Event] = field(default_factory=list)
    ranks: list[CollectiveRecord] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        """Collectives issued, by kind."""
        # Issues, not waits: both are noted, and one that was never waited for was sent too.
        return Counter(e.kind for e in self.events if e.what == "issue")

    @property
    def nbytes(self) -> Counter[str]:
        """Bytes of the operands handed in, by kind; an algorithm's factor, as 2 (n - 1) / n of a
        ring, is not in it.
        """
        total: Counter[str] = Counter()
        for event in self.events:
            total[event.kind] += event.nbytes if event.what == "issue" else 0
        return +total  # without the kinds of which nothing was issued

    def over(self, *axes: str) -> Counter[str]:
        """Collectives issued over exactly these atomic axes, by kind."""
        return Counter(e.kind for e in self.events if e.what == "issue" and e.axes == axes)


# Of the context, not global: threads are ranks, and each records for itself.
_RECORDS: contextvars.ContextVar[tuple[CollectiveRecord, ...]] = contextvars.ContextVar(
    "k31fn_collectives", default=()
)


@contextlib.contextmanager
def record_collectives() -> Iterator[CollectiveRecord]:
    """Records the collectives issued inside, and those of the backward of what ran inside, on
    whatever thread.
    """
    record = CollectiveRecord()
    # Beside the records around it: a test may count a part of what another counts.
    with record_into((*_RECORDS.get(), record)):
        yield record


@contextlib.contextmanager
def record_into(records: tuple[CollectiveRecord, ...]) -> Iterator[None]:
    """A scope whose events go to exactly these records."""
    token = _RECORDS.set(records)
    try:
        yield
    finally:
        _RECORDS.reset(token)


def current_records() -> tuple[CollectiveRecord, ...]:
    """The records to which events go now; a collective captures them in its forward for its
    backward.
    """
    return _RECORDS.get()


def note_event(text: str) -> None:
    """Puts a note into the enclosing records, to assert what ran between an issue and its wait."""
    for record in _RECORDS.get():
        record.events.append(Event("note", text))
