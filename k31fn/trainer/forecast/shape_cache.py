"""Operations on meta tensors whose results are remembered.

A program that runs on meta tensors to see its shapes takes the same few hundred operations
thousands of times, and each costs a tenth of a millisecond or more, for which torch works out
shapes, strides and types. Inside a :class:`ShapeCache` that is done once for each operation and
kind of arguments::

    (operation, shapes, strides and dtypes of tensors, other arguments)
        ->  shapes, strides and dtypes of results

Left alone are operations that write, or give views or their own arguments, and those with a tensor
that is not meta. Modes that were entered before see each result being made: a
:func:`~k31fn.testing.live_bytes` outside counts the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # torch 2.11, 2.13

__all__ = ["ShapeCache"]

_META = torch.device("meta")


class _TensorKind(NamedTuple):
    """Shape, strides and dtype of a new tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        """A new tensor of this kind."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=_META)


class _UnknownError(Exception):
    """An argument that no key can be made of; the operation is run as if there were no cache."""


class ShapeCache(TorchDispatchMode):
    """Inside, on this thread and in backwards that start on it, results on meta tensors come from
    memory.

    What one block learnt is known in the next one of the same object.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pure: dict[Any, bool] = {}
        self._known: dict[Any, tuple[_TensorKind, ...] | _TensorKind | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        pure = self._pure.get(func)
        if pure is None:
            pure = self._pure[func] = _is_pure(func)
        if not pure:
            return func(*args, **kwargs)
        tensors: list[Tensor] = []
        try:
            key = func, _key(args, tensors), _key(tuple(kwargs.items()), tensors) if kwargs else ()
        except _UnknownError:
            return func(*args, **kwargs)
        if not tensors:
            # it makes one from nothing, as fast as this would, and perhaps on another device
            return func(*args, **kwargs)
        known = self._known.get(key)
        if known is None:
            result = func(*args, **kwargs)
            # None is remembered too, for an operation whose results cannot be made from kinds: it
            # is run each time
            if key not in self._known:
                self._known[key] = _kinds(result, tensors)
            return result
        return (
            known.make() if isinstance(known, _TensorKind) else tuple(kind.make() for kind in known)
        )


def _is_pure(func: Any) -> bool:
    """Whether it neither writes nor gives a view, by its schema."""
    schema = func._schema
    return not any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))


def _key(x: Any, tensors: list[Tensor]) -> Any:
    if isinstance(x, Tensor):
        if x.device != _META or x.layout != torch.strided:
            raise _UnknownError
        tensors.append(x)
        return x.shape, x.stride(), x.dtype
    if isinstance(x, tuple | list):
        return tuple([_key(part, tensors) for part in x])  # a list: a generator costs more here
    if isinstance(x, bool | int | float):
        return type(x), x  # 1, 1.0 and True are equal, and give results of different dtypes
    if x is None or isinstance(
        x, str | torch.dtype | torch.device | torch.layout | torch.memory_format
    ):
        return x
    raise _UnknownError


def _kinds(result: Any, tensors: list[Tensor]) -> Any:
    """Of the results; None if not all of them are new, each with its own memory and no more of it
    than it needs.
    """
    if isinstance(result, tuple):
        kinds = tuple(_kinds(x, tensors) for x in result)
        return kinds if all(isinstance(kind, _TensorKind) for kind in kinds) else None
    if not isinstance(result, Tensor) or result.device != _META or result.storage_offset():
        return None
    storage = result.untyped_storage()
    # _unsafe_view and the like give a view though their schema does not say so
    for x in tensors:
        if storage._cdata == x.untyped_storage()._cdata:
            return None
    kind = _TensorKind(tuple(result.shape), result.stride(), result.dtype)
    # a storage of another size, such as that of an expanded result, would be counted wrongly
    if storage.nbytes() != kind.make().untyped_storage().nbytes():
        return None
    return kind
