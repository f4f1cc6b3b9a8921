"""Errors of one rank that wait until the ranks agree.

What fails between two steps on one rank alone (a full disk, a loss that is not finite) must not
make that rank leave the loop: the others would wait for it in their next collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from k31fn.checkpoint.errors import CheckpointError, NotSavedError
from k31fn.trainer.log import NonFiniteError
from k31fn.trainer.ranks.agreement import OtherRankError

__all__ = ["PendingErrors", "do_all"]

_Error = TypeVar("_Error", bound=BaseException)

# They leave the state as it is: it can still be saved. Anything else is a mistake of the program,
# and ends the run where it is raised.
_WAITING = (NonFiniteError, CheckpointError, OSError, OtherRankError)


class PendingErrors:
    """What failed on this rank since the ranks last agreed."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    def attempt(self, action: Callable[[], object]) -> None:
        """Does it; keeps what fails."""
        try:
            action()
        except _WAITING as error:
            self.first = _join_errors(self.first, error)

    def take(self) -> Exception | None:
        """What failed, for the others to know; from now on there is nothing."""
        error, self.first = self.first, None
        return error


def do_all(
    actions: Sequence[Callable[[], None]], first: BaseException | None
) -> BaseException | None:
    """Does all of ``actions`` whatever fails; that is a note of ``first``, or becomes it."""
    for action in actions:
        try:
            action()
        except _WAITING as another:
            first = _join_errors(first, another)
    return first


def _join_errors(first: _Error | None, another: Exception) -> _Error | Exception:
    """``first`` with the other one as its note, if there is a first and the other says more than it
    does.

    A save that fails once more as the one before says nothing new.
    """
    if first is None:
        return another
    again = (
        isinstance(first, NotSavedError)
        and isinstance(another, NotSavedError)
        and another.cause == first.cause
    )
    if not again and str(another) not in (str(first), *getattr(first, "__notes__", ())):
        first.add_note(str(another))
    return first
