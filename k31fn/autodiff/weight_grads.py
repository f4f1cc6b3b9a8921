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
from k31fn.autodiff.custom_vjp import runs_rule
from k31fn.autodiff.omitted_inputs import OmittedInputs

__all__ = ["GraphStart", "WeightTape", "current_weight_tape", "weight_edges", "weight_product"]


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
        """For inputs that are a :class:`GraphStart`: the inputs' edges, by the leaves behind
        them.
        """
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
        by_id = {id(x): (x, y) for x, y in zip(self.inputs, outside, strict=True)}
        ends = [p.of for p in self.pending]
        for child in self.children:
            ends += [link.outside for link in child.links]
        for leaf in _graph_leaves(ends):
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
        index = {id(_graph_leaves([edge])[0]): i for i, edge in enumerate(wanted)}
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
            grads = torch.autograd.grad(
                edges, [wanted[i] for i in numbers], cotangents, allow_unused=True
            )
            for i, grad in zip(numbers, grads, strict=True):
                total[i] = grad
        return total

    def _take(self) -> list[_PendingGrad]:
        """All that ends on this tape: its own products, and what the replays on it leave at their
        arguments.
        """
        pending, children = self.pending, self.children
        self.pending, self.children = [], []
        for child in children:
            links = child.links
            # The child's gradients are computed together, when the first of them is asked for.
            child_grads = functools.cache(
                lambda child=child, links=links: child.gradients([e.inside for e in links])
            )
            for i, link in enumerate(links):
                pending.append(
                    _PendingGrad(link.outside, lambda i=i, grads=child_grads: grads()[i])
                )
        return pending


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
    if tape is None or not (torch.is_grad_enabled() and x.requires_grad and w.requires_grad):
        return f(x, w)
    y: Tensor = _WeightProductFunction.apply(_WeightProduct(tape, f, w), x)
    return y


class _WeightProductFunction(torch.autograd.Function):
    """The product as a node between ``x`` and ``y`` that the weight does not hang on."""

    @staticmethod
    def forward(ctx: Any, product: _WeightProduct, x: Tensor) -> Tensor:
        ctx.product = product
        ctx.is_weight_product = True  # for weight_edges
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


# What autograd puts in front of a leaf; it has no public name.
_AccumulateGrad = type(get_gradient_edge(torch.zeros((), requires_grad=True)).node)


def _graph_leaves(edges: Sequence[GradientEdge]) -> list[Tensor]:
    """The differentiated tensors from which these come."""
    pending: list[Any] = [edge.node for edge in edges]
    visited: dict[int, Any] = {}  # by id, with the node: an id may be used again
    leaves: list[Tensor] = []
    while pending:
        node = pending.pop()
        if node is None or id(node) in visited:
            continue
        visited[id(node)] = node
        if isinstance(node, _AccumulateGrad):
            leaf: Any = node
            leaves.append(leaf.variable)
        pending += [n for n, _ in node.next_functions]
    return leaves


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
    # The nodes are held while their ids are compared: the id of a freed one may be used again.
    arg_nodes = [get_gradient_edge(x).node for x in args]
    nodes = _in_order([h.node for h in heads])
    # Nodes that the first part differentiates. A remat is a rule, and its replay runs products.
    in_first_part = set[int]()
    for node in nodes:
        is_start = any(node is n for n in arg_nodes)
        is_start = is_start or runs_rule(node) or getattr(node, "is_weight_product", False)
        if is_start or any(id(n) in in_first_part for n, _ in node.next_functions):
            in_first_part.add(id(node))
    left_out = False
    while True:
        ends: list[tuple[Any, int]] = [(h.node, h.output_nr) for h in heads]
        for node in nodes:
            if id(node) in in_first_part:
                ends += node.next_functions
        places: dict[tuple[int, int], GradientEdge] = {}
        for node, output_nr in ends:
            if node is not None and id(node) not in in_first_part:
                places[id(node), output_nr] = GradientEdge(node, output_nr)
        place_nodes = {node_id for node_id, _ in places}
        leading = _leading_to(place_nodes, nodes)
        if not place_nodes & leading:
            return list(places.values()), left_out
        in_first_part |= place_nodes & leading
        left_out = True


def _leading_to(targets: set[int], nodes: Sequence[Any]) -> set[int]:
    """Ids of the nodes from which one of the targets is reached; ``nodes`` come after those that
    they lead to.
    """
    leading = set[int]()
    for node in nodes:
        if any(id(n) in targets or id(n) in leading for n, _ in node.next_functions):
            leading.add(id(node))
    return leading


def _in_order(roots: Sequence[Any]) -> list[Any]:
    """All nodes below these, each after those that it leads to."""
    visited: dict[int, Any] = {}
    order: list[Any] = []
    # A stack instead of recursion, which a graph of thousands of nodes would exhaust: a node comes
    # up a second time when all below it is done.
    pending = [(root, False) for root in roots]
    while pending:
        node, below_done = pending.pop()
        if below_done:
            order.append(node)
        elif node is not None and id(node) not in visited:
            visited[id(node)] = node
            pending.append((node, True))
            pending += [(n, False) for n, _ in node.next_functions]
    return order


def _by_shared_input(
    pending: Sequence[_PendingGrad], index: dict[int, int]
) -> list[tuple[list[int], list[_PendingGrad]]]:
    """Gradients by the inputs that they lead to, numbered by ``index``; those with one in common
    together.
    """
    groups: list[tuple[set[int], list[_PendingGrad]]] = []
    for p in pending:
        numbers = {index[id(x)] for x in _graph_leaves([p.of]) if id(x) in index}
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
    return [(sorted(numbers), members) for numbers, members in groups]
