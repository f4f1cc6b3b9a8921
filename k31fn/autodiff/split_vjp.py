"""Pullbacks in two parts: first the cotangent that another pipeline stage waits for, later the
weights' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

from k31fn import _functorch, tree
from k31fn.autodiff.graph_search import weight_edges
from k31fn.autodiff.leaves import differentiable, differentiable_leaves, pick
from k31fn.autodiff.transforms import differentiated, vjp, vjp_by_tape
from k31fn.autodiff.weight_grads import WeightTape

__all__ = ["SplitWork", "check_split", "split_vjp"]


def split_vjp(f: Callable[..., Any], weights: Any, *args: Any, has_aux: bool = False) -> Any:
    """``f(weights, *args)`` and its pullback in two parts.

        out, backward_input = split_vjp(f, weights, x)
        (dx,), backward_weight = backward_input(ct)
        dweights = backward_weight()

    Products with weights (:func:`k31fn.layers.linear.linear`, ``grouped_linear``, which call
    :func:`~k31fn.autodiff.weight_product`) give the cotangent of their input in the first part and
    the gradient of their weight in the second, also inside :func:`~k31fn.autodiff.remat`, which
    runs again in the first. What makes a weight (a gather, a cast) is differentiated in the
    second part too; inside of a remat, and where the weight that it is made of is used otherwise as
    well, in the first as far as other uses need it. Every other use of a weight is differentiated
    in the first part. No work is done twice: :func:`check_split` counts.

    Between the parts live, for each product, its input and the cotangent of its output; weights
    that were made from ``weights`` (gathered, cast) do not. (All residuals do, if a weight is used
    both as it is and to make something that is no weight of a product.) Each part may be called
    once. First order only.

    Args:
        f: a function of trees; it must not capture differentiated tensors.
        weights: its first argument.
        args: the others.
        has_aux: ``f`` returns ``(out, aux)``.

    Returns:
        ``(out, backward_input)``, or ``(out, backward_input, aux)``; ``backward_input(ct)`` returns
        one gradient tree per argument after ``weights`` (zeros where the output does not depend on
        a leaf, ``()`` for an integer), and ``backward_weight``.

    Raises:
        ValueError: inside another derivative or a ``torch.func`` transform; or, in
            ``backward_input``, a product whose weight depends on ``args``.
    """
    values, structure = tree.flatten((weights, *args))
    index = differentiable_leaves(values)
    if _functorch.transforms_active() or differentiated(f, pick(values, index)):
        raise ValueError(
            "split_vjp inside another derivative or transform: it is first order, and the "
            "outermost one"
        )
    num_weights = sum(i < structure.child(0).num_leaves for i in index)
    weight_index, arg_index = index[:num_weights], index[num_weights:]
    tape = WeightTape()
    edges: list[GradientEdge] = []
    owners: list[GradientEdge] = []

    def goals(
        heads: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor | GradientEdge], bool]:
        arg_inputs = inputs[num_weights:]
        # An edge to a node that is written in Python does not hold it: the heads do.
        for head in heads:
            owners.append(get_gradient_edge(head))
        places, retain = weight_edges(owners, arg_inputs)
        edges.extend(places)
        return [*arg_inputs, *edges], retain

    # Products inside note themselves on the tape while f runs, and again when a remat replays.
    out, aux, pull = vjp_by_tape(tape.watch(f), values, structure, index, has_aux, goals)

    def backward_input(ct: Any) -> tuple[tuple[Any, ...], Callable[[], Any]]:
        grads = pull(ct)
        of_args = grads[: len(arg_index)]
        # Where the output depends on nothing, pull returns a None for each leaf of the index, and
        # there are no edges.
        of_edges = grads[len(of_args) :][: len(edges)]
        tape.add(edges, of_edges)
        ends = _close(tape, num_weights)

        def backward_weight() -> Any:
            weight_grads = tape.gradients(ends)
            owners.clear()
            return _grad_trees(values, structure, weight_index, weight_grads)[0]

        return _grad_trees(values, structure, arg_index, of_args)[1:], backward_weight

    return (out, backward_input, aux) if has_aux else (out, backward_input)


def _close(tape: WeightTape, num_weights: int) -> list[GradientEdge]:
    """Ends the first part; where the weights' gradients are to arrive."""
    inputs = tape.inputs
    tape.close(inputs)
    ends = [get_gradient_edge(x) for x in inputs]
    reached = {id(link.inside.node) for link in tape.links}
    for x, end in zip(inputs[num_weights:], ends[num_weights:], strict=True):
        if id(end.node) in reached:
            raise ValueError(
                "split_vjp: the weight of a product depends on an argument of shape "
                f"{list(x.shape)}, whose gradient would come too late; multiply with @ there "
                "instead of linear"
            )
    return ends[:num_weights]


