"""Graphs that do not hold the values of the inputs of the function that made them."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Inputs", "current_inputs"]


class _View(NamedTuple):
    """A saved tensor that is an input or a view of one: where it lies in the input's storage."""

    number: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Inputs:
    """The inputs of a function, left out of its graph and given again for the backward.

    Args:
        values: tensors, some of which may be views of one storage.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._layouts = [(x.shape, x.stride(), x.dtype) for x in values]
        self._known: dict[int, list[tuple[int, Tensor]]] = {}
        for i, x in enumerate(values):
            self._known.setdefault(_storage(x), []).append((i, x))
        self._given: list[Tensor | None] = []

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """A graph that is built inside notes which of its saved tensors are inputs, and holds the
        others.
        """
        token = _CURRENT.set(self)
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            _CURRENT.reset(token)
            self._known.clear()

    def give(self, values: Sequence[Tensor]) -> None:
        """The inputs again, for the backward.

        Raises:
            RuntimeError: one has another shape, dtype or layout than at first: the function around
                is not pure.
        """
        for x, layout in zip(values, self._layouts, strict=True):
            if (x.shape, x.stride(), x.dtype) != layout:
                raise RuntimeError(
                    f"an argument of a kept function was {layout} at first and is "
                    f"{(x.shape, x.stride(), x.dtype)} in "
                    "the replay: the function around it is not pure"
                )
        self._given = [x.detach() for x in values]

    def drop(self, count: int) -> None:
        """Lets go of the first inputs."""
        self._given[:count] = [None] * count

    def pack(self, x: Tensor) -> Any:
        """What a graph is to hold for a tensor that it saves."""
        for i, whole in self._known.get(_storage(x), ()):
            offset = int(x.storage_offset() - whole.storage_offset())
            if x.dtype == whole.dtype and offset >= 0 and offset + _extent(x) <= _extent(whole):
                return _View(i, x.shape, x.stride(), offset)
        return x.detach()

    def unpack(self, packed: Any) -> Tensor:
        """The saved tensor.

        Raises:
            RuntimeError: an input that was not given again, or let go of.
        """
        if isinstance(packed, Tensor):
            return packed
        view: _View = packed
        whole = self._given[view.number] if self._given else None
        if whole is None:
            raise RuntimeError(
                "the graph of a kept function needs an input that it has not been given again"
            )
        return whole.as_strided(view.shape, view.stride, int(whole.storage_offset()) + view.offset)


_CURRENT: contextvars.ContextVar[Inputs | None] = contextvars.ContextVar(
    "k31fn_inputs", default=None
)


def current_inputs() -> Inputs | None:
    """Those that are left out of the graph that is being built."""
    return _CURRENT.get()


def _storage(x: Tensor) -> int:
    """Which storage; its address would not do, it is 0 for meta and empty tensors."""
    return x.untyped_storage()._cdata


def _extent(x: Tensor) -> int:
    """Elements of the storage from the first of ``x`` to its last."""
    return (
        1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    )
