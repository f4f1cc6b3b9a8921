"""Expert parallelism: rows travel to the ranks that own their experts, and back.

Of ``n`` ranks, rank ``i`` owns the experts ``i E / n`` to ``(i + 1) E / n``. A rank's rows lie
sorted by expert, hence by owner. What a layer does::

    exchange = decision("exchange", plan_exchange, sizes, axis, num_rows)
    sending = send_rows(rows, exchange, axis)
    ...                                             # runs while the rows travel
    rows = wait(sending)                            # by source rank, and by expert within one
    y = f(rows[exchange.order], exchange.sizes)     # sorted by own expert
    returning = send_back(y[exchange.inverse], exchange, axis)
    ...
    y = receive_back(returning, exchange, axis)     # in the order in which they were sent

The exchange is integers only and is to be a :func:`~k31fn.autodiff.decision`: the counts travel,
and are read on the host, once per layer, and a replay finds them. Every rank issues the same
collectives, also with no row to send or none to compute.

The axis decides the form, and all give the same numbers:

* Ranks that are real exchange what there is: ``ragged_all_to_all``.
* In the simulated mesh all shapes are equal on all ranks: each rank has a slot for every row of
  every other one. Empty slots hold zeros and count as rows of the last own expert, to which they
  add zeros.
* On meta tensors nobody knows the counts: rows are taken to be spread evenly.
* A rank that owns all experts sends itself all rows, in no time: they stay where they are.
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

__all__ = ["Exchange", "plan_exchange", "receive_back", "send_back", "send_rows"]


class Exchange(NamedTuple):
    """Which rows go where.

    Attributes:
        send: rows for each rank; like ``recv``, on the host where ranks are real.
        recv: rows from each rank.
        order: of what arrived, the row or slot that lies in each place when sorted by own expert;
            ``()`` where rows arrive sorted, as from one rank.
        inverse: the place of each; ``()`` likewise.
        sizes: rows of each own expert.
    """

    send: Int[Tensor, "n"]
    recv: Int[Tensor, "n"]
    order: Int[Tensor, "rows"] | tuple[()]
    inverse: Int[Tensor, "rows"] | tuple[()]
    sizes: Int[Tensor, "own"]


def plan_exchange(sizes: Int[Tensor, "E"], axis: Axes, num_rows: int) -> Exchange:
    """Tells the owners of the experts how many rows come.

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
        all_rows = torch.full((1,), num_rows)
        return Exchange(all_rows, all_rows, (), (), sizes)
    if sizes.shape[-1] % n:
        raise ValueError(
            f"plan_exchange: {n} ranks do not divide num_experts={sizes.shape[-1]}; choose ep to "
            "divide it"
        )
    if _functorch.is_batched(sizes) and not _simulated(axis):
        raise ValueError(
            "plan_exchange under vmap: real ranks read on the host how many rows travel, and that "
            "differs between samples; use the simulated mesh"
        )
    sent = sizes.view(n, -1)  # [target rank, its expert]
    received = all_to_all(sent, axis, 0, 0)  # [source rank, own expert]
    send = sent.sum(1)
    recv = received.sum(1)
    own_sizes = received.sum(0)
    if _simulated(axis):
        slot = torch.arange(num_rows, device=sizes.device)
        # Comparing with every end keeps the shape free of data. An empty slot gets a number one
        # past the last expert, so that it is sorted behind all rows.
        expert = (slot[:, None] >= received.cumsum(1)[:, None]).sum(2)
        # Empty slots are zeros: counted with the last expert they add nothing, and the sizes add
        # up to the number of slots, as a grouped product asks.
        num_empty = n * num_rows - own_sizes.sum()
        own_sizes = torch.cat([own_sizes[:-1], own_sizes[-1:] + num_empty])
        return Exchange(send, recv, *_sort(expert.flatten()), own_sizes)
    if sizes.is_meta:
        even = [(num_rows + i) // n for i in range(n)]
        send, recv = torch.tensor([even, even])
    else:
        # One copy for both, because here the host waits for the device.
        send, recv = torch.stack([send, recv]).cpu()
    expert = torch.arange(sent.shape[1], device=sizes.device).repeat(n)
    # With `output_size` repeat_interleave does not wait for the device a second time.
    expert = expert.repeat_interleave(received.flatten(), output_size=int(recv.sum()))
    return Exchange(send, recv, *_sort(expert), own_sizes)


def send_rows(rows: Float[Tensor, "R L"], exchange: Exchange, axis: Axes) -> Pending:
    """Sends each row to the owner of its expert; :func:`~k31fn.parallel.overlap.wait` gives what
    this rank's experts are to compute.

    Args:
        rows: sorted by expert.
        exchange: what :func:`plan_exchange` found.
        axis: over which experts are split.
    """
    if _ragged(axis):
        return start(ragged_all_to_all, rows, axis, exchange.send.tolist(), exchange.recv.tolist())
    return start(all_to_all, _fill_slots(rows, exchange.send), axis, 0, 0)


def send_back(rows: Float[Tensor, "R L"], exchange: Exchange, axis: Axes) -> Pending:
    """Sends the rows that arrived back to where they came from; :func:`receive_back` waits.

    Args:
        rows: in the order in which they arrived.
        exchange: what :func:`plan_exchange` found.
        axis: over which experts are split.
    """
    if _ragged(axis):
        return start(ragged_all_to_all, rows, axis, exchange.recv.tolist(), exchange.send.tolist())
    return start(all_to_all, rows, axis, 0, 0)


def receive_back(returning: Pending, exchange: Exchange, axis: Axes) -> Float[Tensor, "R L"]:
    """Waits for the rows that :func:`send_back` sent; in the order that :func:`send_rows` took."""
    rows = wait(returning)
    return rows if _ragged(axis) else _empty_slots(rows, exchange.send)


def _simulated(axis: Axes) -> bool:
    return any(a.host is not None and a.host.token(a.name) is not None for a in active(axis))


def _ragged(axis: Axes) -> bool:
    """Whether several real ranks exchange rows; else the host need not know how many travel."""
    return axis_size(axis) > 1 and not _simulated(axis)


def _sort(expert: Int[Tensor, "rows"]) -> tuple[Tensor, Tensor]:
    """The stable order by expert, and its inverse."""
    # Stable: rows of an expert stay in the order of source ranks and tokens, whatever the device,
    # and with them the order of the sums in the weights' gradients.
    order = torch.argsort(expert, stable=True)
    place = torch.arange(expert.shape[0], device=expert.device)
    return order, torch.zeros_like(order).scatter(0, order, place)


def _fill_slots(rows: Float[Tensor, "R L"], send: Int[Tensor, "n"]) -> Float[Tensor, "slots L"]:
    """As many slots as rows for each rank, its rows first, then zeros."""
    if send.shape[0] == 1:
        return rows  # one rank takes every row, so no slot is empty
    num_rows = rows.shape[0]
    slot = torch.arange(num_rows, device=rows.device)
    first = send.cumsum(0) - send
    # An empty slot reads some row that exists; `where` then makes it zero, gradient included.
    source = (first[:, None] + slot).clamp(max=max(num_rows - 1, 0))
    filled = slot < send[:, None]
    slots = rows.index_select(0, source.flatten())
    return torch.where(filled.flatten()[:, None], slots, 0)


def _empty_slots(slots: Float[Tensor, "slots L"], send: Int[Tensor, "n"]) -> Float[Tensor, "R L"]:
    """The rows that :func:`_fill_slots` took, out of the slots of all ranks."""
    num_ranks = send.shape[0]
    if num_ranks == 1:
        return slots
    num_rows = slots.shape[0] // num_ranks
    row = torch.arange(num_rows, device=slots.device)
    end = send.cumsum(0)
    rank = (row[:, None] >= end).sum(1)
    place = row - (end - send)[rank]  # among the rows that went to the same rank
    return slots.index_select(0, rank * num_rows + place)
