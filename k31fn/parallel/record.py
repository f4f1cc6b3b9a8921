"""What collectives were issued, which came last, and whether invariance is checked."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "Event",
    "Flight",
    "Issued",
    "Record",
    "check_invariance",
    "note_event",
    "record_collectives",
]

_KEPT = 256  # collectives


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

    In the simulated mesh all ranks are one, so it counts per rank as well. Under threads this is
    the record of rank 0, and ``ranks`` has them all.

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
        """Bytes of the operands handed in, by kind; an algorithm's factor, as 2 (n - 1) / n of a
        ring, is not in it.
        """
        total: Counter[str] = Counter()
        for event in self.events:
            total[event.kind] += event.nbytes if event.what == "issue" else 0
        return +total

    def over(self, *axes: str) -> Counter[str]:
        """Collectives issued over exactly these atomic axes, by kind."""
        return Counter(e.kind for e in self.events if e.what == "issue" and e.axes == axes)


_RECORDS: contextvars.ContextVar[tuple[Record, ...]] = contextvars.ContextVar(
    "k31fn_collectives", default=()
)
_CHECK: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "k31fn_check_invariance", default=False
)


@contextlib.contextmanager
def record_collectives() -> Iterator[Record]:
    """Records the collectives issued inside, and those of the backward of what ran inside, on
    whatever thread.
    """
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
    """Compares, on real ranks, what must be equal on all ranks of an axis; the simulated mesh
    always checks exactly.

    Compared are the cotangents that the transpose of ``psum`` gets, and outputs of ``shard_map``
    over axes that their specs do not name. Each costs a collective, which no record counts: for
    tests.
    """
    token = _CHECK.set(on)
    try:
        yield
    finally:
        _CHECK.reset(token)


def checking() -> bool:
    """Whether :func:`check_invariance` is on."""
    return _CHECK.get()


@dataclass
class Issued:
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


class Flight:
    """The last collectives of a process, for a report of what it was doing when a rank was lost.

    Written by the process's own threads and read by any; it keeps no tensor.
    """

    def __init__(self) -> None:
        self._last: deque[Issued] = deque(maxlen=_KEPT)
        self._numbers: Counter[tuple[str, ...]] = Counter()

    def add(self, kind: str, axes: tuple[str, ...], shape: tuple[int, ...], dtype: str) -> Issued:
        """Notes a collective that is about to be issued; the caller sets :attr:`Issued.waited`."""
        counted = (*axes, kind) if kind.startswith(("send", "recv")) else axes
        self._numbers[counted] += 1
        issued = Issued(self._numbers[counted], kind, axes, shape, dtype, time.monotonic())
        self._last.append(issued)
        return issued

    def as_json(self) -> list[dict[str, Any]]:
        """Oldest first; times as seconds before now, ``waited`` null for one that is not over."""
        now, rows = time.monotonic(), []
        for issued in list(self._last):
            row = asdict(issued)
            row["began"] = round(now - issued.began, 3)
            row["waited"] = round(now - issued.waited, 3) if issued.waited else None
            rows.append(row)
        return rows
