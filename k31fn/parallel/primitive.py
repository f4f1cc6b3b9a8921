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
from k31fn.parallel.axis import Axis, Channel
from k31fn.parallel.collective_record import CollectiveRecord, Event, current_records
from k31fn.parallel.invariance import compare_ranks, is_checked

__all__ = ["Collective", "deferred", "issue", "transpose"]

_TO_INVARIANT = frozenset({"psum", "pmax", "all_gather_invariant"})
_FROM_INVARIANT = frozenset({"pvary", "psum_transpose", "pslice"})
_LOCAL = _FROM_INVARIANT  # move no data


@dataclass(frozen=True, eq=False)
class Collective:
    """One collective without its operand.

    Attributes:
        op: its kind.
        axes: atomic axes of more than one rank, in the mesh's order.
        kw: its static arguments; dims are not negative.
        records: where its events, and those of its backward, go.
        check: whether invariance is compared on real ranks.
        held: batch dimensions of simulated axes that are leading dimensions now.
    """

    op: str
    axes: tuple[Axis, ...]
    kw: Mapping[str, Any] = field(default_factory=dict)
    records: tuple[CollectiveRecord, ...] = field(default_factory=current_records)
    check: bool = field(default_factory=is_checked)
    held: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(a.name for a in self.axes)

    @property
    def tokens(self) -> list[Tensor]:
        """One per axis in the simulated mesh; none on real ranks."""
        found = [a.host.token(a.name) for a in self.axes if a.host]
        return [t for t in found if t is not None]

    @property
    def channel(self) -> Channel:
        """The ranks, where they are real."""
        host = self.axes[0].host
        assert host is not None
        return host.channel(self.names)

    @property
    def local(self) -> bool:
        """Whether it moves no data."""
        return self.op in _LOCAL

    def cast(self, x: Tensor) -> Tensor:
        """The operand in the dtype in which it travels."""
        dtype = self.kw.get("dtype")
        return x if dtype is None else x.to(dtype)

    def note(self, what: str, x: Tensor) -> None:
        """Records an event on the operand ``x``."""
        if not self.local:
            event = Event(
                what, self.op, self.names, x.numel() * (self.kw.get("dtype") or x.dtype).itemsize
            )
            for r in self.records:
                r.events.append(event)


_DEFERRED: contextvars.ContextVar[list[tuple[Collective, Tensor]] | None] = contextvars.ContextVar(
    "k31fn_deferred", default=None
)


@contextlib.contextmanager
def deferred() -> Iterator[list[tuple[Collective, Tensor]]]:
    """Collects the collective asked for inside, with its operand, instead of running it."""
    calls: list[tuple[Collective, Tensor]] = []
    token = _DEFERRED.set(calls)
    try:
        yield calls
    finally:
        _DEFERRED.reset(token)


def issue(call: Collective, x: Tensor, *, issued: bool = False) -> Tensor:
    """The collective's result, differentiable to any order; ``issued``: that it was is on record
    already.
    """
    calls = _DEFERRED.get()
    if calls is not None:
        calls.append((call, x))
        return x
    if not issued:
        call.note("issue", x)
    y: Tensor = _CollectiveFunction.apply(call, x, *call.tokens)
    call.note("wait", x)
    return y


