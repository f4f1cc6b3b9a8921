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
    call.note("issue", operand)
    pending = Pending(call, operand)
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
    ticket, pending.ticket, pending.waited = pending.ticket, None, True
    assert ticket is not None
    if pending.call is None:
        return ticket
    if pending.finish is None:
        return primitive.issue(pending.call, ticket, issued=True)
    y: Tensor = _Wait.apply(pending, ticket)
    pending.call.note("wait", ticket)
    return y


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(pending: Pending, x: Tensor) -> Tensor:
        call = pending.call
        assert call is not None
        with scopes.scope(f"collective {call.op}"):
            pending.finish = call.channel.start(call.op, call.cast(x), call.kw)
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.pending = inputs[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        (g,) = cotangents
        finish, ctx.pending.finish_back = ctx.pending.finish_back, None
        return None, g if finish is None else finish()


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(pending: Pending, ticket: Tensor) -> Tensor:
        finish, pending.finish = pending.finish, None  # which holds the buffers
        assert finish is not None
        return finish()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.pending, ctx.dtype, ctx.shape = inputs[0], inputs[1].dtype, inputs[1].shape

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        transposed, g = transpose(ctx.pending.call, *cotangents)
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
        return None, g.new_zeros(()).to(ctx.dtype).expand(
            ctx.shape
        )  # what travels takes its place at _Start
