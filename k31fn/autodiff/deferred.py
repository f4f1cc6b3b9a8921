"""Weight gradients that are put off: what :func:`k31fn.autodiff.split_vjp` records in the backward
of the inputs.

A :class:`Tape` is one recorded function: the outermost, or one that a remat runs again. On it, a
product with a weight gives the cotangent of its input at once, and is noted with where its weight
came from, so that the weight's gradient can follow later: through the tape to the function's
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
from k31fn.autodiff.inputs import current_inputs

__all__ = ["Source", "Tape", "current_tape", "weight_edges", "weight_product"]


class _Product(NamedTuple):
    """A gradient that is still to be computed, and the node that it belongs to."""

    of: GradientEdge
    compute: Callable[[], Tensor | None]


class _Link(NamedTuple):
    """An input of a tape, and the tensor of the enclosing tape that it stands for."""

    inside: GradientEdge
    outside: GradientEdge


@dataclass(eq=False)
class Tape:
    """One recorded function; a replay is a child of the tape on which its remat stands."""

    products: list[_Product] = field(default_factory=list)
    children: list[Tape] = field(default_factory=list)
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
        """For inputs that are a :class:`Source`: the inputs' edges, by the leaves behind them."""
        self.inputs = list(anchors)
        self.starts = {id(anchor): edge for anchor, edge in zip(anchors, edges, strict=True)}

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

    def note(self, edges: Sequence[GradientEdge], grads: Sequence[Tensor | None]) -> None:
        """Adds gradients that are there already."""
        found = zip(edges, grads, strict=True)
        self.products += [_Product(edge, lambda g=g: g) for edge, g in found if g is not None]

    def close(self, outside: Sequence[Tensor]) -> None:
        """After the backward of the inputs: remembers which of ``outside`` the noted weights came
        from, nothing else.

        Args:
            outside: the tensors that the inputs stand for.
        """
        given = {id(x): (x, y) for x, y in zip(self.inputs, outside, strict=True)}
        ends = [p.of for p in self.products] + [
            link.outside for c in self.children for link in c.links
        ]
        for leaf in _leaves(ends):
            if id(leaf) not in given:
                raise RuntimeError(
                    "a put off weight gradient leads to a tensor that is no argument of its "
                    "function"
                )
            inside, there = given[id(leaf)]
            if there.requires_grad:
                edge = self.starts.get(id(leaf)) or get_gradient_edge(inside)
                self.links.append(_Link(edge, get_gradient_edge(there)))
        self.inputs, self.starts = [], {}

    def gradients(self, wanted: Sequence[GradientEdge]) -> list[Tensor | None]:
        """The put off part of the gradients of ``wanted``, inputs of this tape; frees what was kept
        for it.

        Weights that share no input are finished one after the other, so that few gradients are held
        at once.
        """
        index = {id(_leaves([edge])[0]): i for i, edge in enumerate(wanted)}
        total: list[Tensor | None] = [None] * len(wanted)
        for goals, products in _groups(self._take(), index):
            given = [(p.of, g) for p in products if (g := p.compute()) is not None]
            if given:
                edges, cotangents = zip(*given, strict=True)
                found = torch.autograd.grad(
                    edges, [wanted[i] for i in goals], cotangents, allow_unused=True
                )
                for i, g in zip(goals, found, strict=True):
                    total[i] = g
        return total

    def _take(self) -> list[_Product]:
        """All that ends on this tape: its own products, and what the replays on it leave at their
        arguments.
        """
        found, children = self.products, self.children
        self.products, self.children = [], []
        for child in children:
            links = child.links
            of_child = functools.cache(
                lambda child=child, links=links: child.gradients([e.inside for e in links])
            )
            found += [
                _Product(link.outside, lambda i=i, of=of_child: of()[i])
                for i, link in enumerate(links)
            ]
        return found


_TAPE: contextvars.ContextVar[Tape | None] = contextvars.ContextVar("k31fn_deferring", default=None)


def current_tape() -> Tape | None:
    """The tape of the function that is running; None if no weight gradient is to be put off."""
    return _TAPE.get()


