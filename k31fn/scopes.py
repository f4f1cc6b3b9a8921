"""Named scopes in a trace of torch.profiler; without effect, and without cost, while nothing is
recorded.

``scope(name)`` names what runs inside it. ``of_layer(name, f)`` names the forward of a function,
``forward NAME``, and what autograd runs for its backward, ``backward NAME``: the tensors that go in
and come out pass through identities whose gradients begin and end that scope. What an enclosing
``remat`` computes again is a ``forward NAME`` too, within the backward of the step.
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

_F = TypeVar("_F", bound=Callable[..., Any])


class _Recording:
    """The names that were used, and the open scope of a backward: of one layer at a time, on
    whatever thread it runs.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.open_backward: record_function | None = None

    def begin(self, name: str) -> None:
        # A layer whose input needs no gradient has no mark that would have ended its scope.
        self.end()
        self.names.add(name)
        # Entered and left by hand: begin and end are called from two nodes of the graph.
        self.open_backward = record_function(name)
        self.open_backward.__enter__()

    def end(self) -> None:
        if self.open_backward is not None:
            self.open_backward.__exit__(None, None, None)
            self.open_backward = None


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
        _recording.end()
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

    def named(params: Any, carry: Any, *rest: Any) -> Any:
        # The backward runs from the output to the input: it begins where the forward ends.
        carry = _mark(carry, f"backward {name}", begins=False)
        out, aux = f(params, carry, *rest)
        return _mark(out, f"backward {name}", begins=True), aux

    def scoped(*args: Any) -> Any:
        with scope(f"forward {name}"):
            return named(*args)

    return scoped  # pyright: ignore[reportReturnType]


def _mark(values: Any, name: str, *, begins: bool) -> Any:
    leaves, structure = tree.flatten(values)
    index = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
    # One node for all of them, so that the scope begins and ends once.
    marked = _Mark.apply(name, begins, *[leaves[i] for i in index])
    for i, x in zip(index, marked, strict=True):
        leaves[i] = x
    return tree.unflatten(structure, leaves)


class _Mark(torch.autograd.Function):
    """Identity of several tensors; its backward, which is one too, begins or ends a scope."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, begins: bool, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.scope, ctx.begins = inputs[:2]
        # A missing cotangent stays missing, as without the mark.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        if _recording is not None:
            if ctx.begins:
                _recording.begin(ctx.scope)
            else:
                _recording.end()
        return (None, None, *cotangents)
