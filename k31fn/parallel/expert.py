"""Expert parallelism: rows travel to the ranks that own their experts, and back.

Of ``n`` ranks, rank ``i`` owns the experts ``i E / n`` to ``(i + 1) E / n``. A rank's rows lie
sorted by expert, hence by owner. What a layer does::

    exchange = decision("exchange", plan_exchange, sizes, axis, num_rows)
    pending = start_dispatch(rows, exchange, axis)
    ...                                             # runs while the rows travel
    rows = wait(pending)                            # by source rank, and by expert within one
    y = f(rows[exchange.order], exchange.sizes)     # sorted by own expert
    pending = start_combine(y[exchange.inverse], exchange, axis)
    ...
    y = finish_combine(pending, exchange, axis)

The plan is integers only and is to be a :func:`~k31fn.autodiff.decision`: the counts are exchanged,
and read on the host, once per layer, and a replay finds them. Every rank issues the same
collectives, also with no row to send or none to compute.

The axis decides the form, and both give the same numbers:

* Ranks that are real exchange what there is: ``ragged_all_to_all``.
* In the simulated mesh all shapes are equal on all ranks: each rank has a slot for every row of
  every other one. Empty slots hold zeros and count as rows of the last own expert, to which they
  add zeros.
* On meta tensors nobody knows the counts: rows are taken to be spread evenly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from k31fn import _functorch
from k31fn.parallel.axis import Axes, active
from k31fn.parallel.collectives import all_to_all, axis_size, ragged_all_to_all
from k31fn.parallel.overlap import Pending, start, wait

__all__ = ["Exchange", "finish_combine", "plan_exchange", "start_combine", "start_dispatch"]


class Exchange(NamedTuple):
    """Which rows go where.

    Attributes:
        send: rows for each rank; like ``recv``, on the host where ranks are real.
        recv: rows from each rank.
        order: of what arrived, the row or slot that lies in each place when sorted by own expert.
        inverse: the place of each.
        sizes: rows of each own expert.
    """

    send: Int[Tensor, "n"]
    recv: Int[Tensor, "n"]
    order: Int[Tensor, "rows"]
    inverse: Int[Tensor, "rows"]
    sizes: Int[Tensor, "own"]


def plan_exchange(sizes: Int[Tensor, "E"], axis: Axes, num_rows: int) -> Exchange | tuple[()]:
    """Tells the owners of the experts how many rows come; ``()`` if this rank owns all experts.

    Args:
        sizes: this rank's rows for each of all experts.
        axis: over which experts are split.
        num_rows: what ``sizes`` adds up to.

    Raises:
        ValueError: the ranks do not divide the experts, or ranks are real and ``sizes`` differ
            between samples of vmap.
    """
    n = axis_size(axis)
    if n == 1:
        return ()
    if sizes.shape[-1] % n:
        raise ValueError(
            f"plan_exchange: {n} ranks do not divide num_experts={sizes.shape[-1]}; choose ep to "
            "divide it"
        )
    if _functorch.is_batched(sizes) and not _simulated(axis):
        raise ValueError(
            "plan_exchange under vmap: real ranks read on the host how many rows travel, and that "
            "differs between "
            "samples; use the simulated mesh"
        )
    counts = sizes.view(n, -1)
    come = all_to_all(counts, axis, 0, 0)  # [source, own expert]
    send, recv, own = counts.sum(1), come.sum(1), come.sum(0)
    if _simulated(axis):
        slot = torch.arange(num_rows, device=sizes.device)
        expert = (slot[:, None] >= come.cumsum(1)[:, None]).sum(
            2
        )  # in an empty slot one past the last
        filled = torch.cat([own[:-1], own[-1:] + n * num_rows - own.sum()])
        return Exchange(send, recv, *_sort(expert.flatten()), filled)
    if sizes.is_meta:
        send, recv = torch.tensor([[(num_rows + i) // n for i in range(n)]] * 2)
    else:
        send, recv = torch.stack([send, recv]).cpu()  # here the host waits for the device
    expert = torch.arange(counts.shape[1], device=sizes.device).repeat(n)
    expert = expert.repeat_interleave(come.flatten(), output_size=int(recv.sum()))
    return Exchange(send, recv, *_sort(expert), own)


def start_dispatch(
    rows: Float[Tensor, "R L"], exchange: Exchange | tuple[()], axis: Axes
) -> Pending:
    """Sends each row to the owner of its expert.

    Args:
        rows: sorted by expert.
        exchange: the plan.
        axis: over which experts are split.
    """
    if not isinstance(exchange, Exchange):
        return start(all_to_all, rows, axis, 0, 0)
    if _simulated(axis):
        return start(all_to_all, _fill_slots(rows, exchange.send), axis, 0, 0)
    return start(ragged_all_to_all, rows, axis, exchange.send.tolist(), exchange.recv.tolist())


def start_combine(
    rows: Float[Tensor, "R L"], exchange: Exchange | tuple[()], axis: Axes
) -> Pending:
    """Sends the rows that arrived back to where they came from.

    Args:
        rows: in the order in which they arrived.
        exchange: the plan.
        axis: over which experts are split.
    """
    if not isinstance(exchange, Exchange) or _simulated(axis):
        return start(all_to_all, rows, axis, 0, 0)
    return start(ragged_all_to_all, rows, axis, exchange.recv.tolist(), exchange.send.tolist())


def finish_combine(
    pending: Pending, exchange: Exchange | tuple[()], axis: Axes
) -> Float[Tensor, "R L"]:
    """Waits for the rows that :func:`start_combine` sent back; in the order that
    :func:`start_dispatch` took.
    """
    rows = wait(pending)
    if not isinstance(exchange, Exchange) or not _simulated(axis):
        return rows
    num_rows = rows.shape[0] // axis_size(axis)
    row = torch.arange(num_rows, device=rows.device)
    end = exchange.send.cumsum(0)
    owner = (row[:, None] >= end).sum(1)
    return rows.index_select(0, owner * num_rows + row - (end - exchange.send)[owner])


def _simulated(axis: Axes) -> bool:
    first = active(axis)[0]
    return first.host is not None and first.host.token(first.name) is not None


def _sort(expert: Int[Tensor, "rows"]) -> tuple[Tensor, Tensor]:
    """The stable order by expert, and its inverse."""
    order = torch.argsort(expert, stable=True)
    return order, torch.zeros_like(order).scatter(
        0, order, torch.arange(expert.shape[0], device=expert.device)
    )


def _fill_slots(rows: Float[Tensor, "R L"], send: Int[Tensor, "n"]) -> Float[Tensor, "slots L"]:
    """As many slots as rows for each rank, its rows first, then zeros."""
    num_rows = rows.shape[0]
    slot = torch.arange(num_rows, device=rows.device)
    source = ((send.cumsum(0) - send)[:, None] + slot).clamp(max=max(num_rows - 1, 0))
    filled = slot < send[:, None]
    slots = rows.index_select(0, source.flatten())
    return torch.where(filled.flatten()[:, None], slots, 0)
