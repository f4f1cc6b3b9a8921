"""Surroundings of a forward, context variables and autocast, found again by its backward.

Autograd runs the backward of tensors on a device on a thread of its own. There context variables
have their defaults, and autocast is off. A CPU run cannot show this: there the thread is the same.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from k31fn import tree

__all__ = ["Ambient", "CarriedVariables", "carry"]

_T = TypeVar("_T")
_CARRIED: list[contextvars.ContextVar[Any]] = []


def carry(variable: contextvars.ContextVar[_T]) -> contextvars.ContextVar[_T]:
    """The variable, which the backward of every rule from now on finds as its forward did. It needs
    a default.
    """
    _CARRIED.append(variable)
    return variable


class CarriedVariables:
    """Values that the variables given to :func:`carry` have now.

    For the backward of a rule, which is many times cheaper than :class:`Ambient` and does not run
    the function of a user again.
    """

    __slots__ = ("_thread", "_values")

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._values = [(variable, variable.get()) for variable in _CARRIED]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, on another thread, the variables are what they were.

        On the same thread the present values count, as for any function that is called there.
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


class Ambient:
    """The whole context of a forward, and its autocast, for a function that runs again.

    Passes through a tree as one opaque leaf.
    """

    __slots__ = ("_autocast", "_context")

    def __init__(self, args: Any) -> None:
        self._context = contextvars.copy_context()
        # Autocast is no context variable but a setting of the thread, one for each kind of device.
        devices = {t.device.type for t in tree.leaves(args) if isinstance(t, Tensor)}
        self._autocast: list[tuple[str, torch.dtype, bool]] = []
        for device in devices:
            if torch.amp.is_autocast_available(device):
                enabled = torch.is_autocast_enabled(device)
                self._autocast.append((device, torch.get_autocast_dtype(device), enabled))

    def run(self, f: Callable[[], Any]) -> Any:
        """``f()`` in these surroundings, on whatever thread."""

        def with_autocast() -> Any:
            with contextlib.ExitStack() as stack:
                for device, dtype, enabled in self._autocast:
                    if enabled or torch.is_autocast_enabled(device):
                        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
                return f()

        # A context can be entered once at a time, and a backward may run twice or on two threads:
        # enter a copy.
        return self._context.copy().run(with_autocast)
