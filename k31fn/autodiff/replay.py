"""Notes of a run of a function, for a replay that must not choose or compute it again.

A remat runs its function twice. Choices (a route, a top-k set) are made in the first run only:
exact ties or a kernel that is not deterministic could choose differently in the second. What both
runs share is a :class:`ReplayTape`, on which values are noted in order and handed out in the same
order.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import _functorch, tree
from k31fn.autodiff.ambient import carry
from k31fn.autodiff.custom_vjp import custom_vjp, detached
from k31fn.autodiff.leaves import differentiable, differentiable_leaves, pick
from k31fn.autodiff.transforms import vjp_once

__all__ = [
    "ReplayTape",
    "ValueQueue",
    "call_recorded",
    "current_replay_tape",
    "decision",
    "pinned_stops",
    "pull_replayed",
    "record_decisions",
    "replay",
    "replay_decisions",
    "report",
    "run_recorded",
    "running_on",
    "stop_gradient",
]


class ValueQueue:
    """Values made once: recorded in order, or handed out again in the same order."""

    def __init__(self, values: list[Any] | None = None) -> None:
        # Not the truth of the list: a first run may have decided nothing.
        self.replaying = values is not None
        self.values: list[Any] = [] if values is None else values
        self._position = 0
        # What belongs to a deeper level dies with it, before the replay asks.
        self._level = _functorch.current_level()

    @property
    def count(self) -> int:
        """Values recorded, or handed out, so far."""
        return self._position if self.replaying else len(self.values)

    def next(self, name: str) -> Any:
        """The next value.

        Raises:
            RuntimeError: there is none, or a ``torch.func`` level that it belongs to is closed.
        """
        if self._position >= len(self.values):
            raise RuntimeError(
                f"replay asks for {name!r}, which the forward did not record: the function is not "
                "pure"
            )
        value = self.values[self._position]
        self._position += 1
        if _deepest_level(value) > _functorch.current_level():
            raise RuntimeError(
                f"{name!r} is asked for inside the forward of a custom_vjp, where the torch.func "
                "levels of what was kept are closed; choose before the call and pass the result as "
                "an argument"
            )
        return value

    def skip(self, count: int) -> None:
        """Passes over values that a function would ask for which does not run again."""
        self._position += count

    def holds(self, value: Any) -> bool:
        """Whether the value lives until the replay asks."""
        return _deepest_level(value) <= self._level

    def record(self, name: str, value: Any) -> Any:
        """The value, which it notes.

        Raises:
            RuntimeError: it belongs to a ``torch.func`` level that is closed before the replay.
        """
        if not self.holds(value):
            raise RuntimeError(
                f"{name!r} was made under a torch.func transform inside the function that keeps "
                "it; put remat (or record_decisions) inside the transform"
            )
        self.values.append(value)
        return value


def _deepest_level(value: Any) -> int:
    levels = [_functorch.level(t) for t in tree.leaves(value) if isinstance(t, Tensor)]
    return max(levels, default=0)


class ReplayTape(NamedTuple):
    """Notes that the running remat (or :func:`record_decisions`) shares with its replay.

    Attributes:
        decisions: all of them.
        kept: for the functions named in ``keep``, what :func:`k31fn.autodiff.keep` keeps.
        keep: names of functions that the replay does not run again.
        backward: whether this is a run for a backward, whose integer results nobody reads.
    """

    decisions: ValueQueue
    kept: ValueQueue
    keep: frozenset[str] = frozenset()
    backward: bool = False


# A context variable: a decision is made deep inside of layers, which do not know who recomputes.
_TAPE: contextvars.ContextVar[ReplayTape | None] = contextvars.ContextVar(
    "k31fn_replay_tape", default=None
)


def current_replay_tape() -> ReplayTape | None:
    """The tape of the innermost remat (or :func:`record_decisions`) that is running."""
    return _TAPE.get()


@contextlib.contextmanager
def running_on(tape: ReplayTape) -> Iterator[ReplayTape]:
    """Inside, values are noted on, or handed out from, this tape."""
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
    # A choice has no derivative; without this a torch.func level would follow it into the integers.
    with _unpinned():
        value = fn(*detached(args))
    for leaf in tree.leaves(value):
        if isinstance(leaf, Tensor) and differentiable(leaf):
            raise ValueError(
                f"decision {name!r} returned {leaf.dtype}: a decision is integer or boolean and "
                "has no gradient; gather the floating values outside it"
            )
    return value if tape is None else tape.decisions.record(name, value)


def report(
    fn: Callable[..., tuple[Tensor, ...]], shapes: Sequence[tuple[int, ...]], *args: Any
) -> tuple[Tensor, ...]:
    """``fn(*args)``: int32 tensors that a function returns beside its result and never reads, such
    as counts.

    Made in a forward only. An enclosing :func:`remat` keeps none of it, whatever its policy, and
    its replay, whose integer results go nowhere, gets zeros that take no memory. Without gradient.
    A function that is kept says which of its results these are (:func:`k31fn.autodiff.keep`).

    Args:
        fn: a pure function.
        shapes: of its results.
        args: its arguments.
    """
    tape = _TAPE.get()
    if tape is not None and tape.backward:
        # One element, expanded: a histogram of every layer would be made for nobody.
        device = next(t.device for t in tree.leaves(args) if isinstance(t, Tensor))
        zero = torch.zeros((), dtype=torch.int32, device=device)
        return tuple(zero.expand(shape) for shape in shapes)
    with _unpinned():
        tensors = fn(*detached(args))
    # The replay goes by the shapes alone: wrong ones would differ in the second run only.
    for tensor, shape in zip(tensors, shapes, strict=True):
        assert tensor.shape == torch.Size(shape)
        assert tensor.dtype == torch.int32
    return tensors


@contextlib.contextmanager
def record_decisions() -> Iterator[list[Any]]:
    """Collects the decisions made inside, in order, for :func:`replay_decisions`."""
    # No names to keep: no backward follows that would need anything but the choices.
    with running_on(ReplayTape(ValueQueue(), ValueQueue())) as tape:
        yield tape.decisions.values


@contextlib.contextmanager
def replay_decisions(decisions: list[Any]) -> Iterator[None]:
    """Inside, each :func:`decision` returns the next of ``decisions`` instead of choosing again."""
    with running_on(ReplayTape(ValueQueue(decisions), ValueQueue())):
        yield


# Carried, since a remat runs its function again on the thread of a device's backward.
_PINS: contextvars.ContextVar[bool] = carry(
    contextvars.ContextVar("k31fn_pins_stopped", default=False)
)


@contextlib.contextmanager
def pinned_stops(pins: bool = True) -> Iterator[None]:
    """Inside, :func:`stop_gradient` under :func:`record_decisions` notes its values, and under
    :func:`replay_decisions` hands them out again.

    So a function with stopped parts is one of its other parts alone, as its gradient says, also to
    finite differences. A remat inside notes and replays its own: this is to enclose forwards and
    backwards alike.
    """
    token = _PINS.set(pins)
    try:
        yield
    finally:
        _PINS.reset(token)


def _unpinned() -> contextlib.AbstractContextManager[None]:
    # What chooses or reports does not run in a replay, which would be asked for fewer values.
    return pinned_stops(False)


def stop_gradient(x: Any) -> Any:
    """The tree ``x`` with zero gradient, at every order and every ``torch.func`` level."""
    tape = _TAPE.get()
    if tape is None or not _PINS.get():
        return detached(x)
    values, structure = tree.flatten(x)
    index = differentiable_leaves(values)
    if tape.decisions.replaying:
        noted = tape.decisions.next("stop_gradient")
    else:
        noted = detached(pick(values, index))
        # Of a torch.func level inside the function it is gone before the replay: not pinned.
        tape.decisions.record("stop_gradient", noted if tape.decisions.holds(noted) else [])
    for i, value in zip(index, noted or detached(pick(values, index)), strict=True):
        values[i] = value
    return tree.unflatten(structure, values)


def run_recorded(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    given: Any = (),
    keep: frozenset[str] = frozenset(),
) -> tuple[Any, list[Any], list[Any]]:
    """``f(*args)``, the decisions made in it, and what is kept of the functions named in ``keep``:
    all that :func:`pull_replayed` needs.

    Args:
        f: a function.
        args: its arguments.
        given: () in a first run and, in the replay of an enclosing remat, the list of decisions
            made then.
        keep: names of functions that are not to run again.
    """
    outer = _TAPE.get()
    # A first run of an inner remat in the replay of an outer one: its reports go nowhere either.
    in_backward = outer is not None and outer.backward
    decisions = ValueQueue(given if isinstance(given, list) else None)
    with running_on(ReplayTape(decisions, ValueQueue(), keep, in_backward)) as tape:
        out = f(*args)
    return out, tape.decisions.values, tape.kept.values


def pull_replayed(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    ct: Any,
    decisions: list[Any],
    kept: Sequence[Any] = (),
    keep: frozenset[str] = frozenset(),
    *,
    needs: Any = None,
) -> tuple[Any, ...]:
    """The gradients of ``<f(*args), ct>``, by a second run with what the first one decided and
    kept.

    With ``needs``, trees of bools like ``args``, only those of leaves that are True there, and None
    for others.
    """
    needs = tree.map(lambda _: True, args) if needs is None else needs
    with running_on(_tape_of(decisions, kept, keep)):
        return vjp_once(f, args, ct, needs)


def replay(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    decisions: list[Any],
    kept: Sequence[Any],
    keep: frozenset[str],
) -> Any:
    """``f(*args)`` once more, with what a first run decided and kept."""
    with running_on(_tape_of(decisions, kept, keep)):
        return f(*args)


def _tape_of(decisions: list[Any], kept: Sequence[Any], keep: frozenset[str]) -> ReplayTape:
    # What is kept came through a tree, which may have made a tuple of it.
    return ReplayTape(ValueQueue(decisions), ValueQueue(list(kept)), keep, backward=True)


def call_recorded(rule: custom_vjp, *args: Any) -> Any:
    """The value of a rule that takes decisions first and returns ``(value, decisions)``, on the
    enclosing tape.

    Decisions are results and arguments of the rule: a tensor of a ``torch.func`` level can leave
    and enter a rule in no other way.
    """
    outer = _TAPE.get()
    if outer is not None and outer.decisions.replaying:
        # A list, also of nothing: () as the first argument stands for a first run.
        return rule(list(outer.decisions.next(rule.name)), *args)[0]
    out, decisions = rule((), *args)
    if outer is not None:
        # Stopped values among them are results of the rule, which autograd follows.
        outer.decisions.record(rule.name, detached(decisions))
    return out
