"""One run of a function whose graph is kept, for a backward that comes after the arguments were
made again.

A remat that runs its function again has all arguments of the functions inside once more: gathered
weights, normalised hidden states. So what is kept of an inner function that is not to run again
(:func:`k31fn.autodiff.keepable`) is its graph without the values of its inputs
(:mod:`k31fn.autodiff.inputs`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from k31fn import tree
from k31fn.autodiff.custom_vjp import differentiable
from k31fn.autodiff.deferred import Source, Tape, current_tape
from k31fn.autodiff.inputs import Inputs
from k31fn.autodiff.transforms import taping

__all__ = ["Kept"]


class Kept:
    """The pullback of one run of ``f(*args)``, to arguments that are given again.

    Under :func:`k31fn.autodiff.split_vjp` gradients of weights, which are the first argument, are
    put off there too.

    It does not hold the value: that becomes an output of a graph that holds this.
    """

    @classmethod
    def run(cls, f: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Kept]:
        """The value, without graph, and the pullback."""
        kept = cls(args)
        out = kept._run(f, args)
        return tree.map(lambda o: o.detach() if isinstance(o, Tensor) else o, out), kept

    def __init__(self, args: tuple[Any, ...]) -> None:
        values, structure = tree.flatten(args)
        self._index = [
            i for i, v in enumerate(values) if isinstance(v, Tensor) and differentiable(v)
        ]
        self._num_weights = sum(i < structure.child(0).num_leaves for i in self._index)
        self._tape = Tape() if current_tape() is not None else None
        self._inputs = Inputs([values[i] for i in self._index])
        self._edges: list[GradientEdge] = []
        self._heads: dict[int, Tensor] = {}
        self._pulled = False

    def _run(self, f: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        values, structure = tree.flatten(args)
        floating = [values[i] for i in self._index]
        with taping():
            anchors = [
                torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True)
                for x in floating
            ]
            starts = [Source.apply([x.detach()], a) for x, a in zip(floating, anchors, strict=True)]
            self._edges = [get_gradient_edge(x) for x in starts]
            for i, x in zip(self._index, starts, strict=True):
                values[i] = x
            with (
                self._inputs.left_out(),
                self._tape.running() if self._tape else contextlib.nullcontext(),
            ):
                out = f(*tree.unflatten(structure, values))
        if self._tape is not None:
            self._tape.start_at(anchors, self._edges)
        outputs = enumerate(tree.leaves(out))
        self._heads = {i: o for i, o in outputs if isinstance(o, Tensor) and o.requires_grad}
        return out

    def pull(self, args: tuple[Any, ...], needs: Any, ct: Any) -> tuple[Any, ...]:
        """Gradients for the arguments, a tree for each; None where ``needs``, trees of bools, has
        False.

        Raises:
            RuntimeError: a second call.
        """
        if self._pulled:
            raise RuntimeError(
                "the graph of a kept function is pulled back once, and was; use remat='none' or "
                "'layer'"
            )
        self._pulled = True
        values, structure = tree.flatten(args)
        wanted = [(k, i) for k, i in enumerate(self._index) if tree.leaves(needs)[i]]
        grads: list[Tensor | None] = [None] * len(values)
        if wanted and self._heads:
            cotangents = tree.leaves(ct, allow_none=True)
            self._inputs.give([values[i] for i in self._index])
            found = torch.autograd.grad(
                list(self._heads.values()),
                [self._edges[k] for k, _ in wanted],
                [cotangents[i] for i in self._heads],
                allow_unused=True,
            )
            for (_, i), g in zip(wanted, found, strict=True):
                grads[i] = g
        self._heads, self._edges = {}, []
        outer = current_tape()
        if self._tape is None or outer is None:
            self._inputs.drop(len(self._index))
        else:
            self._inputs.drop(self._num_weights)  # the gradient of a weight does not read it
            self._tape.close([values[i] for i in self._index])
            outer.children.append(self._tape)
        return tree.unflatten(structure, grads)