class _CollectiveFunction(torch.autograd.Function):
    @staticmethod
    def forward(call: Collective, x: Tensor, *tokens: Tensor) -> Tensor:
        if tokens:
            raise ValueError(
                f"{call.op} over {call.names} in the simulated mesh, where no argument of the "
                "enclosing remat or "
                "custom_vjp varies over them: pass one that does"
            )
        if call.op == "psum_transpose" and call.check:
            compare_ranks(
                call.channel,
                x,
                f"cotangent of psum over {call.names} varies: a pvary is missing downstream",
            )
        if call.op in ("pvary", "psum_transpose"):
            return x.view_as(x)
        with scopes.scope(f"collective {call.op}"):
            return call.channel.start(call.op, call.cast(x), call.kw)()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.call, ctx.dtype, ctx.num_tokens = inputs[0], inputs[1].dtype, len(inputs) - 2

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        transposed, g = transpose(ctx.call, *cotangents)
        return (None, issue(transposed, g).to(ctx.dtype), *[None] * ctx.num_tokens)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int | None]:
        call: Collective = args[0]
        x: Tensor = args[1]
        tokens: tuple[Tensor, ...] = args[2:]
        _, x_dim, *token_dims = in_dims
        level = next((i for i, d in enumerate(token_dims) if d is not None), None)
        if level is None:
            return _unrelated(call, x.movedim(x_dim, call.held), tokens)
        axis = call.axes[level]
        if (x_dim is None) != (call.op in _FROM_INVARIANT):
            raise ValueError(_wrong_variance(call.op, axis.name))
        x = x.unsqueeze(0).expand(axis.size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        rest = (*tokens[:level], *tokens[level + 1 :])
        held = call.held + 1
        if rest:
            axes = (
                *call.axes[:level],
                *call.axes[level + 1 :],
                axis,
            )  # axes[i] is that of the i-th token left
            y = _CollectiveFunction.apply(dataclasses.replace(call, held=held, axes=axes), x, *rest)
        else:
            y = _together(call.op, call.cast(x).flatten(0, held - 1), call.kw)
            y = y if call.op in _TO_INVARIANT else y.unflatten(0, x.shape[:held])
        return y, None if call.op in _TO_INVARIANT else 0


def _unrelated(call: Collective, x: Tensor, tokens: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    """Past a ``vmap`` that is not of the call's axes; its batch is the dimension of ``x`` after the
    held ones.
    """
    out_dim = 0 if call.op in _TO_INVARIANT else call.held
    if call.op == "ragged_all_to_all":  # its rows stay first
        return _CollectiveFunction.apply(call, x.movedim(0, 1), *tokens), 1
    dims = {k: v + 1 if k in ("dim", "split", "concat") else v for k, v in call.kw.items()}
    return _CollectiveFunction.apply(dataclasses.replace(call, kw=dims), x, *tokens), out_dim


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


def _together(op: str, x: Tensor, kw: Mapping[str, Any]) -> Tensor:
    """All ranks at once: ``x [n, ...]`` to ``[n, ...]``, or to one value for a result equal on all
    ranks.
    """
    n, each = x.shape[0], x.unbind(0)
    match op:
        case "psum":
            return x.sum(0, dtype=x.dtype)
        case "pmax":
            return x.amax(0)
        case "pvary" | "psum_transpose":
            return x
        case "all_gather_invariant":
            return torch.cat(each, kw["dim"])
        case "all_gather":
            y = torch.cat(each, kw["dim"])
            return y.unsqueeze(0).expand(n, *y.shape)
        case "psum_scatter":
            return torch.stack(x.sum(0, dtype=x.dtype).chunk(n, kw["dim"]))
        case "pslice":
            return torch.stack([t.chunk(n, kw["dim"])[i] for i, t in enumerate(each)])
        case "all_to_all":
            parts = [t.chunk(n, kw["split"]) for t in each]
            return torch.stack([torch.cat([p[i] for p in parts], kw["concat"]) for i in range(n)])
        case "ppermute":
            source = {target: s for s, target in kw["perm"]}
            return torch.stack(
                [each[source[i]] if i in source else torch.zeros_like(each[0]) for i in range(n)]
            )
        case _:
            raise ValueError(
                f"{op} in the simulated mesh: sizes differ by rank; use a padded all_to_all, or "
                "backend threads"
            )


def transpose(call: Collective, g: Tensor) -> tuple[Collective, Tensor]:
    """The collective that carries the cotangent ``g`` back, and ``g`` in the dtype in which that is
    to be done.

    Raises:
        ValueError: the collective has no gradient.
    """
    kw = call.kw
    match call.op:
        case "psum":
            op, kw = "psum_transpose", {}
        case "pvary" | "psum_transpose":
            op, kw = "psum", {}
        case "all_gather":
            op, g, kw = "psum_scatter", g.to(kw["grad_dtype"] or g.dtype), {"dim": kw["dim"]}
        case "psum_scatter":
            op, kw = "all_gather", {"dim": kw["dim"], "dtype": None, "grad_dtype": None}
        case "all_gather_invariant":
            op = "pslice"
        case "pslice":
            op = "all_gather_invariant"
        case "all_to_all":
            op, kw = "all_to_all", {"split": kw["concat"], "concat": kw["split"]}
        case "ragged_all_to_all":
            op, kw = call.op, {"send": kw["recv"], "recv": kw["send"]}
        case "ppermute":
            op, kw = call.op, {"perm": tuple((b, a) for a, b in kw["perm"])}
        case _:
            raise ValueError(f"{call.op} has no gradient; stop_gradient its operand")
    return Collective(op, call.axes, kw, call.records, call.check), g
