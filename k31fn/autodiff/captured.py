"""Tensors that a function holds without being given them."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from k31fn import _functorch, tree

__all__ = ["captured_tensors", "refuse_captured"]


def captured_tensors(*held: Any) -> Iterator[Tensor]:
    """Differentiated tensors that these functions reach by closure, default, partial, method,
    module or global name.

    Looks through inner functions and pytrees. Not found: a tensor behind an attribute of an
    attribute of an object, and one that a function fetches by a call.
    """
    seen: dict[int, Any] = {}  # holds what it has seen: a freed object's id may be used again
    pending: list[Any] = [held]
    while pending:
        for leaf in tree.leaves(pending.pop(), allow_none=True):
            if isinstance(leaf, Tensor):
                if _functorch.is_tracked(leaf):
                    yield leaf
            elif id(leaf) not in seen:
                seen[id(leaf)] = leaf
                pending.append(_holds(leaf))


def _holds(x: Any) -> Any:
    """What ``x`` holds, one step deep."""
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
            cells = [c.cell_contents for c in x.__closure__ or () if _filled(c)]
            named = [x.__globals__.get(n) for n in _global_names(x.__code__)]
            return [
                cells,
                x.__defaults__,
                x.__kwdefaults__,
                [v for v in named if isinstance(v, Tensor | nn.Module)],
            ]
        case _:
            own = getattr(x, "__dict__", {}).values()
            return (
                list(own) if callable(x) else [v for v in own if isinstance(v, Tensor | nn.Module)]
            )


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> frozenset[str]:
    inner = [_global_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def refuse_captured(name: str, *held: Any) -> None:
    """Raises if one of these functions captured a differentiated tensor.

    Raises:
        ValueError: names the tensor's shape; its gradient would silently be zero.
    """
    for tensor in captured_tensors(*held):
        raise ValueError(
            f"{name} captured a differentiated tensor of shape {tuple(tensor.shape)}, "
            f"{tensor.dtype} (by closure, "
            "default, partial, module or global name); its gradient would be zero. Pass it as an "
            "argument: also a mask "
            "or an index that was made inside a torch.func transform"
        )
