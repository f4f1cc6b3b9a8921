"""Recomputation, and the choices that it must not make twice."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import _functorch, tree
from k31fn.autodiff.custom_vjp import custom_vjp, differentiable, stop_gradient
from k31fn.autodiff.kept import Kept
from k31fn.autodiff.transforms import vjp_once

__all__ = [
    "can_keep",
    "decision",
    "keepable",
    "record_decisions",
    "remat",
    "replay_decisions",
    "report",
    "saveable",
]


class _Queue:
    """Values made once: recorded in order, or handed out again in the same order."""

    def __init__(self, values: list[Any] | None = None) -> None:
        self.replaying = values is not None
        self.values: list[Any] = [] if values is None else values
        self.position = 0
        self.level = _functorch.current_level()

    @property
    def count(self) -> int:
        """Values recorded, or handed out, so far."""
        return self.position if self.replaying else len(self.values)

    def next(self, name: str) -> Any:
        if self.position >= len(self.values):
            raise RuntimeError(
                f"replay asks for {name!r}, which the forward did not record: the function is not "
                "pure"
            )
        self.position += 1
        value = self.values[self.position - 1]
        if any(
            isinstance(t, Tensor) and _functorch.level(t) > _functorch.current_level()
            for t in tree.leaves(value)
        ):
            raise RuntimeError(
                f"{name!r} is asked for inside the forward of a custom_vjp, where the torch.func "
                "levels of what was "
                "kept are closed; choose before the call and pass the result as an argument"
            )
        return value

    def record(self, name: str, value: Any) -> Any:
        if any(
            isinstance(t, Tensor) and _functorch.level(t) > self.level for t in tree.leaves(value)
        ):
            raise RuntimeError(
                f"{name!r} was made under a torch.func transform inside the function that keeps "
                "it; put remat (or "
                "record_decisions) inside the transform"
            )
        self.values.append(value)
        return value


class _Tape(NamedTuple):
    """What the running remat (or record_decisions) keeps: all decisions, and the saveable ops named
    in ``save``.

    With ``backward`` it is a run for a backward, whose integer results nobody reads.
    """

    decisions: _Queue
    saved: _Queue
    save: frozenset[str] = frozenset()
    backward: bool = False


_TAPE: contextvars.ContextVar[_Tape | None] = contextvars.ContextVar("k31fn_tape", default=None)


@contextlib.contextmanager
def _tape(tape: _Tape) -> Iterator[_Tape]:
    token = _TAPE.set(tape)
    try:
        yield tape
    finally:
        _TAPE.reset(token)


def decision(name: str, fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)``: integers or booleans that choose (a route, a top-k set), without gradient.

    Made once: an enclosing :func:`remat` keeps the result whatever its policy, so a replay cannot
    choose differently (exact ties, non-deterministic kernels), and :func:`replay_decisions` pins it
    for finite differences.

    Raises:
        ValueError: ``fn`` returned a floating tensor, whose gradient would silently be zero.
    """
    tape = _TAPE.get()
    if tape is not None and tape.decisions.replaying:
        return tape.decisions.next(name)
    value = fn(*stop_gradient(args))
    if floating := [t for t in tree.leaves(value) if isinstance(t, Tensor) and differentiable(t)]:
        raise ValueError(
            f"decision {name!r} returned {floating[0].dtype}: a decision is integer or boolean "
            "and has no gradient; "
            "gather the floating values outside it"
        )
    return value if tape is None else tape.decisions.record(name, value)


_REPORTED: contextvars.ContextVar[list[Tensor] | None] = contextvars.ContextVar(
    "k31fn_reported", default=None
)


def report(
    fn: Callable[..., tuple[Tensor, ...]], shapes: Sequence[tuple[int, ...]], *args: Any
) -> tuple[Tensor, ...]:
    """``fn(*args)``: int32 tensors that a function returns beside its result and never reads, such
    as counts.

    Made in a forward only. An enclosing :func:`remat` keeps none of it, whatever its policy, and
    its replay, whose integer results go nowhere, gets zeros that take no memory. Without gradient.

    Args:
        fn: a pure function.
        shapes: of its results.
        args: its arguments.
    """
    tape = _TAPE.get()
    if tape is not None and tape.backward:
        where = next(t.device for t in tree.leaves(args) if isinstance(t, Tensor))
        return tuple(
            torch.zeros((), dtype=torch.int32, device=where).expand(shape) for shape in shapes
        )
    made = fn(*stop_gradient(args))
    assert [(*t.shape,) for t in made] == [*shapes]
    assert all(t.dtype == torch.int32 for t in made)
    if (found := _REPORTED.get()) is not None:
        found += made
    return made


