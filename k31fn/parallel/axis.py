"""Mesh axes as objects, and what a collective over them asks of a backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

# Axis first, then what may stand for it: the order in which a reader needs them.
__all__ = ["Axis", "Axes", "Channel", "Host", "active", "axis_names", "num_ranks"]  # noqa: RUF022


@runtime_checkable
class Channel(Protocol):
    """The ranks that one tuple of axes spans, seen from one of them."""

    size: int
    index: int

    def start(self, op: str, x: Tensor, kw: Mapping[str, Any]) -> Callable[[], Tensor]:
        """Issues ``op`` on plain tensors; the function returned waits for the result."""
        ...

    def send(self, x: Tensor, to: int) -> Callable[[], Tensor]:
        """Sends ``x`` to the rank of this index; the function returned waits until ``x`` is free
        again.
        """
        ...

    def recv(self, into: Tensor, source: int) -> Callable[[], Tensor]:
        """Asks for what that rank sends next; the function returned waits until it is in ``into``,
        and returns it.
        """
        ...


@runtime_checkable
class Host(Protocol):
    """A backend's side of an axis: a token per axis (the simulated mesh) or channels (threads,
    process groups).
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Atomic axes of the mesh, outermost first."""
        ...

    def token(self, name: str) -> Tensor | None:
        """The rank's index as a tensor that is batched over exactly this axis; None if ranks are
        real.
        """
        ...

    def channel(self, names: tuple[str, ...]) -> Channel:
        """The channel over these axes."""
        ...


@dataclass(frozen=True)
class Axis:
    """A named mesh axis of ``size`` ranks. An axis in a ``Sharding`` is an object, never a name to
    look up: names looked up at run time are lost on the threads that run a device's backward.

    Attributes:
        name: of the atomic axis.
        size: number of ranks.
        host: what :func:`k31fn.parallel.shard_map` bound it to; None outside of it, where no
            collective can run.
    """

    name: str
    size: int
    # Not compared: the same axis of two runs, or without ranks, is the same key of a dict.
    host: Host | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"Axis({self.name!r}).size={self.size}: an axis has at least one rank")


Axes = Axis | tuple[Axis, ...]
"""What a collective goes over: an axis, or a tuple of atomic axes in the mesh's order; ``()`` is
one rank.
"""


def active(axes: Axes) -> tuple[Axis, ...]:
    """The axes of more than one rank.

    Raises:
        ValueError: an axis named twice.
    """
    as_tuple = axes if isinstance(axes, tuple) else (axes,)
    # An axis of one rank is no axis: over it every collective is the identity.
    several = tuple(axis for axis in as_tuple if axis.size > 1)
    names = axis_names(several)
    if len(set(names)) != len(names):
        raise ValueError(
            f"axes {list(names)}: an axis is named twice; name each once, in the mesh's order"
        )
    return several


def num_ranks(axes: tuple[Axis, ...]) -> int:
    """The number of ranks that these axes span together."""
    return math.prod(axis.size for axis in axes)


def axis_names(axes: tuple[Axis, ...]) -> tuple[str, ...]:
    """The names of these axes, in their order."""
    return tuple(a.name for a in axes)
