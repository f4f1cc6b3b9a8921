"""Tensors that a function reaches without being given them."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from k31fn import _functorch, tree

__all__ = ["captured_tensors", "global_names", "reaches_nothing", "refuse_captured"]


def captured_tensors(*functions: Any) -> Iterator[Tensor]:
    """Differentiated tensors that these functions reach by closure, default, partial, method,
    module or global name.

    Looks through inner functions and pytrees. Not found: a tensor behind an attribute of an
    attribute of an object, and one that a function fetches by a call.
    """
    # By id, with the object: a freed object's id may be used again.
    visited: dict[int, Any] = {}
    pending: list[Any] = [functions]
    while pending:
        for leaf in tree.leaves(pending.pop(), allow_none=True):
            if isinstance(leaf, Tensor):
                if _functorch.is_tracked(leaf):
                    yield leaf
            elif id(leaf) not in visited:
                visited[id(leaf)] = leaf
                pending.append(_contents(leaf))


def _contents(x: Any) -> Any:
    """The objects that an object refers to, one step deep."""
    match x:
        case type() | types.ModuleType():
            return ()
        case nn.Module():
            return [*x.parameters(), *x.buffers()]
        case functools.partial():
            return [x.func, x.args, x.keywords]
        case types.MethodType():
            return [x.__self__, x.__func__]
        case types.FunctionType():
            enclosed: list[Any] = []
            for cell in x.__closure__ or ():
                if _is_filled(cell):
                    enclosed.append(cell.cell_contents)
            global_values = [x.__globals__.get(name) for name in _global_names(x.__code__)]
            return [enclosed, x.__defaults__, x.__kwdefaults__, _tensors_and_modules(global_values)]
        case _:
            attributes = list(getattr(x, "__dict__", {}).values())
            # What is called may use any of its attributes. Of other objects and of globals the
            # search takes tensors and modules only, or it would walk through the whole program.
            return attributes if callable(x) else _tensors_and_modules(attributes)


def _tensors_and_modules(values: list[Any]) -> list[Tensor | nn.Module]:
    return [v for v in values if isinstance(v, Tensor | nn.Module)]


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> frozenset[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # an inner function
            names |= _global_names(constant)
    return frozenset(names)


def _is_filled(cell: Any) -> bool:
    # A cell is empty until the variable is assigned, as in a function that is defined before it.
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


_PLAIN = (bool, int, float, str, torch.dtype)


def global_names(f: Any) -> frozenset[str] | None:
    """The names by which alone a function can reach a tensor that it is not given: those of
    globals; None for one that may hold tensors in another way.
    """
    if not isinstance(f, types.FunctionType):
        return None
    if f.__closure__ or f.__defaults__ or f.__kwdefaults__:
        return None
    return _global_names(f.__code__)


def reaches_nothing(f: Any, names: frozenset[str] | None, values: Sequence[Any]) -> bool:
    """Whether no search is needed: ``f`` reaches neither a tensor nor a module, and the values are
    numbers and words.

    Args:
        f: a function.
        names: what :func:`global_names` says of it, which is found out once.
        values: what it is handed besides tensors.
    """
    if names is None or any(type(v) not in _PLAIN for v in values):
        return False
    # At every call: a global may be a tensor only now.
    return not any(isinstance(f.__globals__.get(name), Tensor | nn.Module) for name in names)


def refuse_captured(name: str, *functions: Any) -> None:
    """Raises if one of these functions captured a differentiated tensor.

    Raises:
        ValueError: names the tensor's shape; its gradient would silently be zero.
    """
    for tensor in captured_tensors(*functions):
        raise ValueError(
            f"{name} captured a differentiated tensor of shape {tuple(tensor.shape)}, "
            f"{tensor.dtype} (by closure, default, partial, module or global name); its gradient "
            "would be zero. Pass it as an argument: also a mask or an index that was made inside a "
            "torch.func transform"
        )