def _run_kept(f: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Any, Kept]:
    """The value, the same with zeros that take no memory for what is reported in it, and the
    pullback.
    """
    token = _REPORTED.set(found := [])
    try:
        out, kept = Kept.run(f, args)
    finally:
        _REPORTED.reset(token)
    reported = {t.untyped_storage()._cdata for t in found}

    def spared(x: Any) -> Any:
        known = isinstance(x, Tensor) and x.untyped_storage()._cdata in reported
        return x.new_zeros(()).expand(x.shape) if known else x

    return out, tree.map(spared, out), kept


@contextlib.contextmanager
def record_decisions() -> Iterator[list[Any]]:
    """Collects the decisions made inside, in order, for :func:`replay_decisions`."""
    with _tape(_Tape(_Queue(), _Queue())) as tape:
        yield tape.decisions.values


@contextlib.contextmanager
def replay_decisions(made: list[Any]) -> Iterator[None]:
    """Inside, each :func:`decision` returns the next of ``made`` instead of choosing again."""
    with _tape(_Tape(_Queue(made), _Queue())):
        yield


def remat(f: Callable[..., Any], *, save: Sequence[str] = ()) -> Callable[..., Any]:
    """``f``, keeping only its inputs for the backward, which runs ``f`` again.

    Works under every ``torch.func`` transform, nested, and to any order. Decisions are always kept;
    so are the outputs and residuals of :func:`saveable` ops and :func:`keepable` functions named in
    ``save``, which the replay then does not run again (of nested remats, the innermost says what is
    saved). Kept values travel as explicit inputs and outputs, never past the levels of
    ``torch.func``.

    Args:
        f: a pure function of pytrees of tensors.
        save: names of :func:`saveable` ops and :func:`keepable` functions to keep.

    Raises:
        ValueError: ``f`` captured a tensor that is being differentiated; its gradient would
            silently be zero.
    """
    names = frozenset(save)

    def fwd(given: Any, *args: Any) -> Any:
        out, made, saved = run_recorded(f, args, given, names)
        return (out, made), (args, made, saved, Ambient(args))

    def bwd(needs: Any, residuals: Any, ct: Any) -> tuple[Any, ...]:
        args, made, saved, ambient = residuals
        return (
            None,
            *ambient.run(
                lambda: pull_replayed(f, args, ct[0], made, saved, names, needs=needs[1:])
            ),
        )

    rule = custom_vjp(
        fwd, bwd, needs=True, name=f"remat({getattr(f, '__name__', type(f).__name__)})"
    )

    @functools.wraps(f)
    def wrapped(*args: Any) -> Any:
        return call_recorded(rule, *args)

    return wrapped


def run_recorded(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    given: Any = (),
    save: frozenset[str] = frozenset(),
) -> tuple[Any, list[Any], list[Any]]:
    """``f(*args)``, the decisions made in it, and what ``save`` keeps: all that
    :func:`pull_replayed` needs.

    Args:
        f: a function.
        args: its arguments.
        given: () in a first run and, in the replay of an enclosing remat, the list of decisions
            made then.
        save: names of saveable ops.
    """
    outer = _TAPE.get()
    decisions = _Queue(given if isinstance(given, list) else None)
    with _tape(_Tape(decisions, _Queue(), save, outer is not None and outer.backward)) as tape:
        out = f(*args)
    return out, tape.decisions.values, tape.saved.values


def pull_replayed(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    ct: Any,
    made: list[Any],
    saved: Sequence[Any] = (),
    save: frozenset[str] = frozenset(),
    *,
    needs: Any = None,
) -> tuple[Any, ...]:
    """The gradients of ``<f(*args), ct>``, by a second run with what the first one decided and
    saved.

    With ``needs``, trees of bools like ``args``, only those of leaves that are True there, and None
    for others.
    """
    with _tape(_Tape(_Queue(made), _Queue(list(saved)), save, backward=True)):
        return vjp_once(f, args, ct, tree.map(lambda _: True, args) if needs is None else needs)


def replay(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    made: list[Any],
    saved: Sequence[Any],
    save: frozenset[str],
) -> Any:
    """``f(*args)`` once more, with what a first run decided and saved."""
    with _tape(_Tape(_Queue(made), _Queue(list(saved)), save, backward=True)):
        return f(*args)


def call_recorded(rule: custom_vjp, *args: Any) -> Any:
    """The value of a rule that takes decisions first and returns ``(value, decisions)``, on the
    enclosing tape.
    """
    outer = _TAPE.get()
    if outer is not None and outer.decisions.replaying:
        return rule(list(outer.decisions.next(rule.name)), *args)[0]
    out, made = rule((), *args)
    if outer is not None:
        outer.decisions.record(rule.name, made)
    return out


