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
from k31fn.autodiff.transforms import vjp_once

__all__ = ["decision", "record_decisions", "remat", "replay_decisions", "saveable"]


class _Queue:
    """Values made once: recorded in order, or handed out again in the same order."""

    def __init__(self, values: list[Any] | None = None) -> None:
        self.replaying = values is not None
        self.values: list[Any] = [] if values is None else values
        self.position = 0
        self.level = _functorch.current_level()

    def next(self, name: str) -> Any:
        if self.position >= len(self.values):
            raise RuntimeError(f"replay asks for {name!r}, which the forward did not record: the function is not pure")
        self.position += 1
        value = self.values[self.position - 1]
        if any(isinstance(t, Tensor) and _functorch.level(t) > _functorch.current_level() for t in tree.leaves(value)):
            raise RuntimeError(
                f"{name!r} is asked for inside the forward of a custom_vjp, where the torch.func levels of what was "
                "kept are closed; choose before the call and pass the result as an argument"
            )
        return value

    def record(self, name: str, value: Any) -> Any:
        if any(isinstance(t, Tensor) and _functorch.level(t) > self.level for t in tree.leaves(value)):
            raise RuntimeError(
                f"{name!r} was made under a torch.func transform inside the function that keeps it; put remat (or "
                "record_decisions) inside the transform"
            )
        self.values.append(value)
        return value


class _Tape(NamedTuple):
    """What the running remat (or record_decisions) keeps: all decisions, and the saveable ops named in ``save``."""

    decisions: _Queue
    saved: _Queue
    save: frozenset[str] = frozenset()


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

    Made once: an enclosing :func:`remat` keeps the result whatever its policy, so a replay cannot choose differently
    (exact ties, non-deterministic kernels), and :func:`replay_decisions` pins it for finite differences.

    Raises:
        ValueError: ``fn`` returned a floating tensor, whose gradient would silently be zero.
    """
    tape = _TAPE.get()
    if tape is not None and tape.decisions.replaying:
        return tape.decisions.next(name)
    value = fn(*stop_gradient(args))
    if floating := [t for t in tree.leaves(value) if isinstance(t, Tensor) and differentiable(t)]:
        raise ValueError(
            f"decision {name!r} returned {floating[0].dtype}: a decision is integer or boolean and has no gradient; "
            "gather the floating values outside it"
        )
    return value if tape is None else tape.decisions.record(name, value)


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

    Works under every ``torch.func`` transform, nested, and to any order. Decisions are always kept; so are the outputs
    and residuals of :func:`saveable` ops named in ``save``, whose forward kernels the replay then skips (of nested
    remats, the innermost says what is saved). Kept values travel as explicit inputs and outputs, never past the levels
    of ``torch.func``.

    Args:
        f: a pure function of pytrees of tensors.
        save: names of :func:`saveable` ops to keep.

    Raises:
        ValueError: ``f`` captured a tensor that is being differentiated; its gradient would silently be zero.
    """
    names = frozenset(save)

    def fwd(given: Any, *args: Any) -> Any:
        out, made, saved = run_recorded(f, args, given, names)
        return (out, made), (args, made, saved, Ambient(args))

    def bwd(residuals: Any, ct: Any) -> tuple[Any, ...]:
        args, made, saved, ambient = residuals
        return (None, *ambient.run(lambda: pull_replayed(f, args, ct[0], made, saved, names)))

    rule = custom_vjp(f, name=f"remat({getattr(f, '__name__', type(f).__name__)})").defvjp(fwd, bwd)

    @functools.wraps(f)
    def wrapped(*args: Any) -> Any:
        return call_recorded(rule, *args)

    return wrapped


def run_recorded(
    f: Callable[..., Any], args: tuple[Any, ...], given: Any = (), save: frozenset[str] = frozenset()
) -> tuple[Any, list[Any], list[Any]]:
    """``f(*args)``, the decisions made in it, and what ``save`` keeps: all that :func:`pull_replayed` needs.

    Args:
        f: a function.
        args: its arguments.
        given: () in a first run and, in the replay of an enclosing remat, the list of decisions made then.
        save: names of saveable ops.
    """
    with _tape(_Tape(_Queue(given if isinstance(given, list) else None), _Queue(), save)) as tape:
        out = f(*args)
    return out, tape.decisions.values, tape.saved.values


def pull_replayed(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    ct: Any,
    made: list[Any],
    saved: Sequence[Any] = (),
    save: frozenset[str] = frozenset(),
) -> tuple[Any, ...]:
    """The gradients of ``<f(*args), ct>``, by a second run with what the first one decided and saved."""
    with _tape(_Tape(_Queue(made), _Queue(list(saved)), save)):
        return vjp_once(f, args, ct)


def call_recorded(rule: custom_vjp, *args: Any) -> Any:
    """The value of a rule that takes decisions first and returns ``(value, decisions)``, on the enclosing tape."""
    outer = _TAPE.get()
    if outer is not None and outer.decisions.replaying:
        return rule(list(outer.decisions.next(rule.name)), *args)[0]
    out, made = rule((), *args)
    if outer is not None:
        outer.decisions.record(rule.name, made)
    return out


class Ambient:
    """What surrounds a forward: its context and its autocast. Passes through a tree as one opaque leaf."""

    __slots__ = ("autocast", "context")

    def __init__(self, args: Any) -> None:
        self.context = contextvars.copy_context()
        devices = {t.device.type for t in tree.leaves(args) if isinstance(t, Tensor)}
        available = [d for d in devices if torch.amp.is_autocast_available(d)]
        self.autocast = [(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in available]

    def run(self, f: Callable[[], Any]) -> Any:
        """``f()`` in these surroundings, on whatever thread."""

        def with_autocast() -> Any:
            with contextlib.ExitStack() as stack:
                for device, dtype, enabled in self.autocast:
                    if enabled or torch.is_autocast_enabled(device):
                        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
                return f()

        # A context can be entered once at a time, and a backward may run twice or on two threads: enter a copy.
        return self.context.copy().run(with_autocast)


def saveable(name: str, rule: custom_vjp) -> Callable[..., Any]:
    """``rule``, whose output and residuals an enclosing ``remat(f, save=[name])`` keeps instead of recomputing.

    What is kept leaves and re-enters through explicit outputs and arguments of the remat. Through kept residuals the
    derivative is first order.
    """
    if any(i == 0 for i in rule.nondiff_argnums):
        raise ValueError(f"saveable {name!r}: the first argument of {rule.name} must be differentiable")

    def play_fwd(kept: Any, *args: Any) -> Any:
        return kept

    def play_bwd(*parts: Any) -> tuple[Any, ...]:
        *static, residuals, ct = parts
        return (None, *rule.bwd(*static, residuals, ct))

    static = [i + 1 for i in rule.nondiff_argnums]
    play = custom_vjp(play_fwd, nondiff_argnums=static, name=rule.name, opaque=rule.opaque).defvjp(play_fwd, play_bwd)

    def call(*args: Any) -> Any:
        tape = _TAPE.get()
        if tape is None or name not in tape.save:
            return rule(*args)
        if tape.saved.replaying:
            return play(tape.saved.next(name), *args)
        return tape.saved.record(name, rule.fwd(*args))[0]

    return call
