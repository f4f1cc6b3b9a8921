"""Operators without their work, for programs that are run on meta tensors to see their shapes.

A reference on meta tensors computes nothing, but takes all its steps, thousands for a long
sequence. Inside :func:`shapes_only` an op of meta tensors takes those of its forward once for each
kind of arguments; after that its results and gradients are made at once. Memory that an op holds
between forward and backward is not seen so.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from k31fn import tree
from k31fn.autodiff.ambient import carry
from k31fn.autodiff.custom_vjp import custom_vjp

__all__ = ["WATCHERS", "known", "shapes_only"]

# carried to the threads of a backward, whose replays call operators too
WATCHERS: contextvars.ContextVar[tuple[Callable[..., None], ...]] = carry(
    contextvars.ContextVar("k31fn_watchers", default=())
)
"""Who is told of each call (:func:`k31fn.kernels.registry.watch_calls`)."""

_KNOWN: contextvars.ContextVar[dict[Any, Any] | None] = contextvars.ContextVar(
    "k31fn_shapes", default=None
)
_ONLY: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "k31fn_shapes_of", default=frozenset()
)


@contextlib.contextmanager
def shapes_only(*names: str) -> Iterator[None]:
    """Lets the ops of these names (all, if none is given) do nothing on meta tensors but have their
    shapes.

    That is: shapes, dtypes and first derivatives of their results.
    """
    known_token = _KNOWN.set({})
    only_token = _ONLY.set(frozenset(names))
    try:
        yield
    finally:
        _KNOWN.reset(known_token)
        _ONLY.reset(only_token)


def known(
    name: str, reference: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The op's results on meta tensors; None outside :func:`shapes_only`, or where there are
    values.
    """
    results = _KNOWN.get()
    only = _ONLY.get()
    if results is None or (only and name not in only):
        return None
    leaves, structure = tree.flatten((args, kwargs), allow_none=True)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if not all(x.is_meta for x in tensors):
        return None
    kinds = [(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves]
    key = (name, structure, tuple(kinds))
    if key not in results:
        # in a context of its own: an enclosing remat must not record what a replay will not do
        context = contextvars.Context()
        context.run(WATCHERS.set, WATCHERS.get())
        results[key] = context.run(_run_once, reference, leaves, structure)
    makers, has_gradient, reached = results[key]

    def fresh() -> Any:
        return tree.map(lambda make: make(), makers)

    def gradients(inputs: tuple[Tensor, ...], _: Any) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None] * len(inputs)
        for i in reached:
            grads[i] = torch.empty_like(inputs[i])
        return tuple(grads)

    rule = custom_vjp(lambda *x: (fresh(), x), gradients, name=name)
    # detached where the reference has no gradient: autograd must see the graph that it would see
    out = rule(*[x if i in reached else x.detach() for i, x in enumerate(tensors)])
    return tree.map(lambda x, kept: x if kept else x.detach(), out, has_gradient)


def _run_once(
    reference: Callable[..., Any], leaves: list[Any], structure: Any
) -> tuple[Any, Any, set[int]]:
    """Makers of the results, which of them are differentiable, and with respect to which tensors in
    ``leaves``.
    """
    values = [_fresh_leaf(x) if isinstance(x, Tensor) else x for x in leaves]
    args, kwargs = tree.unflatten(structure, values)
    with torch.enable_grad():
        out = reference(*args, **kwargs)
    # the graph is walked and not differentiated, which would take the steps of a whole backward
    nodes = [x.grad_fn for x in tree.leaves(out)]
    visited: set[Any] = set()
    reached_leaves: set[int] = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in visited:
            visited.add(node)
            nodes += [following for following, _ in node.next_functions]
            if hasattr(node, "variable"):  # the node that adds up a leaf's gradient
                reached_leaves.add(id(node.variable))
    tensors = [x for x in values if isinstance(x, Tensor)]
    reached = {i for i, x in enumerate(tensors) if id(x) in reached_leaves}
    return tree.map(_maker, out), tree.map(lambda x: x.requires_grad, out), reached


def _maker(x: Tensor) -> Callable[[], Tensor]:
    """A maker of tensors like ``x``, which it does not hold."""
    return functools.partial(
        torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device
    )


def _fresh_leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_() if x.is_floating_point() else x
