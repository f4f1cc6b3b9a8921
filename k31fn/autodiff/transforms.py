"""Derivatives of pure functions: vjp, value_and_grad, hessian."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from k31fn import _functorch, tree
from k31fn.autodiff.captured_tensors import captured_tensors
from k31fn.autodiff.custom_vjp import differentiable, differentiable_leaves
from k31fn.autodiff.weight_grads import WeightTape, current_weight_tape

__all__ = [
    "differentiated",
    "hessian",
    "taping",
    "value_and_grad",
    "vjp",
    "vjp_by_tape",
    "vjp_once",
]


def vjp(f: Callable[..., Any], *args: Any, has_aux: bool = False) -> Any:
    """``f(*args)`` and its pullback, without a graph of the backward.

    Differentiates with respect to every floating leaf of ``args``. The pullback takes a cotangent
    with the structure of the output and returns one gradient tree per argument: zeros where the
    output does not depend on a leaf, ``()`` for an integer leaf. It may be called once, from any
    thread; the residuals are freed by it.

    Inside another derivative (an enclosing :func:`vjp`, or plain autograd with respect to an
    argument or a tensor that ``f`` captured) the result is differentiable itself, and nothing is
    freed early.

    Returns:
        ``(out, pull)``, or ``(out, pull, aux)`` if ``has_aux`` (``f`` then returns ``(out, aux)``).
    """
    values, structure = tree.flatten(args)
    index = differentiable_leaves(values)
    if _functorch.transforms_active():
        out, aux, pull = _vjp_by_transform(f, values, structure, index, has_aux)
    else:
        out, aux, pull = vjp_by_tape(f, values, structure, index, has_aux)

    def pull_tree(ct: Any) -> tuple[Any, ...]:
        grads: list[Any] = [()] * len(values)
        for i, g in zip(index, pull(ct), strict=True):
            grads[i] = torch.zeros_like(values[i]) if g is None else g
        return tree.unflatten(structure, grads)

    return (out, pull_tree, aux) if has_aux else (out, pull_tree)


def _substitute(values: list[Any], index: list[int], leaves: Sequence[Tensor | None]) -> list[Any]:
    replaced = list(values)
    for i, leaf in zip(index, leaves, strict=True):
        replaced[i] = leaf
    return replaced


# Set while vjp_by_tape runs its function: a derivative taken inside must be differentiable itself,
# also with respect to tensors that it only captured.
_TAPING: contextvars.ContextVar[bool] = contextvars.ContextVar("k31fn_taping", default=False)


@contextlib.contextmanager
def taping() -> Iterator[None]:
    """Inside, a graph is built, and derivatives taken there are part of it."""
    token = _TAPING.set(True)
    try:
        with torch.enable_grad():
            yield
    finally:
        _TAPING.reset(token)


def differentiated(f: Callable[..., Any], inputs: Sequence[Tensor]) -> bool:
    """Whether an autograd graph outside goes on through a derivative of ``f`` taken here."""
    if not torch.is_grad_enabled():
        return False
    return (
        _TAPING.get()
        or any(_functorch.is_tracked(x) for x in inputs)
        or any(True for _ in captured_tensors(f))
    )


def _vjp_by_transform(
    f: Callable[..., Any], values: list[Any], structure: Any, index: list[int], has_aux: bool
) -> tuple[Any, Any, Callable[[Any], Sequence[Tensor | None]]]:
    """By ``torch.func.vjp``, which knows floating outputs and tensors only: all else goes around
    it.
    """
    found: list[Any] = []

    def of_leaves(*leaves: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        result = f(*tree.unflatten(structure, _substitute(values, index, leaves)))
        out, aux = result if has_aux else (result, ())
        everything, out_def = tree.flatten((out, aux))
        num_out = out_def.child(0).num_leaves
        tensors = [i for i, o in enumerate(everything) if isinstance(o, Tensor)]
        heads = [i for i in tensors if i < num_out and differentiable(everything[i])]
        rest = [i for i in tensors if i not in heads]
        found[:] = everything, out_def, num_out, heads, rest
        # torch.func.vjp refuses to have no output
        primal = tuple(everything[i] for i in heads) or tuple(x.new_zeros(()) for x in leaves[:1])
        return primal, [everything[i] for i in rest]

    if index:
        result: Any = torch.func.vjp(of_leaves, *[values[i] for i in index], has_aux=True)
        primal, pull, aux_tensors = result
    else:
        (primal, aux_tensors), pull = of_leaves(), None
    everything, out_def, num_out, heads, rest = found
    found.clear()
    nested = _functorch.grad_active() or differentiated(f, [values[i] for i in index])
    known = _substitute(_substitute(everything, heads, primal[: len(heads)]), rest, aux_tensors)

    def pull_leaves(ct: Any) -> Sequence[Tensor | None]:
        cotangents = _cotangents(ct, num_out)
        if pull is None or not heads:
            return [None] * len(index)
        return pull(tuple(cotangents[i] for i in heads), retain_graph=nested, create_graph=nested)

    return *tree.unflatten(out_def, known), pull_leaves


def _cotangents(ct: Any, num_out: int) -> list[Any]:
    cotangents = tree.leaves(ct, allow_none=True)
    if len(cotangents) != num_out:
        raise ValueError(f"vjp: cotangent has {len(cotangents)} leaves, the output {num_out}")
    return cotangents


def vjp_by_tape(
    f: Callable[..., Any],
    values: list[Any],
    structure: Any,
    index: list[int],
    has_aux: bool,
    goals: Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Sequence[Any], bool]] | None = None,
) -> tuple[Any, Any, Callable[[Any], Sequence[Tensor | None]]]:
    """Output, aux and pullback to the leaves of ``index``; a gradient is None where there is no
    dependence.

    With ``goals(outputs, inputs) -> (places, retain)`` the pullback is to these places of the graph
    instead, and frees nothing if ``retain``.
    """
    nested = differentiated(f, [values[i] for i in index])
    with taping():
        # Nested in another autograd graph, the inputs must stay part of it: alias instead of
        # detaching.
        inputs = [
            values[i].view_as(values[i]) if nested else values[i].detach().requires_grad_()
            for i in index
        ]
        if nested:
            inputs = [x if x.requires_grad else x.requires_grad_() for x in inputs]
        result = f(*tree.unflatten(structure, _substitute(values, index, inputs)))
    out, aux = result if has_aux else (result, ())
    outputs, out_def = tree.flatten(out)
    heads = [i for i, o in enumerate(outputs) if isinstance(o, Tensor) and o.requires_grad]

    def pull(ct: Any) -> Sequence[Tensor | None]:
        if heads and not outputs:
            raise RuntimeError(
                "vjp: the pullback was called already; its residuals were freed by the first call"
            )
        cotangents = _cotangents(ct, out_def.num_leaves)
        if not heads or not index:
            return [None] * len(index)
        tensors, cts = [outputs[i] for i in heads], [cotangents[i] for i in heads]
        to: Any = inputs
        retain = nested
        if goals is not None:
            to, retain = goals(tensors, inputs)
        grads = torch.autograd.grad(
            tensors, to, cts, allow_unused=True, create_graph=nested, retain_graph=retain
        )
        if not nested:
            outputs.clear()
            inputs.clear()
        return grads

    detach = (lambda t: t) if nested else (lambda t: t.detach() if isinstance(t, Tensor) else t)
    return tree.map(detach, out), tree.map(detach, aux), pull


def value_and_grad(
    f: Callable[..., Any], argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """The function that returns ``f``'s scalar value and its gradient with respect to
    ``args[argnums]``.

    The numbers of ``torch.func.grad_and_value``, without its graph of the backward: this is what
    training calls.

    Returns:
        ``(*args) -> (value, grads)``, or ``((value, aux), grads)`` if ``has_aux``. ``grads`` has
        the structure of the argument (a tuple of trees for a tuple of argnums).

    Raises:
        ValueError: the value is not a floating scalar, or an argument is named twice.
    """
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if len(set(chosen)) != len(chosen):
        raise ValueError(
            f"value_and_grad: argnums={argnums} names an argument twice; its gradient would be "
            "split"
        )

    @functools.wraps(f)
    def wrapped(*args: Any) -> Any:
        def of_chosen(*some: Any) -> Any:
            full = list(args)
            for i, a in zip(chosen, some, strict=True):
                full[i] = a
            return f(*full)

        result = vjp(of_chosen, *[args[i] for i in chosen], has_aux=has_aux)
        value, pull = result[0], result[1]
        if not isinstance(value, Tensor) or value.ndim or not differentiable(value):
            raise ValueError(
                f"value_and_grad: {getattr(f, '__name__', f)} must return a floating scalar, got "
                f"{value!r}"
            )
        grads = pull(torch.ones_like(value))
        grads = grads[0] if isinstance(argnums, int) else grads
        return ((value, result[2]), grads) if has_aux else (value, grads)

    return wrapped


def hessian(f: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    """The Hessian of a scalar function, reverse over reverse (``torch.func.hessian`` needs forward
    mode).
    """
    return torch.func.jacrev(torch.func.jacrev(f, argnums), argnums)


def vjp_once(f: Callable[..., Any], args: Any, ct: Any, needs: Any) -> tuple[Any, ...]:
    """Gradients of ``<f(args), ct>`` with respect to the leaves of ``args`` that are True in
    ``needs``, else ``None``.

    Differentiable itself where the caller is being differentiated. Under ``torch.func`` it is the
    gradient of an inner product, so that the new level is closed again before this returns (a
    pullback that outlives its level breaks when remats nest); products with ``ct`` are exact.
    """
    values, structure = tree.flatten(args)
    floating = differentiable_leaves(values)
    needed = tree.leaves(needs)
    index = [i for i in floating if needed[i]]
    if not index:
        return tree.unflatten(structure, [None] * len(values))
    if _functorch.transforms_active():

        def inner_product(*leaves: Tensor) -> Tensor:
            outputs = tree.leaves(f(*tree.unflatten(structure, _substitute(values, index, leaves))))
            pairs = zip(outputs, tree.leaves(ct, allow_none=True), strict=True)
            terms = [(o * c).sum() for o, c in pairs if differentiable(o)]
            return functools.reduce(torch.add, terms) if terms else leaves[0].new_zeros(())

        grads = torch.func.grad(inner_product, argnums=tuple(range(len(index))))(
            *[values[i] for i in index]
        )
    else:
        outer, inner = current_weight_tape(), WeightTape()
        _, _, pull = vjp_by_tape(
            f if outer is None else inner.watch(f), values, structure, index, has_aux=False
        )
        grads = pull(ct)
        if outer is not None:  # weight gradients are put off
            inner.close([values[i] for i in floating])
            outer.children.append(inner)
    return tree.unflatten(structure, _substitute([None] * len(values), index, grads))