def weight_product(f: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
    """``f(x, w)``, a product with a weight, whose gradient for ``w`` an enclosing ``split_vjp``
    puts off.

    Where ``x`` needs no gradient there is nothing to put it off for. A ``w`` that depends on the
    arguments of which the cotangent is wanted first is found by ``split_vjp``, which refuses it.
    """
    tape = _TAPE.get()
    if tape is None or not (torch.is_grad_enabled() and x.requires_grad and w.requires_grad):
        return f(x, w)
    y: Tensor = _WeightProduct.apply(_Run(tape, f, w), x)
    return y


class _WeightProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: _Run, x: Tensor) -> Tensor:
        ctx.product = product
        return product.forward(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        product, ctx.product = ctx.product, None
        if product is None or torch.is_grad_enabled():
            raise RuntimeError(
                "a product whose weight gradient is put off has one backward, of first order"
            )
        return None, product.backward(*cotangents)


class _Run:
    """One product on a small graph of its own, whose backward runs once for its input and once for
    its weight.

    torch's rules compute only the gradients that are asked for. The weight's value is kept until
    the cotangent of the input is computed; its gradient does not read it. So a gathered weight does
    not wait for its gradient.
    """

    def __init__(self, tape: Tape, f: Callable[[Tensor, Tensor], Tensor], w: Tensor) -> None:
        self.tape, self.f, self.of = tape, f, get_gradient_edge(w)
        self.weight: list[Any] = [w.detach()]  # emptied when it is not needed any more
        self.inputs = current_inputs()
        self.edges: tuple[GradientEdge, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        weight, inputs = (
            self.weight,
            self.inputs,
        )  # the graph holds these, and never the run, which holds the graph
        storage, start = weight[0].untyped_storage().data_ptr(), weight[0].storage_offset()

        def pack(t: Tensor) -> Any:
            if t.untyped_storage().data_ptr() != storage:
                return inputs.pack(t) if inputs is not None else t.detach()
            return _OfWeight(t.shape, t.stride(), t.storage_offset() - start, t.dtype, t.device)

        def unpack(packed: Any) -> Tensor:
            if not isinstance(packed, _OfWeight):
                return inputs.unpack(packed) if inputs is not None else packed
            if not weight:
                return torch.empty((), dtype=packed.dtype, device=packed.device).expand(
                    packed.shape
                )
            w = weight[0] if inputs is None else inputs.unpack(weight[0])
            return w.as_strided(packed.shape, packed.stride, w.storage_offset() + packed.offset)

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            x, w = (
                Source.apply(t, x.new_zeros((), requires_grad=True)) for t in ([x.detach()], weight)
            )
            y = self.f(x, w)
        if inputs is not None:
            weight[0] = inputs.pack(weight[0])
        self.edges = get_gradient_edge(y), get_gradient_edge(x), get_gradient_edge(w)
        return y.detach()

    def backward(self, ct: Tensor) -> Tensor:
        y, x, w = self.edges
        (dx,) = torch.autograd.grad([y], [x], [ct], retain_graph=True)
        self.weight.clear()
        self.edges = ()
        self.tape.products.append(_Product(self.of, lambda: torch.autograd.grad([y], [w], [ct])[0]))
        return dx


class _OfWeight(NamedTuple):
    """A saved tensor that is a view of the weight: where it lies in the weight's storage."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class Source(torch.autograd.Function):
    """``Source.apply([x], anchor)``: ``x`` as the start of a graph that does not hold its value, as
    it would a leaf's.

    ``anchor`` is a scalar that requires grad. The gradient is taken at the edge of the result.
    """

    @staticmethod
    def forward(ctx: Any, value: list[Tensor], anchor: Tensor) -> Tensor:
        """The value in the list."""
        return value[0].detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        """Never runs."""
        raise AssertionError("the gradient is taken before this node")


def _leaves(edges: Sequence[GradientEdge]) -> list[Tensor]:
    """The differentiated tensors from which these come."""
    pending, seen, found = [edge.node for edge in edges], dict[int, Any](), list[Tensor]()
    while pending:
        node = pending.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node  # an id may be used again
        if node.name() == "torch::autograd::AccumulateGrad":
            leaf: Any = node
            found.append(leaf.variable)
        pending += [n for n, _ in node.next_functions]
    return found


def weight_edges(
    heads: Sequence[GradientEdge], args: Sequence[Tensor]
) -> tuple[list[GradientEdge], bool]:
    """Where the graph of ``heads`` goes over into what only makes weights: the weights, or what
    they were made into.

    A gradient that is taken to there leaves what made a weight for later. Only makes weights what
    depends neither on ``args`` nor on a product that is noted, is no rule that could run such
    products again, and does not lead to another of these places: a path to a weight crosses one of
    them.

    Returns:
        The places, and whether something was left out because it leads to one of them: a later
        gradient may pass it again.
    """
    stop = [
        get_gradient_edge(x).node for x in args
    ]  # held: the id of an object that is gone may be used again
    nodes = _in_order([h.node for h in heads])
    first = set[int]()
    for node in nodes:
        starts = any(node is n for n in stop) or node.name() in (
            "_WeightProductBackward",
            "_ForwardBackward",
        )
        if starts or any(id(n) in first for n, _ in node.next_functions):
            first.add(id(node))
    left_out = False
    while True:
        ends: list[tuple[Any, int]] = [(h.node, h.output_nr) for h in heads]
        ends += [edge for node in nodes if id(node) in first for edge in node.next_functions]
        found = {
            (id(n), i): GradientEdge(n, i) for n, i in ends if n is not None and id(n) not in first
        }
        places, leading = {key for key, _ in found}, set[int]()
        for node in nodes:
            if any(id(n) in places or id(n) in leading for n, _ in node.next_functions):
                leading.add(id(node))
        if not places & leading:
            return list(found.values()), left_out
        first |= places & leading
        left_out = True


def _in_order(roots: Sequence[Any]) -> list[Any]:
    """All nodes below these, each after those that it leads to."""
    seen, order, pending = dict[int, Any](), list[Any](), [(root, False) for root in roots]
    while pending:
        node, below_done = pending.pop()
        if below_done:
            order.append(node)
        elif node is not None and id(node) not in seen:
            seen[id(node)] = node
            pending.append((node, True))
            pending += [(n, False) for n, _ in node.next_functions]
    return order


def _groups(
    products: Sequence[_Product], index: dict[int, int]
) -> list[tuple[list[int], list[_Product]]]:
    """Products by the inputs that they lead to, numbered by ``index``; those with one in common
    together.
    """
    groups: list[tuple[set[int], list[_Product]]] = []
    for product in products:
        goals = {index[id(v)] for v in _leaves([product.of]) if id(v) in index}
        if not goals:
            continue  # of a weight that is not trained
        joined = [g for g in groups if g[0] & goals]
        groups = [g for g in groups if not g[0] & goals]
        groups.append(
            (goals.union(*(g[0] for g in joined)), [p for g in joined for p in g[1]] + [product])
        )
    return [(sorted(goals), some) for goals, some in groups]
