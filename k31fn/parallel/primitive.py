"""The one autograd Function behind every collective, with its transposes and its rule under
``vmap``.

A collective over real ranks runs in the Function's forward. In the simulated mesh each atomic axis
is a ``vmap`` level; the rule below turns the batch dimension of each level into a plain leading
dimension and, at the last one, computes all ranks at once. A level that is none of its axes is an
unrelated ``vmap``, whose batch dimension rides along.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from k31fn import scopes
from k31fn.parallel.axis import Axis, Channel, axis_names
from k31fn.parallel.backends.simulated import compute_all_ranks
from k31fn.parallel.collective_record import CollectiveRecord, Event, current_records
from k31fn.parallel.invariance import compare_ranks, is_checked

__all__ = ["Collective", "deferred", "issue", "transpose"]

_TO_INVARIANT = frozenset({"psum", "pmax", "all_gather_invariant"})
_FROM_INVARIANT = frozenset({"pvary", "psum_transpose", "pslice"})
# What is equal on all ranks already needs no message: these are never on record.
_LOCAL = _FROM_INVARIANT


@dataclass(frozen=True, eq=False)
class Collective:
    """One collective without its operand.

    Attributes:
        op: its kind.
        axes: atomic axes of more than one rank, in the mesh's order.
        kw: its static arguments; dims are not negative.
        records: where its events, and those of its backward, go.
        check: whether invariance is compared on real ranks.
        num_leading: batch dimensions of simulated axes that are leading dimensions now.
    """

    op: str
    axes: tuple[Axis, ...]
    kw: Mapping[str, Any] = field(default_factory=dict)
    # Both are read when the collective is made and kept with it: a device's backward runs on
    # threads of the engine, where context variables of the forward are not set.
    records: tuple[CollectiveRecord, ...] = field(default_factory=current_records)
    check: bool = field(default_factory=is_checked)
    num_leading: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return axis_names(self.axes)

    @property
    def tokens(self) -> list[Tensor]:
        """One per axis in the simulated mesh; none on real ranks."""
        tokens: list[Tensor] = []
        for axis in self.axes:
            token = axis.host.token(axis.name) if axis.host else None
            if token is not None:
                tokens.append(token)
        return tokens

    @property
    def channel(self) -> Channel:
        """The ranks, where they are real."""
        host = self.axes[0].host
        assert host is not None
        return host.channel(self.names)

    @property
    def local(self) -> bool:
        """Says whether it moves no data."""
        return self.op in _LOCAL

    def cast(self, x: Tensor) -> Tensor:
        """The operand in the dtype in which it travels."""
        dtype = self.kw.get("dtype")
        return x if dtype is None else x.to(dtype)

    def note(self, what: str, x: Tensor) -> None:
        """Records an event on the operand ``x``."""
        if self.local:
            return
        dtype: torch.dtype = self.kw.get("dtype") or x.dtype  # in which it travels
        event = Event(what, self.op, self.names, x.numel() * dtype.itemsize)
        for record in self.records:
            record.events.append(event)


_DEFERRED: contextvars.ContextVar[list[tuple[Collective, Tensor]] | None] = contextvars.ContextVar(
    "k31fn_deferred", default=None
)


@contextlib.contextmanager
def deferred() -> Iterator[list[tuple[Collective, Tensor]]]:
    """Collects the collective asked for inside, with its operand, instead of running it."""
    collectives: list[tuple[Collective, Tensor]] = []
    token = _DEFERRED.set(collectives)
    try:
        yield collectives
    finally:
        _DEFERRED.reset(token)


def issue(collective: Collective, x: Tensor, *, issued: bool = False) -> Tensor:
    """The collective's result, differentiable to any order; ``issued``: that it was is on record
    already.
    """
    collected = _DEFERRED.get()
    if collected is not None:
        collected.append((collective, x))
        return x
    if not issued:
        collective.note("issue", x)
    # Tokens are arguments, for vmap's rule sees only what is one: by their batch dimensions it
    # knows which level is which axis.
    y: Tensor = _CollectiveFunction.apply(collective, x, *collective.tokens)
    collective.note("wait", x)
    return y


class _CollectiveFunction(torch.autograd.Function):
    @staticmethod
    def forward(collective: Collective, x: Tensor, *tokens: Tensor) -> Tensor:
        op = collective.op
        # Each axis's level of vmap takes its token away. What is left belongs to a level over which
        # nothing here is batched, so vmap's rule was never asked.
        if tokens:
            raise ValueError(
                f"{op} over {collective.names} in the simulated mesh, where no argument of the "
                "enclosing remat or custom_vjp varies over them: pass one that does"
            )
        if op == "psum_transpose" and collective.check:
            compare_ranks(
                collective.channel,
                x,
                f"cotangent of psum over {collective.names} varies: a pvary is missing downstream",
            )
        if op in ("pvary", "psum_transpose"):
            return x.view_as(x)  # another tensor than the operand, and no copy
        with scopes.scope(f"collective {op}"):
            wait = collective.channel.start(op, collective.cast(x), collective.kw)
            return wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        # Not the operand: every collective is linear, its transpose needs no value.
        ctx.collective = inputs[0]
        ctx.dtype = inputs[1].dtype
        ctx.num_tokens = len(inputs) - 2

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        transposed, g = transpose(ctx.collective, *cotangents)
        # Through issue, not the channel: a second derivative differentiates this collective too.
        grad = issue(transposed, g).to(ctx.dtype)
        return (None, grad, *[None] * ctx.num_tokens)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int | None]:
        """One level of vmap: an axis of the collective, or an unrelated one.

        A level of an axis batches that axis's token and no other.
        """
        collective: Collective = args[0]
        x: Tensor = args[1]
        tokens: tuple[Tensor, ...] = args[2:]
        _, x_dim, *token_dims = in_dims
        batched = [i for i, dim in enumerate(token_dims) if dim is not None]
        if not batched:
            return _past_unrelated_level(collective, x, x_dim, tokens)
        level = batched[0]
        axis = collective.axes[level]
        # vmap knows exactly what varies: a psum of what is equal on all ranks would count it n
        # times, and a cotangent of psum that varies says that a pvary is missing.
        if (x_dim is None) != (collective.op in _FROM_INVARIANT):
            raise ValueError(_wrong_variance(collective.op, axis.name))
        if x_dim is None:
            x = x.unsqueeze(0).expand(axis.size, *x.shape)
        else:
            x = x.movedim(x_dim, 0)
        to_invariant = collective.op in _TO_INVARIANT
        num_leading = collective.num_leading + 1
        other_tokens = tokens[:level] + tokens[level + 1 :]
        if other_tokens:
            # The axis goes last, so that axes[i] stays that of the i-th token left.
            axes = collective.axes[:level] + collective.axes[level + 1 :] + (axis,)
            inner = dataclasses.replace(collective, num_leading=num_leading, axes=axes)
            y = _CollectiveFunction.apply(inner, x, *other_tokens)
        else:
            # The last level: levels arrive from the inside out, so the leading dimensions are in
            # the mesh's order, and flattened they are the ranks in order.
            ranks = collective.cast(x).flatten(0, num_leading - 1)
            y = compute_all_ranks(collective.op, ranks, collective.kw)
            if not to_invariant:
                y = y.unflatten(0, x.shape[:num_leading])
        return y, None if to_invariant else 0


def _past_unrelated_level(
    collective: Collective, x: Tensor, x_dim: int, tokens: tuple[Tensor, ...]
) -> tuple[Tensor, int]:
    """The result under a ``vmap`` that is none of the collective's axes; its batch is the dimension
    of ``x`` after the leading ones.
    """
    x = x.movedim(x_dim, collective.num_leading)
    if collective.op == "ragged_all_to_all":
        # Its rows stay first: they are what send and recv count.
        return _CollectiveFunction.apply(collective, x.movedim(0, 1), *tokens), 1
    kw = dict(collective.kw)
    for name in ("dim", "split", "concat"):
        if name in kw:
            kw[name] += 1  # the batch has come in front
    y = _CollectiveFunction.apply(dataclasses.replace(collective, kw=kw), x, *tokens)
    return y, 0 if collective.op in _TO_INVARIANT else collective.num_leading


def _wrong_variance(op: str, axis: str) -> str:
    match op:
        case "psum_transpose":
            return (
                f"cotangent of psum over {axis!r} varies: a pvary is missing downstream, where "
                "its result is used"
            )
        case "pvary" | "pslice":
            return (
                f"{op} over {axis!r} of a value that varies over it already; it is for a value "
                "equal on all ranks"
            )
        case _:
            return (
                f"{op} over {axis!r} of a value that is equal on all its ranks; summed twice, or "
                "pvary it first"
            )


def transpose(collective: Collective, g: Tensor) -> tuple[Collective, Tensor]:
    """The collective that carries the cotangent ``g`` back, and ``g`` in the dtype in which that is
    to be done.

    Raises:
        ValueError: the collective has no gradient.
    """
    kw = collective.kw
    match collective.op:
        case "psum":
            # Each rank's operand counts once in a result that all hold: the cotangent as it is.
            op, kw = "psum_transpose", {}
        case "pvary" | "psum_transpose":
            op, kw = "psum", {}
        case "all_gather":
            op = "psum_scatter"
            # Summed in the wider dtype: n bfloat16 gradients lose what the smallest of them adds.
            g = g.to(kw["grad_dtype"] or g.dtype)
            kw = {"dim": kw["dim"]}
        case "psum_scatter":
            op, kw = "all_gather", {"dim": kw["dim"], "dtype": None, "grad_dtype": None}
        case "all_gather_invariant":
            op = "pslice"
        case "pslice":
            op = "all_gather_invariant"
        case "all_to_all":
            op, kw = "all_to_all", {"split": kw["concat"], "concat": kw["split"]}
        case "ragged_all_to_all":
            op, kw = collective.op, {"send": kw["recv"], "recv": kw["send"]}
        case "ppermute":
            inverse = tuple((target, source) for source, target in kw["perm"])
            op, kw = collective.op, {"perm": inverse}
        case _:
            raise ValueError(f"{collective.op} has no gradient; stop_gradient its operand")
    return Collective(op, collective.axes, kw, collective.records, collective.check), g
