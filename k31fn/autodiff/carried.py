"""Context variables that a backward reads as its forward did, also on another thread.

Autograd runs the backward of tensors on a device on a thread of its own, where context variables
have their defaults.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

__all__ = ["Carried", "carry"]

_T = TypeVar("_T")
_CARRIED: list[contextvars.ContextVar[Any]] = []


def carry(variable: contextvars.ContextVar[_T]) -> contextvars.ContextVar[_T]:
    """The variable, which every backward from now on finds as its forward did. It needs a
    default.
    """
    _CARRIED.append(variable)
    return variable


class Carried:
    """What the variables are now."""

    __slots__ = ("_thread", "_values")

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._values = [(variable, variable.get()) for variable in _CARRIED]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """On another thread the variables are what they were; on the same one they are left as they
        are.
        """
        if threading.get_ident() == self._thread:
            yield
            return
        tokens = [(variable, variable.set(value)) for variable, value in self._values]
        try:
            yield
        finally:
            for variable, token in reversed(tokens):
                variable.reset(token)