def _grad_trees(
    values: list[Any], structure: Any, index: list[int], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    """One tree per argument, with ``()`` for the leaves that are not of ``index``."""
    full: list[Any] = [()] * len(values)
    for i, grad in zip(index, grads, strict=True):
        full[i] = torch.zeros_like(values[i]) if grad is None else grad
    return tree.unflatten(structure, full)


class SplitWork(NamedTuple):
    """Floating-point operations of a whole backward and of its two parts, replays of remat
    included.

    Attributes:
        whole: of the backward in one.
        input: of the part for the inputs.
        weight: of the part for the weights.
    """

    whole: int
    input: int
    weight: int


def check_split(
    f: Callable[..., Any], weights: Any, *args: Any, tolerance: float = 0.01
) -> SplitWork:
    """Runs ``f(weights, *args)`` with its whole and with its split pullback, and compares.

    Args:
        f: as for :func:`split_vjp`, without aux.
        weights: its first argument.
        args: the others.
        tolerance: by which part of the whole the work of both parts may differ from it.

    Raises:
        ValueError: the parts do another amount of work than the whole, the second part does none,
            or a gradient differs; gives the figures.
    """
    out, pull = vjp(f, weights, *args)
    ct = tree.map(_wave, out)
    with FlopCounterMode(display=False) as whole:
        expected = pull(ct)
    _, backward_input = split_vjp(f, weights, *args)
    with FlopCounterMode(display=False) as first:
        of_args, backward_weight = backward_input(ct)
    with FlopCounterMode(display=False) as second:
        of_weights = backward_weight()
    work = SplitWork(whole.get_total_flops(), first.get_total_flops(), second.get_total_flops())
    total = work.input + work.weight
    figures = (
        f"inputs {work.input} + weights {work.weight} = {total} operations, the whole {work.whole}"
    )
    if abs(total - work.whole) > tolerance * work.whole:
        raise ValueError(
            f"split_vjp: the parts do other work than the whole: {figures}; do not split here"
        )
    if not work.weight:
        raise ValueError(f"split_vjp: nothing is put off: {figures}; do not split here")
    _compare((of_weights, *of_args), expected)
    return work


def _compare(grads: Any, expected: Any) -> None:
    rows = zip(tree.flatten_with_paths(grads), tree.leaves(expected), strict=True)
    for (path, g), e in rows:
        if not isinstance(e, Tensor) or not e.is_floating_point():
            continue
        # Half of the digits: sums in another order differ in the last ones, a missing term in the
        # first.
        rounding = torch.finfo(e.dtype).eps ** 0.5 * float(e.abs().amax()) if e.numel() else 0.0
        if not torch.allclose(g, e, rtol=0.0, atol=rounding):
            raise ValueError(
                f"split_vjp: the gradient of {path} differs from the whole backward's by {g - e}"
            )


def _wave(x: Any) -> Any:
    """A cotangent that is not constant; none for an integer."""
    if not isinstance(x, Tensor) or not differentiable(x):
        return x
    # A constant one would hide a sum over the wrong dimension.
    return torch.cos(torch.arange(x.numel(), dtype=x.dtype, device=x.device)).view(x.shape)
