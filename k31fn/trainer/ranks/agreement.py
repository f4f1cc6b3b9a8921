"""What the ranks of a run agree on, on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from k31fn.parallel.backends.processes import CollectiveError, exchange_json
from k31fn.parallel.collectives import own_index, pmax
from k31fn.parallel.mesh import Coordinate, MeshAxes
from k31fn.trainer.ranks.failure_report import StepTimes
from k31fn.trainer.ranks.watchdog import Watchdog

__all__ = ["OtherRankError", "Ranks", "coordinate_of"]

_T = TypeVar("_T")

_FAILED = 1000  # more than any signal's number


class OtherRankError(RuntimeError):
    """Another rank failed, and says why."""


def coordinate_of(axes: MeshAxes) -> Coordinate:
    """Where this rank is in the mesh."""
    return {a.name: own_index(a) for a in axes.atoms}


class Ranks:
    """The ranks of a run, seen from one of them; without arguments, the only one.

    Args:
        axes: of the mesh, bound to this rank.
        watch: looks for lost ranks while a block of it runs; closed once the ranks have agreed to
            end.

    Attributes:
        axes: as given.
        watch: as given.
        first: whether this is rank 0, which alone prints, and reads and writes files other than
            checkpoints.
        together: whether the ranks are known to be at the same point: of one they are, of several
            when they agreed on a failure.
    """

    def __init__(self, axes: MeshAxes | None = None, watch: Watchdog | None = None) -> None:
        # without ranks of a mesh every exchange below is with itself, and costs nothing
        self.axes = axes or MeshAxes()
        self.first = own_index(self.axes.atoms) == 0
        self.together = not self.axes.atoms
        self.watch: contextlib.AbstractContextManager[Any] = watch or contextlib.nullcontext()
        self._times = StepTimes()

    def on_first(self, f: Callable[[], Any]) -> Any:
        """``f()``, JSON data, as rank 0 computes it, on every rank.

        Raises:
            Exception: on rank 0, what ``f`` raises.
            OtherRankError: on the others, when it does.
        """
        answer, error = None, None
        if self.first:
            try:
                answer = f()
            except CollectiveError:
                raise  # a rank is lost: nothing can be exchanged any more
            except Exception as e:
                error = e
        # The others wait for the answer, so also a failure is one.
        failed, answer = exchange_json([error is not None, answer], self.axes.atoms)[0]
        if failed:
            self._fail(error)
        return answer

    def on_each(self, f: Callable[[], _T]) -> _T:
        """``f()`` on every rank.

        Raises:
            ValueError: on rank 0, when it raised a ValueError, ImportError or OSError on one of
                them: with what they said, and where, if not all said the same.
            OtherRankError: on the others, then.
        """
        value = []  # not None for "failed": f may return None
        said = ""
        try:
            value.append(f())
        except (ValueError, ImportError, OSError) as e:
            said = str(e)
        texts = exchange_json(
            [own_index(self.axes.atoms), coordinate_of(self.axes), said], self.axes.atoms
        )
        lines = [f"rank {rank} at {where}: {text}" for rank, where, text in texts if text]
        if not lines:
            return value[0]
        # what is wrong everywhere, such as a missing file, is said once and without a rank
        everywhere = len(lines) == len(texts) and len({text for *_, text in texts}) == 1
        self._fail(
            ValueError(texts[0][-1] if everywhere else "; ".join(lines)) if self.first else None
        )

    def alike(self, f: Callable[[], _T]) -> _T:
        """``f()`` on every rank, which communicates itself and fails on all of them for the same
        reason.

        Raises:
            Exception: on rank 0, what ``f`` raises.
            OtherRankError: on the others, then.
        """
        try:
            return f()
        except CollectiveError:
            raise
        except (ValueError, RuntimeError, OSError) as error:
            self._fail(error if self.first else None)

    def agree(self, number: int = 0, error: Exception | None = None) -> int:
        """The largest of the ranks' numbers: of the signals that they got, 0 for none.

        Args:
            number: of this rank, below 1000.
            error: what failed on this rank since they last agreed.

        Raises:
            Exception: ``error``, on the rank that has one.
            OtherRankError: on the other ranks, when one has.
        """
        # one number for both, so that between two steps there is one small collective
        own = torch.tensor([_FAILED if error is not None else number])
        code = int(pmax(own, self.axes.atoms))
        if code == _FAILED:
            self._fail(error)
        return code

    def part(self) -> None:
        """All ranks are here, and none needs another any more."""
        self.agree()
        self._close_watch()
        self.agree()  # the first rank may hold the store that the watches ask

    def record_in(self, folder: Path) -> None:
        """Where each rank writes what it was doing, if the run is lost."""
        if isinstance(self.watch, Watchdog):
            self.watch.folder = folder

    @property
    def times(self) -> StepTimes:
        """Of this rank's steps, for that record."""
        return self.watch.times if isinstance(self.watch, Watchdog) else self._times

    def _fail(self, error: Exception | None) -> NoReturn:
        # all come here alike, so from now on a rank may end without being looked for
        self.together = True
        self._close_watch()
        raise error if error is not None else OtherRankError("another rank failed")

    def _close_watch(self) -> None:
        if isinstance(self.watch, Watchdog):
            self.watch.close()
