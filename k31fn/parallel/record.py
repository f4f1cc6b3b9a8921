"""What collectives were issued, and whether invariance is checked."""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Event", "Record", "check_invariance", "note_event", "record_collectives"]


class Event(NamedTuple):
    """One entry of a :class:`Record`, in the order in which they happened on a rank.

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
class Record:
    """The collectives that one rank issued, backward passes and replays of ``remat`` included.

    In the simulated mesh all ranks are one, so it counts per rank as well. Under threads this is the record of rank 0,
    and ``ranks`` has them all.

    Attributes:
        events: everything in order.
        ranks: with the threads backend, the record of each rank.
    """

    events: list[Event] = field(default_factory=list)
    ranks: list[Record] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        """Collectives issued, by kind."""
        return Counter(e.kind for e in self.events if e.what == "issue")

    @property
    def nbytes(self) -> Counter[str]:
        """Bytes of the operands handed in, by kind; an algorithm's factor, as 2 (n - 1) / n of a ring, is not in it."""
        total: Counter[str] = Counter()
        for event in self.events:
            total[event.kind] += event.nbytes if event.what == "issue" else 0
        return +total

    def over(self, *axes: str) -> Counter[str]:
        """Collectives issued over exactly these atomic axes, by kind."""
        return Counter(e.kind for e in self.events if e.what == "issue" and e.axes == axes)


_RECORDS: contextvars.ContextVar[tuple[Record, ...]] = contextvars.ContextVar("k31fn_collectives", default=())
_CHECK: contextvars.ContextVar[bool] = contextvars.ContextVar("k31fn_check_invariance", default=False)


@contextlib.contextmanager
def record_collectives() -> Iterator[Record]:
    """Records the collectives issued inside, and those of the backward of what ran inside, on whatever thread."""
    record = Record()
    with recording((*_RECORDS.get(), record)):
        yield record


@contextlib.contextmanager
def recording(records: tuple[Record, ...]) -> Iterator[None]:
    """Inside, events go to exactly these records."""
    token = _RECORDS.set(records)
    try:
        yield
    finally:
        _RECORDS.reset(token)


def records() -> tuple[Record, ...]:
    """Where events go now; a collective captures it in its forward for its backward."""
    return _RECORDS.get()


def note_event(text: str) -> None:
    """Puts a note into the enclosing records, to assert what ran between an issue and its wait."""
    for record in _RECORDS.get():
        record.events.append(Event("note", text))


@contextlib.contextmanager
def check_invariance(on: bool = True) -> Iterator[None]:
    """Compares, on real ranks, what must be equal on all ranks of an axis; the simulated mesh always checks exactly.

    Compared are the cotangents that the transpose of ``psum`` gets, and outputs of ``shard_map`` over axes that their
    specs do not name. Each costs a collective, which no record counts: for tests.
    """
    token = _CHECK.set(on)
    try:
        yield
    finally:
        _CHECK.reset(token)


def checking() -> bool:
    """Whether :func:`check_invariance` is on."""
    return _CHECK.get()
