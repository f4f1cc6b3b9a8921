"""One run of a function whose graph is kept, for a backward that comes after the arguments were
made again.

A remat that runs its function again has all arguments of the functions inside once more: gathered
weights, normalised hidden states. So what is kept of an inner function that is not to run again
(:func:`k31fn.autodiff.keep`) is its graph without the values of its inputs
(:mod:`k31fn.autodiff.omitted_inputs`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from k31fn import tree
from k31fn.autodiff.leaves import differentiable_leaves, pick
from k31fn.autodiff.omitted_inputs import OmittedInputs
from k31fn.autodiff.transforms import taping
from k31fn.autodiff.weight_grads import GraphStart, WeightTape, current_weight_tape

__all__ = ["KeptGraph"]


class KeptGraph:
    """The pullback of one run of ``f(*args)``, to arguments that are given again.

    Under :func:`k31fn.autodiff.split_vjp` gradients of weights, which are the first argument, are
    put off there too.

    It does not hold the value: that becomes an output of a graph that holds this.
    """

    @classmethod
    def run(cls, f: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, KeptGraph]:
        """The value, without graph, and the pullback."""
        graph = cls(args)
        out = graph._run(f, args)
        return tree.map(lambda o: o.detach() if isinstance(o, Tensor) else o, out), graph

    def __init__(self, args: tuple[Any, ...]) -> None:
        values, structure = tree.flatten(args)
        self._index = differentiable_leaves(values)
        # Weights are the first argument, as a layer has it.
        self._num_weights = sum(i < structure.child(0).num_leaves for i in self._index)
        self._inputs = OmittedInputs(pick(values, self._index))
        self._tape: WeightTape | None = None
        if current_weight_tape() is not None:
            self._tape = WeightTape(omitted=self._inputs)
        self._edges: list[GradientEdge] = []
        self._heads: dict[int, Tensor] = {}
        self._is_pulled = False

    def _run(self, f: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        values, structure = tree.flatten(args)
        anchors: list[Tensor] = []
        with taping():
            for i in self._index:
                x = values[i]
                anchor = torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True)
                # A leaf would hold the value of the argument as long as the graph lives.
                start = GraphStart.apply([x.detach()], anchor)
                anchors.append(anchor)
                self._edges.append(get_gradient_edge(start))
                values[i] = start
            recorded = self._tape.running() if self._tape else contextlib.nullcontext()
            # Hooks of an inner product replace these: the tape tells it of the omitted inputs.
            with self._inputs.left_out(), recorded:
                out = f(*tree.unflatten(structure, values))
        if self._tape is not None:
            self._tape.start_at(anchors, self._edges)
        for i, o in enumerate(tree.leaves(out)):
            if isinstance(o, Tensor) and o.requires_grad:
                self._heads[i] = o
        return out

    def pull(self, args: tuple[Any, ...], needs: Any, ct: Any) -> tuple[Any, ...]:
        """Gradients for the arguments, a tree for each; None where ``needs``, trees of bools, has
        False.

        Raises:
            RuntimeError: a second call.
        """
        if self._is_pulled:
            raise RuntimeError(
                "the graph of a kept function is pulled back once, and was; use remat='none' or "
                "'layer'"
            )
        self._is_pulled = True
        values, structure = tree.flatten(args)
        inputs = pick(values, self._index)
        needed = tree.leaves(needs)
        # Numbers among the differentiable leaves of those whose gradient is used.
        wanted = [k for k, i in enumerate(self._index) if needed[i]]
        all_grads: list[Tensor | None] = [None] * len(values)
        if wanted and self._heads:
            cotangents = tree.leaves(ct, allow_none=True)
            # Without a cotangent nothing asks for them, and the replay's may be freed at once.
            self._inputs.give(inputs)
            grads = torch.autograd.grad(
                list(self._heads.values()),
                pick(self._edges, wanted),
                pick(cotangents, self._heads),
                allow_unused=True,
            )
            for k, grad in zip(wanted, grads, strict=True):
                all_grads[self._index[k]] = grad
        # Frees the graph: this object lives on in a graph that may be freed much later.
        self._heads, self._edges = {}, []
        outer = current_weight_tape()
        if self._tape is None or outer is None:
            self._inputs.drop(len(self._index))
        else:
            # The gradients of the weights come later. They read the other inputs, and no weight.
            self._inputs.drop(self._num_weights)
            self._tape.close(inputs)
            outer.children.append(self._tape)
        return tree.unflatten(structure, all_grads)
