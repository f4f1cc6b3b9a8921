"""Routed experts over ranks: which rank computes which copies of tokens, and their journeys.

Two placements, of equal numbers:

* plain: a copy goes to the rank that owns its expert (:mod:`k31fn.parallel.expert`);
* ``moonep``: as many copies to every rank, which gets the weights of experts that it lacks
  (:mod:`k31fn.parallel.moonep`).

A layer calls :func:`fetch`, :func:`send`, :func:`compute` and :func:`receive` in this order, and
computes between them what needs no copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from k31fn import tree
from k31fn.autodiff.weight_grads import current_weight_tape
from k31fn.kernels.expert_mlp import expert_mlp
from k31fn.kernels.expert_mlp.reference import of_products
from k31fn.kernels.experts import combine, dispatch
from k31fn.kernels.experts.reference import ExpertOrder, sort_by_expert
from k31fn.layers import mlp
from k31fn.layers.linear import grouped_linear
from k31fn.layers.qat import quantised_grouped_linear
from k31fn.parallel.axis import Axes
from k31fn.parallel.collectives import all_gather, axis_size
from k31fn.parallel.expert import Exchange, plan_exchange, receive_back, send_back, send_rows
from k31fn.parallel.moonep import route as moonep
from k31fn.parallel.overlap import start, wait
from k31fn.typing import Float, Int, Tensor

__all__ = ["Assignment", "compute", "fetch", "plan", "receive", "send", "told"]


def __dir__() -> list[str]:
    return __all__


class Assignment(NamedTuple):
    """Integers that say where each copy goes.

    Attributes:
        copies: this rank's, sorted by expert.
        exchange: of rows with the owners of their experts, or MoonEP's route.
    """

    copies: ExpertOrder
    exchange: Exchange | moonep.Route


def plan(topk_idx: Int[Tensor, "N G"], num_experts: int, num_slots: int, axis: Axes) -> Assignment:
    """The assignment of this rank's tokens; MoonEP's, where there are slots and several ranks."""
    copies = sort_by_expert(topk_idx, num_experts)
    if num_slots and axis_size(axis) > 1:
        of_copies = (topk_idx, copies.inverse, copies.sizes)
        return Assignment(copies, moonep.plan_route(*of_copies, axis, num_slots))
    return Assignment(copies, plan_exchange(copies.sizes, axis, copies.order.shape[0]))


def fetch(params: mlp.Params[Any], assignment: Assignment, axis: Axes) -> Any:
    """Starts the journey of the weights that other ranks lack; ``()`` where none travels."""
    route = assignment.exchange
    if not isinstance(route, moonep.Route):
        return ()
    return tree.map(lambda w: moonep.start_fetch(w, route, axis), params)


def send(
    x: Float[Tensor, "N L"], weights: Float[Tensor, "N G"], assignment: Assignment, axis: Axes
) -> Any:
    """Starts the journey of the tokens; for :func:`compute`."""
    copies, exchange = assignment
    if isinstance(exchange, moonep.Route):
        # A token's weights go with it: its copies on a rank are weighted and added there.
        return moonep.send_tokens(x, axis), start(all_gather, weights, axis)
    if _all_here(exchange):
        return x
    return send_rows(dispatch(x, copies.order, copies.inverse), exchange, axis)


def compute(
    params: mlp.Params[Any],
    fetching: Any,
    moving: Any,
    weights: Float[Tensor, "N G"],
    assignment: Assignment,
    axis: Axes,
    *,
    bounds: tuple[float, float],
    qat: bool,
) -> Any:
    """Experts on what arrives, then the journey back; for :func:`receive`."""
    copies, exchange = assignment
    if isinstance(exchange, moonep.Route):
        route = exchange
        params = tree.map(lambda w, f: moonep.finish_fetch(w, f, route), params, fetching)
        tokens, all_weights = map(wait, moving)
        here = ExpertOrder(route.order, route.inverse, route.sizes)
        sums = _experts(params, tokens, all_weights, here, bounds, qat)
        return moonep.send_sums(sums, axis)
    if _all_here(exchange):
        return _experts(params, moving, weights, copies, bounds, qat)
    # Each row that arrives is a token of one copy.
    assert isinstance(exchange.order, Tensor)
    assert isinstance(exchange.inverse, Tensor)
    arrived = ExpertOrder(exchange.order, exchange.inverse.unsqueeze(1), exchange.sizes)
    rows = _experts(params, wait(moving), (), arrived, bounds, qat)
    return send_back(rows, exchange, axis)


def receive(
    moving: Any, weights: Float[Tensor, "N G"], assignment: Assignment, axis: Axes
) -> Float[Tensor, "N L"]:
    """``sum_j p_j e_j(u)`` of each token; a part of it where the experts' width is split."""
    copies, exchange = assignment
    if isinstance(exchange, moonep.Route):
        return moonep.receive_sums(moving, axis)
    if _all_here(exchange):
        return moving
    # Rows that travelled are weighted where they are summed, in float32.
    rows = receive_back(moving, exchange, axis)
    return combine(rows, weights, copies.order, copies.inverse)


def told(assignment: Assignment) -> Int[Tensor, "2"]:
    """Violations of this rank's plan and replicas that it holds; zeros without a plan."""
    route = assignment.exchange
    if not isinstance(route, moonep.Route):
        return assignment.copies.sizes.new_zeros(2, dtype=torch.int32)
    return torch.stack([route.violations, route.replicas]).to(torch.int32)


def _all_here(exchange: Exchange) -> bool:
    """Whether this rank owns all experts, so that no row travels."""
    return isinstance(exchange.order, tuple)


def _experts(
    params: mlp.Params[Any],
    x: Float[Tensor, "N L"],
    weights: Float[Tensor, "N G"] | tuple[()],
    route: ExpertOrder,
    bounds: tuple[float, float],
    qat: bool,
) -> Float[Tensor, "N L"]:
    """The weighted sum of each token's copies."""
    matrices = (params.w_gate, params.w_up, params.w_down)
    if qat:
        return of_products(quantised_grouped_linear, x, weights, matrices, route, *bounds)
    # One operator has one backward: for adapters, for codes, and where weight gradients are put
    # off, each product goes by itself.
    plain = all(isinstance(w, Tensor) for w in matrices)
    if not plain or current_weight_tape() is not None:
        return of_products(grouped_linear, x, weights, matrices, route, *bounds)
    return expert_mlp(x, weights, *(w.to(x.dtype) for w in matrices), *route, *bounds)
