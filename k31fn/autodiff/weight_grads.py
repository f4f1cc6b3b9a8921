"""Weight gradients that are put off: what :func:`k31fn.autodiff.split_vjp` records in the backward
of the inputs.

A :class:`WeightTape` is one recorded function: the outermost, or one that a remat runs again. On
it, a product with a weight gives the cotangent of its input at once, and is noted with where its
weight came from, so that the weight's gradient can follow later: through the tape to the function's
parameters, and from these through the enclosing tape.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from k31fn import tree
from k31fn.autodiff.graph_search import graph_leaves
from k31fn.autodiff.leaves import pick
from k31fn.autodiff.omitted_inputs import OmittedInputs

__all__ = ["GraphStart", "WeightTape", "current_weight_tape", "weight_product"]


class _PendingGrad(NamedTuple):
    """A gradient that is still to be computed, and the edge of the graph that it belongs to."""

    of: GradientEdge
    compute: Callable[[], Tensor | None]


class _Link(NamedTuple):
    """An input of a tape, and the tensor of the enclosing tape that it stands for."""

    inside: GradientEdge
    outside: GradientEdge


@dataclass(eq=False)
class WeightTape:
    """One recorded function; a replay is a child of the tape on which its remat stands.

    Attributes:
        omitted: inputs that the graph of the function does not hold; None: it holds all.
        pending: gradients of weights that are still to be computed.
        children: tapes of the replays inside.
        links: from its inputs to the enclosing tape.
        inputs: the floating arguments of the function; empty when the tape is closed.
        starts: for inputs that are a :class:`GraphStart`, their edges by the id of its anchor.
    """

    omitted: OmittedInputs | None = None
    pending: list[_PendingGrad] = field(default_factory=list)
    children: list[WeightTape] = field(default_factory=list)
    links: list[_Link] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    starts: dict[int, GradientEdge] = field(default_factory=dict)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, products are noted on this tape."""
        token = _TAPE.set(self)
        try:
            yield
        finally:
            _TAPE.reset(token)

    def start_at(self, anchors: Sequence[Tensor], edges: Sequence[GradientEdge]) -> None:
        """Notes the edges of inputs that are a :class:`GraphStart`, by the leaves behind them."""
        self.inputs = list(anchors)
        for anchor, edge in zip(anchors, edges, strict=True):
            self.starts[id(anchor)] = edge

    def watch(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """``f``, whose floating arguments are this tape's inputs and whose products are noted on
        it.
        """

        def watched(*args: Any) -> Any:
            self.inputs = [
                x for x in tree.leaves(args) if isinstance(x, Tensor) and x.is_floating_point()
            ]
            with self.running():
                return f(*args)

        return watched

    def add(self, edges: Sequence[GradientEdge], grads: Sequence[Tensor | None]) -> None:
        """Adds gradients that are there already."""
        for edge, grad in zip(edges, grads, strict=True):
            if grad is not None:
                self.pending.append(_PendingGrad(edge, lambda grad=grad: grad))

    def close(self, outside: Sequence[Tensor]) -> None:
        """After the backward of the inputs: remembers which of ``outside`` the noted weights came
        from, nothing else.

        Args:
            outside: the tensors that the inputs stand for.
        """
        by_id: dict[int, tuple[Tensor, Tensor]] = {}
        for x, stands_for in zip(self.inputs, outside, strict=True):
            by_id[id(x)] = x, stands_for
        ends: list[GradientEdge] = []
        for p in self.pending:
            ends.append(p.of)
        for child in self.children:
            for link in child.links:
                ends.append(link.outside)
        for leaf in graph_leaves(ends):
            if id(leaf) not in by_id:
                raise RuntimeError(
                    "a put off weight gradient leads to a tensor that is no argument of its "
                    "function"
                )
            inside, stands_for = by_id[id(leaf)]
            if stands_for.requires_grad:
                edge = self.starts.get(id(leaf)) or get_gradient_edge(inside)
                self.links.append(_Link(edge, get_gradient_edge(stands_for)))
        # Only edges stay: a gathered weight is not to live until its gradient is computed.
        self.inputs, self.starts = [], {}

    def gradients(self, wanted: Sequence[GradientEdge]) -> list[Tensor | None]:
        """The put off part of the gradients of ``wanted``, inputs of this tape; frees what was kept
        for it.

        Weights that share no input are finished one after the other, so that few gradients are held
        at once.
        """
        index = {id(graph_leaves([edge])[0]): i for i, edge in enumerate(wanted)}
        total: list[Tensor | None] = [None] * len(wanted)
        for numbers, pending in _by_shared_input(self._take(), index):
            edges: list[GradientEdge] = []
            cotangents: list[Tensor] = []
            for p in pending:
                grad = p.compute()
                if grad is not None:
                    edges.append(p.of)
                    cotangents.append(grad)
            if not edges:
                continue
            grads = torch.autograd.grad(edges, pick(wanted, numbers), cotangents, allow_unused=True)
            for i, grad in zip(numbers, grads, strict=True):
                total[i] = grad
        return total

    def _take(self) -> list[_PendingGrad]:
        """All that ends on this tape: its own products, and what the replays on it leave at their
        arguments.
        """
        pending, children = self.pending, self.children
        # Taken, not copied: a cotangent is freed as soon as its weight's gradient is computed.
        self.pending, self.children = [], []
        for child in children:
            # The child's gradients are computed together, when the first of them is asked for.
            child_grads = functools.cache(child.gradients_of_links)
            for i, link in enumerate(child.links):
                pending.append(
                    _PendingGrad(link.outside, lambda i=i, grads=child_grads: grads()[i])
                )
        return pending

    def gradients_of_links(self) -> list[Tensor | None]:
        """:meth:`gradients` of the inputs that are linked to the enclosing tape."""
        return self.gradients([link.inside for link in self.links])


# A context variable: products are deep inside of layers, which do not know that a pipeline splits.
_TAPE: contextvars.ContextVar[WeightTape | None] = contextvars.ContextVar(
    "k31fn_weight_tape", default=None
)


def current_weight_tape() -> WeightTape | None:
    """The tape of the function that is running; None if no weight gradient is to be put off."""
    return _TAPE.get()


def weight_product(f: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
    """``f(x, w)``, a product with a weight, whose gradient for ``w`` an enclosing ``split_vjp``
    puts off.

    Where ``x`` needs no gradient there is nothing to put it off for. A ``w`` that depends on the
    arguments of which the cotangent is wanted first is found by ``split_vjp``, which refuses it.
    """
    tape = _TAPE.get()
    # In the forward of a rule nothing has a graph: its products are noted when a replay makes one.
    if tape is None or not (torch.is_grad_enabled() and x.requires_grad and w.requires_grad):
        return f(x, w)
    y: Tensor = _WeightProductFunction.apply(_WeightProduct(tape, f, w), x)
    return y


class _WeightProductFunction(torch.autograd.Function):
    """The product as a node between ``x`` and ``y`` that the weight does not hang on."""

    @staticmethod
    def forward(ctx: Any, product: _WeightProduct, x: Tensor) -> Tensor:
        ctx.product = product
        ctx.is_weight_product = True  # for graph_search
        return product.forward(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        product, ctx.product = ctx.product, None
        if product is None or torch.is_grad_enabled():
            raise RuntimeError(
                "a product whose weight gradient is put off has one backward, of first order"
            )
        return None, product.backward(*cotangents)


class _WeightProduct:
    """One product on a small graph of its own, whose backward runs once for its input and once for
    its weight.

    torch's rules compute only the gradients that are asked for. The weight's value is kept until
    the cotangent of the input is computed; its gradient does not read it. So a gathered weight does
    not wait for its gradient.
    """

    def __init__(self, tape: WeightTape, f: Callable[[Tensor, Tensor], Tensor], w: Tensor) -> None:
        self.tape = tape
        self.f = f
        self.of = get_gradient_edge(w)
        # A list, since the graph below holds it too: emptied when it is not needed any more.
        self.weight: list[Any] = [w.detach()]
        self.edges: tuple[GradientEdge, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        # The graph holds these, and never self, which holds the graph: no cycle.
        weight, omitted = self.weight, self.tape.omitted
        storage = weight[0].untyped_storage().data_ptr()
        start = weight[0].storage_offset()

        def pack(t: Tensor) -> Any:
            # The weight, or a view of it such as its transpose: autograd hands over bare tensors.
            if t.untyped_storage().data_ptr() != storage:
                return omitted.pack(t) if omitted is not None else t.detach()
            return _WeightView(t.shape, t.stride(), t.storage_offset() - start, t.dtype, t.device)

        def unpack(packed: Any) -> Tensor:
            if not isinstance(packed, _WeightView):
                return omitted.unpack(packed) if omitted is not None else packed
            if not weight:
                # Autograd unpacks all that a node saved, also what this gradient does not read.
                empty = torch.empty((), dtype=packed.dtype, device=packed.device)
                return empty.expand(packed.shape)
            w = weight[0] if omitted is None else omitted.unpack(weight[0])
            return w.as_strided(packed.shape, packed.stride, w.storage_offset() + packed.offset)

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            x_start = GraphStart.apply([x.detach()], x.new_zeros((), requires_grad=True))
            w_start = GraphStart.apply(weight, x.new_zeros((), requires_grad=True))
            y = self.f(x_start, w_start)
        if omitted is not None:
            weight[0] = omitted.pack(weight[0])
        self.edges = get_gradient_edge(y), get_gradient_edge(x_start), get_gradient_edge(w_start)
        return y.detach()

    def backward(self, ct: Tensor) -> Tensor:
        y, x, w = self.edges
        # The graph is run twice, for the input now and for the weight later.
        (dx,) = torch.autograd.grad([y], [x], [ct], retain_graph=True)
        self.weight.clear()
        self.edges = ()

        def weight_grad() -> Tensor:
            return torch.autograd.grad([y], [w], [ct])[0]

        self.tape.pending.append(_PendingGrad(self.of, weight_grad))
        return dx


class _WeightView(NamedTuple):
    """A saved tensor that is a view of the weight: where it lies in the weight's storage."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class GraphStart(torch.autograd.Function):
    """``GraphStart.apply([x], anchor)``: ``x`` as the start of a graph that does not hold its
    value, as it would a leaf's.

    ``anchor`` is a scalar that requires grad. The gradient is taken at the edge of the result.
    """

    @staticmethod
    def forward(ctx: Any, value: list[Tensor], anchor: Tensor) -> Tensor:
        """The value in the list, which hides it from autograd."""
        return value[0].detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        """Never runs."""
        raise AssertionError("the gradient is taken before this node")


def _by_shared_input(
    pending: Sequence[_PendingGrad], index: dict[int, int]
) -> list[tuple[list[int], list[_PendingGrad]]]:
    """Gradients by the inputs that they lead to, numbered by ``index``; those with one in common
    together.
    """
    groups: list[tuple[set[int], list[_PendingGrad]]] = []
    for p in pending:
        numbers = {index[id(x)] for x in graph_leaves([p.of]) if id(x) in index}
        if not numbers:
            continue  # of a weight that is not trained
        others: list[tuple[set[int], list[_PendingGrad]]] = []
        members: list[_PendingGrad] = []
        for group in groups:
            if group[0] & numbers:
                numbers |= group[0]
                members += group[1]
            else:
                others.append(group)
        groups = [*others, (numbers, [*members, p])]
    # In the order of the inputs: a set has none.
    return [(sorted(numbers), members) for numbers, members in groups]
