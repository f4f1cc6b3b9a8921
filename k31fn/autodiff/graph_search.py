"""Searches in the graph that autograd has built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from k31fn.autodiff.custom_vjp import runs_rule

__all__ = ["graph_leaves", "weight_edges"]

# What autograd puts in front of a leaf; the class has no public name.
_AccumulateGrad = type(get_gradient_edge(torch.zeros((), requires_grad=True)).node)


def graph_leaves(edges: Sequence[GradientEdge]) -> list[Tensor]:
    """The differentiated tensors from which these come."""
    pending: list[Any] = []
    for edge in edges:
        pending.append(edge.node)
    visited: dict[int, Any] = {}  # by id, with the node: an id may be used again
    leaves: list[Tensor] = []
    while pending:
        node = pending.pop()
        if id(node) in visited:
            continue
        visited[id(node)] = node
        if isinstance(node, _AccumulateGrad):
            leaf: Any = node
            leaves.append(leaf.variable)
        pending += _below(node)
    return leaves


def _below(node: Any) -> list[Any]:
    """The nodes that a node hands gradients to; an input without gradient has none."""
    return [n for n, _ in node.next_functions if n is not None]


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
    arg_nodes: dict[int, Any] = {}
    for x in args:
        node = get_gradient_edge(x).node
        arg_nodes[id(node)] = node
    roots: list[Any] = []
    for head in heads:
        roots.append(head.node)
    nodes = _in_order(roots)
    # Nodes that the first part differentiates. A remat is a rule, and its replay runs products.
    in_first_part = set[int]()
    for node in nodes:
        is_start = id(node) in arg_nodes or runs_rule(node) or _is_weight_product(node)
        if is_start or any(id(n) in in_first_part for n in _below(node)):
            in_first_part.add(id(node))
    left_out = False
    while True:
        places = _edges_out_of(in_first_part, nodes, heads)
        place_nodes = {node_id for node_id, _ in places}
        leading = _leading_to(place_nodes, nodes)
        if not place_nodes & leading:
            return list(places.values()), left_out
        # A place that leads to another one is no border: what lies between is differentiated now,
        # and a later gradient passes it again.
        in_first_part |= place_nodes & leading
        left_out = True


def _is_weight_product(node: Any) -> bool:
    """Whether a node is a product whose weight gradient is put off (it marks itself)."""
    return getattr(node, "is_weight_product", False)


def _edges_out_of(
    part: set[int], nodes: Sequence[Any], heads: Sequence[GradientEdge]
) -> dict[tuple[int, int], GradientEdge]:
    """Edges from a part of the graph, or from above it, to nodes that are none of it; by the id of
    the node and the number of its output.
    """
    ends: list[tuple[Any, int]] = []
    for head in heads:
        ends.append((head.node, head.output_nr))
    for node in nodes:
        if id(node) in part:
            ends += node.next_functions
    edges: dict[tuple[int, int], GradientEdge] = {}
    for node, output_nr in ends:
        if node is not None and id(node) not in part:
            edges[id(node), output_nr] = GradientEdge(node, output_nr)
    return edges


def _leading_to(targets: set[int], nodes: Sequence[Any]) -> set[int]:
    """Ids of the nodes from which one of the targets is reached; ``nodes`` come after those that
    they lead to.
    """
    leading = set[int]()
    for node in nodes:
        if any(id(n) in targets or id(n) in leading for n in _below(node)):
            leading.add(id(node))
    return leading


def _in_order(roots: Sequence[Any]) -> list[Any]:
    """All nodes below these, each after those that it leads to."""
    visited: dict[int, Any] = {}
    order: list[Any] = []
    # A stack instead of recursion, which a graph of thousands of nodes would exhaust: a node comes
    # up a second time when all below it is done.
    pending: list[tuple[Any, bool]] = []
    for root in roots:
        pending.append((root, False))
    while pending:
        node, below_done = pending.pop()
        if below_done:
            order.append(node)
        elif id(node) not in visited:
            visited[id(node)] = node
            pending.append((node, True))
            for n in _below(node):
                pending.append((n, False))
    return order
