"""Pullbacks of pure functions, with and without a level of ``torch.func``."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from k31fn import _functorch, tree
from k31fn.autodiff.captured_tensors import captured_tensors
from k31fn.autodiff.compiled import refuse_compile
from k31fn.autodiff.leaves import differentiable, differentiable_leaves, pick
from k31fn.autodiff.weight_grads import WeightTape, current_weight_tape

__all__ = [
    "differentiated",
    "taping",
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
    refuse_compile("vjp")
    values, structure = tree.flatten(args)
    index = differentiable_leaves(values)
    # torch.autograd.grad does not see the levels of torch.func, and torch.func.vjp is slower and
    # holds more: each where it is needed.
    by = _vjp_by_transform if _functorch.transforms_active() else vjp_by_tape
    out, aux, pull = by(f, values, structure, index, has_aux)

    def pull_tree(ct: Any) -> tuple[Any, ...]:
        grads: list[Any] = [()] * len(values)
        for i, grad in zip(index, pull(ct), strict=True):
            grads[i] = torch.zeros_like(values[i]) if grad is None else grad
        return tree.unflatten(structure, grads)

    return (out, pull_tree, aux) if has_aux else (out, pull_tree)


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
    # The search for captured tensors comes last: it costs as much as a small function.
    return (
        _TAPING.get()
        or any(_functorch.is_tracked(x) for x in inputs)
        or any(True for _ in captured_tensors(f))
    )


def _vjp_by_transform(
    f: Callable[..., Any], values: list[Any], structure: Any, index: list[int], has_aux: bool
) -> tuple[Any, Any, Callable[[Any], Sequence[Tensor | None]]]:
    """Output, aux and pullback by ``torch.func.vjp``, which knows floating outputs and tensors
    only: all else goes around it.
    """
    run: list[Any] = []  # what the run below leaves for this function, besides its tensors

    def of_leaves(*leaves: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        result = f(*tree.unflatten(structure, _substitute(values, index, leaves)))
        out, aux = result if has_aux else (result, ())
        everything, out_def = tree.flatten((out, aux))
        num_out = out_def.child(0).num_leaves
        heads: list[int] = []
        rest: list[int] = []
        for i, o in enumerate(everything):
            if isinstance(o, Tensor):
                is_head = i < num_out and differentiable(o)
                (heads if is_head else rest).append(i)
        run[:] = everything, out_def, num_out, heads, rest
        outputs = pick(everything, heads)
        if leaves and not outputs:  # torch.func.vjp refuses to have no output
            outputs.append(leaves[0].new_zeros(()))
        return tuple(outputs), pick(everything, rest)

    if index:
        result: Any = torch.func.vjp(of_leaves, *pick(values, index), has_aux=True)
        outputs, pull, aux_tensors = result
    else:
        outputs, aux_tensors = of_leaves()
        pull = None
    everything, out_def, num_out, heads, rest = run
    run.clear()  # the function above lives as long as the pullback
    nested = _functorch.grad_active() or differentiated(f, pick(values, index))
    # The run's own tensors belong to the level of torch.func.vjp, which is closed by now.
    everything = _substitute(everything, heads, outputs[: len(heads)])
    everything = _substitute(everything, rest, aux_tensors)

    def pull_leaves(ct: Any) -> Sequence[Tensor | None]:
        cotangents = _cotangents(ct, num_out)
        if pull is None or not heads:
            return [None] * len(index)
        return pull(tuple(pick(cotangents, heads)), retain_graph=nested, create_graph=nested)

    return *tree.unflatten(out_def, everything), pull_leaves


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
    nested = differentiated(f, pick(values, index))
    inputs: list[Tensor] = []
    with taping():
        for i in index:
            # Nested in another autograd graph, the inputs must stay part of it: alias instead of
            # detaching. An alias of a leaf that nobody watches is no part of one yet.
            x = values[i].view_as(values[i]) if nested else values[i].detach()
            inputs.append(x if x.requires_grad else x.requires_grad_())
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
        head_tensors = pick(outputs, heads)
        to: Any = inputs
        retain = nested
        if goals is not None:
            to, retain = goals(head_tensors, inputs)
        grads = torch.autograd.grad(
            head_tensors,
            to,
            pick(cotangents, heads),
            allow_unused=True,
            create_graph=nested,
            retain_graph=retain,
        )
        if not nested:
            # The caller may hold the pullback long after it was called.
            outputs.clear()
            inputs.clear()
        return grads

    if not nested:
        # The pullback alone holds the graph: a caller who drops it frees the residuals.
        out = _without_graph(out)
        aux = _without_graph(aux)
    return out, aux, pull


def _without_graph(x: Any) -> Any:
    return tree.map(lambda t: t.detach() if isinstance(t, Tensor) else t, x)


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
        grads = _grad_of_inner_product(f, values, structure, index, ct)
    elif current_weight_tape() is None:
        _, _, pull = vjp_by_tape(f, values, structure, index, has_aux=False)
        grads = pull(ct)
    else:
        grads = _pull_on_weight_tape(f, values, structure, floating, index, ct)
    return tree.unflatten(structure, _substitute([None] * len(values), index, grads))


def _grad_of_inner_product(
    f: Callable[..., Any], values: list[Any], structure: Any, index: list[int], ct: Any
) -> Sequence[Tensor]:
    def inner_product(*leaves: Tensor) -> Tensor:
        outputs = tree.leaves(f(*tree.unflatten(structure, _substitute(values, index, leaves))))
        terms: list[Tensor] = []
        for o, c in zip(outputs, tree.leaves(ct, allow_none=True), strict=True):
            if differentiable(o):
                terms.append((o * c).sum())
        # Zero must have the level of an input: torch.func.grad refuses another one.
        return functools.reduce(torch.add, terms) if terms else leaves[0].new_zeros(())

    inputs = pick(values, index)
    return torch.func.grad(inner_product, argnums=tuple(range(len(index))))(*inputs)


def _pull_on_weight_tape(
    f: Callable[..., Any],
    values: list[Any],
    structure: Any,
    floating: list[int],
    index: list[int],
    ct: Any,
) -> Sequence[Tensor | None]:
    """The pullback of a replay under ``split_vjp``: the weights' gradients are put off."""
    outer = current_weight_tape()
    assert outer is not None
    tape = WeightTape()
    _, _, pull = vjp_by_tape(tape.watch(f), values, structure, index, has_aux=False)
    grads = pull(ct)
    # All floating arguments, not those of the index: the tape watches all.
    tape.close(pick(values, floating))
    outer.children.append(tape)
    return grads


def _substitute(values: Sequence[Any], index: Iterable[int], leaves: Sequence[Any]) -> list[Any]:
    """The values with others at these positions."""
    replaced = list(values)
    for i, leaf in zip(index, leaves, strict=True):
        replaced[i] = leaf
    return replaced
