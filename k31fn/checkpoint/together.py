"""Ranks that do something together: it is done on all of them, or fails on all with one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from k31fn.parallel.backends.processes import exchange_json
from k31fn.parallel.collectives import axis_size, own_index
from k31fn.parallel.mesh import MeshAxes

__all__ = ["CheckpointError", "DamagedCheckpointError", "NotSavedError", "Together"]

_T = TypeVar("_T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. Nothing that was complete before has been lost."""


class DamagedCheckpointError(CheckpointError):
    """A complete checkpoint no longer holds what was saved."""


class NotSavedError(CheckpointError):
    """A step was not saved, or what comes after saving it failed.

    Attributes:
        cause: what failed, without the step.
    """

    def __init__(self, text: str, cause: str) -> None:
        super().__init__(text)
        self.cause = cause


_KINDS: dict[str, type[Exception]] = {
    k.__name__: k for k in (CheckpointError, DamagedCheckpointError, ValueError)
}


class Together:
    """The ranks of one checkpoint, seen from one of them.

    Attributes:
        axes: of their mesh, bound to this rank; none: it is the only one.
        rank: its number.
        size: how many there are.
    """

    def __init__(self, axes: MeshAxes) -> None:
        self.axes = axes
        self.rank, self.size = own_index(axes.atoms), axis_size(axes.atoms)

    @property
    def first(self) -> bool:
        """Whether this is the first rank."""
        return self.rank == 0

    def share(self, value: Any) -> list[Any]:
        """Each rank's value, JSON data, in their order. Every rank must call it."""
        return exchange_json(value, self.axes.atoms) if self.size > 1 else [value]

    def failures(self, error: str) -> str:
        """What failed on any rank, with its place in the mesh; empty if nothing did.

        Every rank must call it.
        """
        if self.size == 1:
            return error
        coordinate = {a.name: own_index(a) for a in self.axes.atoms}
        said = self.share([coordinate, error])
        if error and all(text == error for _, text in said):
            return error
        return "; ".join(
            f"rank {rank} at {where}: {text}" for rank, (where, text) in enumerate(said) if text
        )

    def all(self, f: Callable[[], _T]) -> _T:
        """``f()``, which must not communicate, on every rank.

        Raises:
            Exception: it failed on one. On a single rank that error; on several, on each of them,
                an error of the kind of the first one, with what all said.
        """
        error, value = None, []
        try:
            value.append(f())
        except (CheckpointError, ValueError, OSError) as e:
            error = e
        if self.size == 1:
            if error is not None:
                raise error
            return value[0]
        kinds = self.share(type(error).__name__ if error is not None else "")
        if any(kinds):
            kind = _KINDS.get(next(k for k in kinds if k), CheckpointError)
            raise kind(self.failures("" if error is None else str(error))) from error
        return value[0]
