"""Asynchronous collectives: a value that is waited for later.

    pending = start(all_gather, weight, axes.fsdp)
    y = layer(x)                        # runs while the parts travel
    weight = wait(pending)

On process groups, and between threads, the collective is issued by :func:`start`; in the backward
its transpose is issued where the backward of :func:`wait` runs and waited for where that of
:func:`start` does, so it overlaps with the same computation. In the simulated mesh, under
``torch.func`` and in a derivative that is itself differentiated the collective runs at
:func:`wait`: same values, same records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k31fn import _functorch, scopes
from k31fn.parallel import primitive
from k31fn.parallel.primitive import Collective, deferred, transpose

__all__ = ["Pending", "start", "wait"]


@dataclass(eq=False)
class Pending:
    """A collective on its way; give it to :func:`wait` once, in the function that started it.

    Attributes:
        call: what was asked for; None if it was an identity, whose value ``ticket`` is.
        ticket: the operand; the node of the autograd graph that the backward waits at. That node
            holds this object, so :func:`wait` takes it away: the cycle of the two would never be
            freed, and the operand with it.
        finish: waits for the result, where the collective was issued already.
        finish_back: the same for its transpose, between the backwards of wait and start.
    """

    call: Collective | None
    ticket: Tensor | None
    finish: Callable[[], Tensor] | None = None
    finish_back: Callable[[], Tensor] | None = None
    waited: bool = False


def start(collective: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Pending:
    """Issues ``collective(x, *args, **kwargs)``, one of :mod:`k31fn.parallel.collectives`."""
    with deferred() as calls:
        value = collective(x, *args, **kwargs)
    if not calls:
        return Pending(None, value)
    call, operand = calls[0]
    # On record here, whether it is issued now or in wait: a record tells where the program asks.
    call.note("issue", operand)
    pending = Pending(call, operand)
    # In the simulated mesh (tokens) nothing travels; within torch.func a pending transpose would
    # outlive its level.
    if not call.local and not call.tokens and not _functorch.transforms_active():
        pending.ticket = _Start.apply(pending, operand)
    return pending


def wait(pending: Pending) -> Tensor:
    """The result of the collective.

    Raises:
        ValueError: it was waited for already.
    """
    if pending.waited:
        raise ValueError("wait: this collective was waited for already; keep its value instead")
    ticket = pending.ticket
    pending.ticket = None  # see Pending: the cycle
    pending.waited = True
    assert ticket is not None
    if pending.call is None:
        return ticket
    if pending.finish is None:
        return primitive.issue(pending.call, ticket, issued=True)
    y: Tensor = _Wait.apply(pending, ticket)
    pending.call.note("wait", ticket)
    return y


class _Start(torch.autograd.Function):
    """Issues the collective; in the backward, waits for its transpose."""

    @staticmethod
    def forward(pending: Pending, x: Tensor) -> Tensor:
        call = pending.call
        assert call is not None
        with scopes.scope(f"collective {call.op}"):
            pending.finish = call.channel.start(call.op, call.cast(x), call.kw)
        # An output that is the input itself is special to autograd; a view is a result like any.
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.pending = inputs[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        (g,) = cotangents
        finish = ctx.pending.finish_back
        ctx.pending.finish_back = None  # it holds the buffers
        return None, g if finish is None else finish()


class _Wait(torch.autograd.Function):
    """Waits for the result; in the backward, issues the transpose."""

    @staticmethod
    def forward(pending: Pending, ticket: Tensor) -> Tensor:
        finish = pending.finish
        pending.finish = None  # it holds the buffers
        assert finish is not None
        return finish()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pending, ticket = inputs
        ctx.pending = pending
        ctx.dtype = ticket.dtype
        ctx.shape = ticket.shape

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        transposed, g = transpose(ctx.pending.call, *cotangents)
        # A derivative that is itself differentiated needs the transpose as a node of its graph.
        if transposed.local or torch.is_grad_enabled():
            return None, primitive.issue(transposed, g).to(ctx.dtype)
        transposed.note("issue", g)
        with scopes.scope(f"collective {transposed.op}"):
            finish = transposed.channel.start(transposed.op, g, transposed.kw)

        def finish_back() -> Tensor:
            y = finish().to(ctx.dtype)
            transposed.note("wait", g)
            return y

        ctx.pending.finish_back = finish_back
        # What travels takes the place of this at _Start; zeros of one element, expanded, cost no
        # memory.
        return None, g.new_zeros(()).to(ctx.dtype).expand(ctx.shape)
