"""Graphs that do not hold the values of the inputs of the function that made them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["OmittedInputs"]


class _InputView(NamedTuple):
    """A saved tensor that is an input or a view of one: where it lies in the input's storage."""

    number: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class OmittedInputs:
    """The inputs of a function, left out of its graph and given again for the backward.

    Autograd hands its hooks bare tensors, so an input, or a view of one, is known by where its
    elements lie. Two inputs may share a storage, as the weights of one gathered bucket do.

    Args:
        values: the inputs.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._layouts = [(x.shape, x.stride(), x.dtype) for x in values]
        self._by_storage: dict[int, list[tuple[int, Tensor]]] = {}
        for i, x in enumerate(values):
            self._by_storage.setdefault(_storage_id(x), []).append((i, x))
        self._values: list[Tensor | None] = []

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """A graph that is built inside notes which of its saved tensors are inputs, and holds the
        others.
        """
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            # The inputs are to be freed when the function is done.
            self._by_storage.clear()

    def give(self, values: Sequence[Tensor]) -> None:
        """Takes the inputs again, for the backward.

        Raises:
            RuntimeError: one has another shape, dtype or layout than at first: the function around
                is not pure.
        """
        for x, layout in zip(values, self._layouts, strict=True):
            # Views are found again by strides and offset: in another layout they would be others.
            again = x.shape, x.stride(), x.dtype
            if again != layout:
                raise RuntimeError(
                    f"an argument of a kept function was {layout} at first and is {again} in the "
                    "replay: the function around it is not pure"
                )
        # The gradient of an input is taken where the graph starts, and does not go through it.
        self._values = [x.detach() for x in values]

    def drop(self, count: int) -> None:
        """Lets go of the first inputs."""
        self._values[:count] = [None] * count

    def pack(self, x: Tensor) -> Any:
        """The tensor, or the note, that a graph holds for a tensor that it saves."""
        # Within the extent of the input, too: the next one may follow in the same storage.
        for i, whole in self._by_storage.get(_storage_id(x), ()):
            offset = int(x.storage_offset() - whole.storage_offset())
            if x.dtype == whole.dtype and offset >= 0 and offset + _extent(x) <= _extent(whole):
                return _InputView(i, x.shape, x.stride(), offset)
        # An output that its own graph saves would be a cycle; detached, it is none.
        return x.detach()

    def unpack(self, packed: Any) -> Tensor:
        """The saved tensor.

        Raises:
            RuntimeError: an input that was not given again, or let go of.
        """
        if isinstance(packed, Tensor):
            return packed
        view: _InputView = packed
        whole = self._values[view.number] if self._values else None
        if whole is None:
            raise RuntimeError(
                "the graph of a kept function needs an input that it has not been given again"
            )
        return whole.as_strided(view.shape, view.stride, int(whole.storage_offset()) + view.offset)


def _storage_id(x: Tensor) -> int:
    """Which storage; its address would not do, it is 0 for meta and empty tensors."""
    return x.untyped_storage()._cdata


def _extent(x: Tensor) -> int:
    """Elements of the storage from the first of ``x`` to its last."""
    if not x.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
