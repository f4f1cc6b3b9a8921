"""MoonEP's plan: which ranks get copies of which experts, so that every rank has as many rows
(Kimi K3 report, arXiv 2607.24653, section 5.2.1).

Of ``R`` ranks each owns ``E / R`` experts and sends ``num_rows`` rows, one for each copy of a
token. The plan is made from the counts of all ranks, which all know, so that all make the same one:

1. The rank with the most rows above ``num_rows`` fills the one with the fewest up to it, and may
   itself fall below by that; at most ``R - 1`` times. So a rank receives from one other one at
   most, its *home group*, and has at most ``E / R`` experts that are not its own.
2. What moves is taken from the expert of the giver that has most rows left, then the next one.
3. A rank's rows lie by expert: its own, then those in its *slots*, by number. Of an expert's rows,
   in the order of source ranks and their tokens, each rank has a range.

The plan is integers only, has no gradient and waits for no device: its shapes and its number of
operations are those of ``R``, ``E`` and the slots. It runs under ``vmap`` and on meta tensors. It
counts how often it breaks the laws that it must keep, which is 0 where the slots suffice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

__all__ = ["Plan", "make_plan", "places_of"]


class Plan(NamedTuple):
    """Which rows go where, the same on all ranks.

    Attributes:
        slots: the expert in each slot of each rank, ascending; -1: empty.
        sizes: rows of each rank's own experts, then of those in its slots.
        ends: of each expert, rows on this rank and those before it.
        offsets: of each expert and rank, what leads from a row's number among those of the expert
            to its place on the rank.
        violations: of each rank, how far it is from the laws: rows above or below ``num_rows``,
            rows of its experts that are lost or doubled, experts without a slot, home groups above
            one, and rows that it sends above or below ``num_rows``.
    """

    slots: Int[Tensor, "R slots"]
    sizes: Int[Tensor, "R groups"]
    ends: Int[Tensor, "E R"]
    offsets: Int[Tensor, "E R"]
    violations: Int[Tensor, "R"]


def make_plan(counts: Int[Tensor, "R E"], num_rows: int, num_slots: int) -> Plan:
    """The plan for these counts.

    Args:
        counts: rows that each rank has for each expert.
        num_rows: what each rank's counts add up to, and as many as it is to have.
        num_slots: experts that a rank can hold besides its own; ``E / R`` suffice for any counts.
    """
    shares = _shares(counts.sum(0), num_rows, len(counts))
    slots, group, of_slots = _groups(shares, num_slots)
    num_ranks = len(counts)
    num_groups = counts.shape[1] // num_ranks + num_slots
    sizes = shares.new_zeros(num_ranks, num_groups).scatter_add(1, group.mT, shares.mT)
    # Where a rank has an expert's first row, less that row's number among those of the expert.
    starts = (sizes.cumsum(1) - sizes).gather(1, group.mT).mT
    ends = shares.cumsum(1)
    violations = _violations(counts, shares, num_rows) + of_slots
    return Plan(slots, sizes, ends, starts - (ends - shares), violations)


def places_of(
    plan: Plan, expert: Int[Tensor, "*rows"], number: Int[Tensor, "*rows"]
) -> tuple[Int[Tensor, "*rows"], Int[Tensor, "*rows"]]:
    """The rank that each row goes to, and its place there.

    Args:
        plan: of all ranks.
        expert: of the row.
        number: of the row among those of its expert, over all ranks.
    """
    num_ranks = plan.ends.shape[1]
    rank = (number.unsqueeze(-1) >= plan.ends[expert]).sum(-1)
    # Only rows that the counts do not know of are past all ends.
    rank = rank.clamp(max=num_ranks - 1)
    offset = plan.offsets.flatten()[expert * num_ranks + rank]
    return rank, number + offset


def _shares(copies: Int[Tensor, "E"], num_rows: int, num_ranks: int) -> Int[Tensor, "E R"]:
    """The rows of each expert that each rank computes."""
    left = copies.unflatten(0, (num_ranks, -1))  # [owner, its expert]
    surplus = left.sum(1) - num_rows
    num_own = left.shape[1]
    ranks = torch.arange(num_ranks, device=copies.device)
    own = torch.arange(num_own, device=copies.device)
    cells: list[Tensor] = []
    moved: list[Tensor] = []
    # Every round fills one rank for good, and when all but one are full, the last one is, too. A
    # round after the last that is needed finds no rank below and moves nothing.
    for _ in range(num_ranks - 1):
        giver = surplus.argmax()
        taker = surplus.argmin()
        rows = -surplus.amin()
        taken = _largest_first(left.index_select(0, giver.unsqueeze(0)).squeeze(0), rows)
        gives = ranks == giver
        left = left - gives[:, None] * taken
        surplus = surplus + rows * ((ranks == taker).long() - gives.long())
        cells.append((giver * num_own + own) * num_ranks + taker)
        moved.append(taken)
    stay = (ranks[:, None] * num_own + own) * num_ranks + ranks[:, None]
    cell = torch.cat([stay.flatten(), *cells])
    rows = torch.cat([left.flatten(), *moved])
    # Added, for the rounds that move nothing name cells of others.
    shares = copies.new_zeros(copies.shape[0] * num_ranks).scatter_add(0, cell, rows)
    return shares.unflatten(0, (-1, num_ranks))


def _largest_first(left: Int[Tensor, "own"], rows: Int[Tensor, ""]) -> Int[Tensor, "own"]:
    """So many rows, of the expert that has most left, then of the next one."""
    largest, order = left.sort(descending=True, stable=True)
    before = largest.cumsum(0) - largest
    taken = torch.minimum(largest, (rows - before).clamp(min=0))
    return torch.zeros_like(left).scatter(0, order, taken)


def _groups(
    shares: Int[Tensor, "E R"], num_slots: int
) -> tuple[Int[Tensor, "R slots"], Int[Tensor, "E R"], Int[Tensor, "R"]]:
    """The expert in each slot; the group of rows that an expert's rows lie in on each rank; and how
    many experts of each rank have no slot.
    """
    num_experts, num_ranks = shares.shape
    num_own = num_experts // num_ranks
    experts = torch.arange(num_experts, device=shares.device)[:, None]
    ranks = torch.arange(num_ranks, device=shares.device)
    is_own = experts // num_own == ranks
    copied = (shares > 0) & ~is_own
    slot = copied.cumsum(0) - 1
    fits = copied & (slot < num_slots)
    # One slot more takes what is in none, and is cut off.
    to = torch.where(fits, slot, num_slots)
    empty = shares.new_full((num_ranks, num_slots + 1), -1)
    slots = empty.scatter(1, to.mT, experts.expand_as(to).mT)[:, :num_slots]
    # An expert without a slot shares the last one's rows: a wrong result, whose step is skipped,
    # and no place outside of the rows.
    group = torch.where(is_own, experts % num_own, num_own + slot.clamp(0, num_slots - 1))
    return slots, group, (copied & ~fits).sum(0)


def _violations(
    counts: Int[Tensor, "R E"], shares: Int[Tensor, "E R"], num_rows: int
) -> Int[Tensor, "R"]:
    """How far each rank is from what must hold; from the counts and the shares alone."""
    num_ranks = len(counts)
    copies = counts.sum(0)
    negative = (-shares).clamp(min=0).sum(1)
    lost = ((shares.sum(1) - copies).abs() + negative).unflatten(0, (num_ranks, -1)).sum(1)
    wrong_rows = (shares.sum(0) - num_rows).abs() + (counts.sum(1) - num_rows).abs()
    givers = (shares.unflatten(0, (num_ranks, -1)) > 0).any(1)
    other = ~torch.eye(num_ranks, dtype=torch.bool, device=counts.device)
    homes = (givers & other).sum(0)
    return lost + wrong_rows + (homes - 1).clamp(min=0)
