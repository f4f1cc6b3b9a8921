"""Ranks that do something together: it is done on all of them, or fails on all with one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from k31fn.checkpoint.errors import CheckpointError, DamagedCheckpointError
from k31fn.parallel.backends.processes import exchange_json
from k31fn.parallel.collectives import axis_size, own_index
from k31fn.parallel.mesh import MeshAxes

__all__ = ["RankGroup"]

_T = TypeVar("_T")

# Errors travel as the name of their kind; any other, such as OSError, arrives as CheckpointError.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointError, DamagedCheckpointError, ValueError)
}


class RankGroup:
    """The ranks of one checkpoint, seen from one of them.

    Attributes:
        axes: of their mesh, bound to this rank; none: it is the only one.
        rank: its number.
        size: how many there are.
    """

    def __init__(self, axes: MeshAxes) -> None:
        self.axes = axes
        self.rank = own_index(axes.atoms)
        self.size = axis_size(axes.atoms)

    @property
    def first(self) -> bool:
        """Whether this is the first rank."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Each rank's value, JSON data, in their order. Every rank must call it."""
        return exchange_json(value, self.axes.atoms) if self.size > 1 else [value]

    def from_first(self, value: Any) -> Any:
        """The first rank's value. Every rank must call it."""
        return self.gather(value)[0]

    def failures(self, error: str) -> str:
        """What failed on any rank, with its place in the mesh; empty if nothing did.

        Every rank must call it.
        """
        if self.size == 1:
            return error
        coordinate = {axis.name: own_index(axis) for axis in self.axes.atoms}
        reports = self.gather([coordinate, error])
        # All ranks looked at one folder and found one thing: said once, without a place.
        if error and all(text == error for _, text in reports):
            return error
        lines = []
        for rank, (place, text) in enumerate(reports):
            if text:
                lines.append(f"rank {rank} at {place}: {text}")
        return "; ".join(lines)

    def run_on_all(self, f: Callable[[], _T]) -> _T:
        """``f()``, which must not communicate, on every rank.

        Raises:
            Exception: it failed on one. On a single rank that error; on several, on each of them,
                an error of the kind of the first one, with what all said.
        """
        error: Exception | None = None
        value: list[_T] = []  # of one element once it is there, since it may be None
        try:
            value.append(f())
        except (CheckpointError, ValueError, OSError) as e:
            error = e
        if self.size == 1:
            if error is not None:
                raise error
            return value[0]
        name = "" if error is None else type(error).__name__
        kinds = [kind for kind in self.gather(name) if kind]
        if kinds:
            kind = _KINDS.get(kinds[0], CheckpointError)
            raise kind(self.failures("" if error is None else str(error))) from error
        return value[0]
