"""MoonEP's journeys: weights into slots, tokens to their places, and results back.

What a layer does::

    route = decision("route", plan_route, topk_idx, inverse, sizes, axis, num_slots)
    fetching = start_fetch(w, route, axis)          # replicas travel first: they need no token
    sending = send_tokens(x, axis)
    ...                                             # runs while both travel
    w = finish_fetch(w, fetching, route)            # own experts, then those in the slots
    y = f(wait(sending), w, route)                  # sums of each token's copies that are here
    returning = send_sums(y, axis)
    ...
    y = receive_sums(returning, axis)

All shapes are known before the counts are, and no count is read on the host, so a step can be
captured. That has a price. A rank cannot know how many of another's tokens it is sent, so it is
sent all of them, each once: ``R - 1`` rows a token, where ``K`` of ``R`` would do on average; and
as many experts as it has slots from each rank, where they come from one.

The journey of the results is the transpose of that of the tokens, and the sum of the replicas'
gradients on their home is the transpose of the fetch. The route is a
:func:`~k31fn.autodiff.decision`: made once, and used again by a replay and by the backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.parallel.axis import Axes
from k31fn.parallel.collectives import all_gather, all_to_all, axis_index, axis_size
from k31fn.parallel.moonep.plan import make_plan, places_of
from k31fn.parallel.overlap import Pending, start, wait
from k31fn.precision import island

__all__ = [
    "Route",
    "finish_fetch",
    "plan_route",
    "receive_sums",
    "send_sums",
    "send_tokens",
    "start_fetch",
]


class Route(NamedTuple):
    """What a rank computes, and which weights it sends and takes.

    Attributes:
        order: of the copies of all ranks' tokens, in rank order, the one that lies in each row
            here; sorted by own expert, then by slot.
        inverse: the row of each copy; -1: it is on another rank.
        sizes: rows of each own expert, then of each slot.
        sent: own expert that goes to each slot of each rank; 0 where that one comes from another.
        taken: of what arrives, which lies in each own slot.
        replicas: slots that are filled.
        violations: of this rank, see :class:`~k31fn.parallel.moonep.plan.Plan`.
    """

    order: Int[Tensor, "rows"]
    inverse: Int[Tensor, "tokens K"]
    sizes: Int[Tensor, "groups"]
    sent: Int[Tensor, "sent"]
    taken: Int[Tensor, "slots"]
    replicas: Int[Tensor, ""]
    violations: Int[Tensor, ""]


def plan_route(
    topk_idx: Int[Tensor, "N K"],
    inverse: Int[Tensor, "N K"],
    sizes: Int[Tensor, "E"],
    axis: Axes,
    num_slots: int,
) -> Route:
    """The route, from this rank's choices and the counts of all ranks.

    Args:
        topk_idx: the expert of each copy of this rank's tokens.
        inverse: its number when they are sorted by expert.
        sizes: copies for each of all experts.
        axis: over which experts are split.
        num_slots: experts that a rank holds besides its own.

    Raises:
        ValueError: the ranks do not divide the experts.
    """
    num_ranks = axis_size(axis)
    if sizes.shape[-1] % num_ranks:
        raise ValueError(
            f"plan_route: {num_ranks} ranks do not divide num_experts={sizes.shape[-1]}; choose ep "
            "to divide it"
        )
    num_rows = topk_idx.numel()
    index = axis_index(axis)
    ranks = torch.arange(num_ranks, device=sizes.device)
    counts = all_gather(sizes.unsqueeze(0), axis)
    plan = make_plan(counts, num_rows, num_slots)

    # An expert's rows are in the order of source ranks and, of one rank, of its copies.
    of_lower_ranks = (counts * (ranks < index).unsqueeze(1)).sum(0)
    number = inverse + (of_lower_ranks - (sizes.cumsum(0) - sizes))[topk_idx]
    rank, place = places_of(plan, topk_idx, number)

    # Where each rank's copies go: what they are is known here only to their source.
    cells = all_gather((rank * num_rows + place).to(torch.int32), axis).long()
    here = cells // num_rows == index
    row = cells % num_rows
    # One row more takes what is not here, and is cut off.
    to = torch.where(here, row, num_rows).flatten()
    order = torch.zeros(num_rows + 1, dtype=torch.int64, device=sizes.device)
    order = order.scatter(0, to, torch.arange(cells.numel(), device=sizes.device))[:num_rows]

    def own(of_ranks: Tensor) -> Tensor:
        mask = (ranks == index).view(-1, *[1] * (of_ranks.ndim - 1))
        return torch.where(mask, of_ranks, 0).sum(0)

    num_own = sizes.shape[0] // num_ranks
    local = plan.slots - index * num_own
    slots = own(plan.slots)
    home = slots.clamp(min=0) // num_own
    return Route(
        order=order,
        inverse=torch.where(here, row, -1),
        sizes=own(plan.sizes),
        sent=torch.where((local >= 0) & (local < num_own), local, 0).flatten(),
        taken=home * num_slots + torch.arange(num_slots, device=sizes.device),
        replicas=(slots >= 0).sum(),
        violations=own(plan.violations),
    )


def start_fetch(weight: Shaped[Tensor, "own ..."], route: Route, axis: Axes) -> Pending:
    """Sends own experts to the slots that they fill; :func:`finish_fetch` waits."""
    return start(all_to_all, _experts_at(weight, route.sent), axis, 0, 0)


def finish_fetch(
    weight: Shaped[Tensor, "own ..."], fetching: Pending, route: Route
) -> Shaped[Tensor, "groups ..."]:
    """The own experts, then those in the slots.

    In an empty slot lies some expert, which has no row. The gradient of an expert is the sum of
    those of all its copies, in the order of ranks.
    """
    arrived = wait(fetching)
    return torch.cat([weight, arrived.index_select(0, route.taken)])


def send_tokens(x: Float[Tensor, "N L"], axis: Axes) -> Pending:
    """Sends this rank's tokens to every rank; what arrives are those of all, in rank order.

    A gather that is written as an exchange: its transpose then adds a token's gradients here, in
    float32 and rank order, and not in the dtype and the order of a reduction on its way.
    """
    copies = x.unsqueeze(0).expand(axis_size(axis), *x.shape)
    return start(all_to_all, copies.flatten(0, 1), axis, 0, 0)


def send_sums(y: Float[Tensor, "tokens L"], axis: Axes) -> Pending:
    """Sends what this rank's experts give of every token back to the token's rank."""
    return start(all_to_all, y, axis, 0, 0)


def receive_sums(returning: Pending, axis: Axes) -> Float[Tensor, "N L"]:
    """The sum of what the ranks give of each own token, in float32 and rank order."""
    parts = wait(returning).unflatten(0, (axis_size(axis), -1))
    return parts.sum(0, dtype=island(parts.dtype)).to(parts.dtype)


def _experts_at(weight: Tensor, index: Tensor) -> Tensor:
    # Codes of a quantised weight have no gradient.
    return _select(weight, index) if weight.is_floating_point() else weight.index_select(0, index)


def _select_fwd(weight: Tensor, index: Tensor) -> tuple[Tensor, Any]:
    return weight.index_select(0, index), (index, weight.shape[0])


def _select_bwd(residuals: Any, ct: Tensor) -> tuple[Any, ...]:
    index, num_own = residuals
    # A product with zeros and ones, and not a scatter: an expert's copies are added in the order of
    # ranks, in the wide accumulator of a product.
    chosen = index == torch.arange(num_own, device=index.device).unsqueeze(1)
    summed = chosen.to(ct.dtype) @ ct.flatten(1)
    return summed.unflatten(1, ct.shape[1:]), None


_select = custom_vjp(_select_fwd, _select_bwd, name="experts sent to slots")