class Ambient:
    """What surrounds a forward: its context and its autocast.

    Passes through a tree as one opaque leaf.
    """

    __slots__ = ("autocast", "context")

    def __init__(self, args: Any) -> None:
        self.context = contextvars.copy_context()
        devices = {t.device.type for t in tree.leaves(args) if isinstance(t, Tensor)}
        available = [d for d in devices if torch.amp.is_autocast_available(d)]
        self.autocast = [
            (d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in available
        ]

    def run(self, f: Callable[[], Any]) -> Any:
        """``f()`` in these surroundings, on whatever thread."""

        def with_autocast() -> Any:
            with contextlib.ExitStack() as stack:
                for device, dtype, enabled in self.autocast:
                    if enabled or torch.is_autocast_enabled(device):
                        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
                return f()

        # A context can be entered once at a time, and a backward may run twice or on two threads:
        # enter a copy.
        return self.context.copy().run(with_autocast)


def saveable(name: str, rule: custom_vjp) -> Callable[..., Any]:
    """``rule``, whose output and residuals an enclosing ``remat(f, save=[name])`` keeps instead of
    recomputing.

    What is kept leaves and re-enters through explicit outputs and arguments of the remat. Through
    kept residuals the derivative is first order.
    """
    if any(i == 0 for i in rule.nondiff_argnums):
        raise ValueError(
            f"saveable {name!r}: the first argument of {rule.name} must be differentiable"
        )

    def play_fwd(kept: Any, *args: Any) -> Any:
        return kept

    def play_bwd(*parts: Any) -> tuple[Any, ...]:
        num_static = len(rule.nondiff_argnums)
        static, rest = parts[:num_static], parts[num_static:]
        if rule.needs:
            rest = (rest[0][1:], *rest[1:])
        return (None, *rule.bwd(*static, *rest))

    static = [i + 1 for i in rule.nondiff_argnums]
    play = custom_vjp(
        play_fwd,
        play_bwd,
        nondiff_argnums=static,
        opaque=rule.opaque,
        needs=rule.needs,
        name=rule.name,
    )

    def call(*args: Any) -> Any:
        tape = _TAPE.get()
        if tape is None or name not in tape.save:
            return rule(*args)
        if tape.saved.replaying:
            return play(tape.saved.next(name), *args)
        return tape.saved.record(name, rule.fwd(*args))[0]

    return call


def can_keep() -> bool:
    """Whether :func:`keepable` functions are kept here: not within a ``torch.func`` transform."""
    return not _functorch.transforms_active() and _functorch.saved_tensors_hooks_allowed()


def keepable(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """``f(weights, *args)``, whose output and graph an enclosing ``remat(g, save=[name])`` keeps.

    The replay then does not run ``f`` again: it makes the arguments again, and pulls back through
    the kept graph, which holds neither the arguments nor views of them. So between forward and
    backward live the output and what the backward of ``f`` needs besides its arguments. Through a
    kept graph derivatives are of first order.

    Within a ``torch.func`` transform nothing is kept and ``f`` runs again, with the same gradients,
    to any order.

    Args:
        name: what ``save`` calls it.
        f: a function of trees. Under :func:`~k31fn.autodiff.split_vjp` the gradients of its first
            argument are put off.
    """

    def call(*args: Any) -> Any:
        tape = _TAPE.get()
        if tape is None or name not in tape.save:
            return f(*args)
        if not tape.saved.replaying:
            if not can_keep():
                tape.saved.record(name, ())
                return f(*args)
            before = tape.decisions.count
            with _tape(
                _Tape(tape.decisions, _Queue(), backward=tape.backward)
            ):  # nothing in its graph is saved
                out, spared, kept = _run_kept(f, args)
            tape.saved.record(name, (spared, kept, tape.decisions.count - before))
            return out
        found = tape.saved.next(name)
        if not found:
            return f(*args)
        out, kept, num_decisions = found
        tape.decisions.position += num_decisions
        return _PLAY(stop_gradient(out), kept, *args)

    return call


def _play_fwd(out: Any, kept: Kept, *args: Any) -> Any:
    return out, (kept, args, Ambient(args))


def _play_bwd(needs: Any, residuals: Any, ct: Any) -> tuple[Any, ...]:
    kept, args, ambient = residuals
    return (None, None, *ambient.run(lambda: kept.pull(args, needs[2:], ct)))


_PLAY = custom_vjp(
    _play_fwd,
    _play_bwd,
    opaque=True,
    needs=True,
    name="keepable",
    instead="remat='none' or 'layer'",
)
