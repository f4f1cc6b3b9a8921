"""Named scopes in a trace of torch.profiler; without effect, and without cost, while nothing is
recorded.

``scope(name)`` names what runs inside it. ``of_layer(name, f)`` names the forward of a function,
``forward NAME``, and what autograd runs for its backward, ``backward NAME``: the tensors that go in
and come out pass through identities whose gradients begin and end that scope. Functions within such
a function may have names of their own. What an enclosing ``remat`` computes again is a ``forward
NAME`` too, within the backward of the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from k31fn import tree

__all__ = ["of_layer", "recording", "scope"]


def __dir__() -> list[str]:
    return __all__


_F = TypeVar("_F", bound=Callable[..., Any])


class _Recording:
    """The names that were used, and the open scopes of a backward: of one layer at a time and what
    is in it, on whatever thread it runs.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.depth = 0  # of named functions that the forward is in
        self._open: list[tuple[int, record_function]] = []

    def begin(self, name: str, depth: int) -> None:
        # A layer whose input needs no gradient has no mark that would have ended its scope.
        self.end(depth)
        self.names.add(name)
        # Entered and left by hand: begin and end are called from two nodes of the graph.
        opened = record_function(name)
        opened.__enter__()
        self._open.append((depth, opened))

    def end(self, depth: int) -> None:
        while self._open and self._open[-1][0] >= depth:
            self._open.pop()[1].__exit__(None, None, None)


# Of the process, not of a thread: on a GPU the backward runs on threads of autograd's.
_recording: _Recording | None = None


@contextlib.contextmanager
def recording() -> Iterator[set[str]]:
    """Inside, scopes are recorded, by the profiler that is active; yields the set of their names,
    which grows.
    """
    global _recording
    outer = _recording
    _recording = _Recording()
    try:
        yield _recording.names
    finally:
        _recording.end(0)
        _recording = outer


def scope(name: str) -> contextlib.AbstractContextManager[Any]:
    """Names what runs inside the ``with`` block."""
    if _recording is None:
        return contextlib.nullcontext()
    _recording.names.add(name)
    return record_function(name)


def of_layer(name: str, f: _F) -> _F:
    """``f(params, carry, ...) -> (carry, aux)`` with its forward and its backward named, if
    recording.

    The derivatives are those of ``f``, under ``torch.func`` too.
    """
    # Decided once, when the layer is put together: without recording no mark is in the graph.
    if _recording is None:
        return f

    def scoped(*args: Any) -> Any:
        now = _recording
        if now is None:  # a function that was put together earlier
            return f(*args)
        depth = now.depth
        now.depth += 1
        try:
            with scope(f"forward {name}"):
                return named(depth, *args)
        finally:
            now.depth -= 1

    def named(depth: int, params: Any, carry: Any, *rest: Any) -> Any:
        # The backward runs from the output to the input: it begins where the forward ends.
        carry = _mark(carry, f"backward {name}", depth, begins=False)
        out, aux = f(params, carry, *rest)
        return _mark(out, f"backward {name}", depth, begins=True), aux

    return scoped  # pyright: ignore[reportReturnType]


def _mark(values: Any, name: str, depth: int, *, begins: bool) -> Any:
    leaves, structure = tree.flatten(values)
    index = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
    # One node for all of them, so that the scope begins and ends once.
    marked = _Mark.apply(name, depth, begins, *[leaves[i] for i in index])
    for i, x in zip(index, marked, strict=True):
        leaves[i] = x
    return tree.unflatten(structure, leaves)


class _Mark(torch.autograd.Function):
    """Identity of several tensors; its backward, which is one too, begins or ends a scope."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, depth: int, begins: bool, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.scope, ctx.depth, ctx.begins = inputs[:3]
        # A missing cotangent stays missing, as without the mark.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        if _recording is not None:
            if ctx.begins:
                _recording.begin(ctx.scope, ctx.depth)
            else:
                _recording.end(ctx.depth)
        return (None, None, None, *cotangents)
