"""``jit``: which calls of a function run as they are, which are captured, which launch a graph."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from k31fn import _functorch, tree
from k31fn.jit.recorders import Recorder, recorder_of
from k31fn.jit.trace import Trace, find_successors
from k31fn.jit.watch import OpStep, Watch, place_of
from k31fn.kernels.registry import OPS, record_impls

__all__ = ["CaptureError", "describe", "jit"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MAX_TRACES = 4  # each holds the memory of a call; phases and a short last row make two or three
# set while a function is checked or captured: a function inside that is jitted itself is a part
_INSIDE: contextvars.ContextVar[bool] = contextvars.ContextVar("k31fn_capturing", default=False)
# Context variables that change no operator: who counts them.
_COUNTERS = ("k31fn_impl_records", "k31fn_watchers", "k31fn_recorder", "k31fn_capturing")


class CaptureError(RuntimeError):
    """A function that had to be captured cannot be; its arguments are as they were."""


def jit(
    f: Callable[_P, _R],
    *,
    donate: Sequence[int] = (),
    strict: bool = False,
    note: Callable[[str], object] = lambda line: print(line, file=sys.stderr),
) -> Callable[_P, _R]:
    """``f``, whose third call of a kind is captured as one graph that all later ones launch.

    Calls are of a kind that agree in the structure of their arguments, in shapes, dtypes and
    values that are no tensors, in the chosen implementations of operators, and in what torch and
    k31fn are told about precision. The first of a kind runs as it is, the second under a check
    that names what a graph cannot hold (:func:`describe`). At most four kinds are captured; calls
    of others run as they are. Values are those of ``f``, bit for bit. On a CPU every call is ``f``,
    and so it is under a ``torch.func`` transform or where an argument requires a gradient:
    differentiate inside ``f``.

    ``f`` is pure: what it reads besides its arguments is what it was at the capture, and numbers
    that it computes on the host are constants.

    Results are the caller's: they are copied out of the graph's memory. Not those of donated
    arguments, which keep their addresses from call to call and cost no copy.

    Args:
        f: a function of trees.
        donate: numbers of arguments that the caller gives up, and ``f`` may write into. The
            result, or an item of the tuple that it is, has the structure, shapes and dtypes of
            each, and takes its place in the next call.
        strict: raise where a call of ``f`` cannot be captured, not run it as it is.
        note: is told in one line of each capture, and why there is none.

    Raises:
        ValueError: (a call) an argument is a Python float, which would be a constant of the graph.
        CaptureError: (a call, ``strict``) names what cannot be captured.
    """
    jitted = _Jitted(f, tuple(donate), strict, note)

    @functools.wraps(f)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return jitted(*args, **kwargs)

    call.__dict__["jitted"] = jitted
    return call


def describe(f: Callable[..., Any]) -> str:
    """Traces of a function that :func:`jit` gave, their memory, and why calls ran as they are.

    Raises:
        ValueError: ``f`` is no such function.
    """
    jitted = getattr(f, "jitted", None)
    if not isinstance(jitted, _Jitted):
        raise ValueError(f"describe: {f!r} is not a function that jit gave; pass jit's result")
    return jitted.describe()


class _Kind:
    """The calls of one kind.

    Attributes:
        num_eager: of them that ran as they are.
        reason: why all do; empty: they need not.
        trace: of the captured one.
    """

    def __init__(self) -> None:
        self.num_eager = 0
        self.reason = ""
        self.trace: Trace | None = None
        self.steps: list[OpStep] = []  # of the checked call, until the next one is captured
        self.successors: dict[int, int] = {}


class _Jitted:
    """The function that :func:`jit` wraps, with its traces."""

    def __init__(
        self,
        f: Callable[..., Any],
        donate: tuple[int, ...],
        strict: bool,
        note: Callable[[str], object],
    ) -> None:
        self._f = f
        self._name = getattr(f, "__qualname__", type(f).__name__).rpartition(".")[2]
        self._donate = donate
        self._strict = strict
        self._note = note
        self._kinds: dict[Any, _Kind] = {}
        self._recorder: Recorder | None = None
        self._other = _Kind()  # all kinds beyond the first few

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _INSIDE.get() or _functorch.transforms_active():
            return self._f(*args, **kwargs)
        values, structure = tree.flatten((args, kwargs), allow_none=True)
        tensors = [x for x in values if isinstance(x, Tensor)]
        device = next((x.device for x in tensors if not x.is_cpu), torch.device("cpu"))
        if self._recorder is None:
            self._recorder = recorder_of(device.type)
        if self._recorder is None:
            return self._f(*args, **kwargs)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return self._f(*args, **kwargs)
        self._refuse_floats(args, kwargs, values)
        kind = self._kind(values, structure, device)
        if kind.trace is not None:
            return kind.trace(values)
        if not kind.reason and kind.num_eager == 0:
            kind.reason = self._misplaced(args, kwargs, device)
        if not kind.reason and kind.num_eager == 2:
            self._capture(kind, values, structure, device)
            if kind.trace is not None:
                return kind.trace(values)
        if kind.reason and self._strict:
            raise CaptureError(f"{self._name} cannot be captured: {kind.reason}")
        return self._run(kind, args, kwargs, device)

    def _run(self, kind: _Kind, args: Any, kwargs: Any, device: torch.device) -> Any:
        """A call as it is; the second of a kind is checked."""
        kind.num_eager += 1
        if kind.reason or kind.num_eager != 2:
            if kind.reason and kind.num_eager == 1:
                self._note(f"jit: {self._name} is not captured: {kind.reason}")
            # a jitted function inside is a part of this one, if this one can be captured
            with _inside(not kind.reason):
                return self._f(*args, **kwargs)
        result, reasons = self._check(kind, args, kwargs, device)
        kind.successors = find_successors(args, self._donate, result)
        if self._donate and not kind.successors:
            reasons.append(
                f"donate={self._donate}: the result has no item of the structure, shapes and "
                "dtypes of that argument"
            )
        if reasons:
            self._refuse(kind, reasons)
        return result

    def _check(
        self, kind: _Kind, args: Any, kwargs: Any, device: torch.device
    ) -> tuple[Any, list[str]]:
        """The call's result, and what keeps it from being captured."""
        assert self._recorder is not None
        # On copies where the capture will have copies: a kernel may be another where addresses are
        # less even, and it must have been loaded.
        copied = []
        for i, arg in enumerate(args):
            copied.append(arg if i in self._donate else _copies(arg))
        leaves = tree.leaves((copied, kwargs), allow_none=True)
        inputs = [x for x in leaves if isinstance(x, Tensor)]
        watch = Watch(device.type, inputs)
        with _inside(), record_impls() as impls, self._recorder.watching(watch), watch:
            result = self._f(*copied, **kwargs)
        kind.steps = watch.steps
        reasons = []
        for op, name in impls:
            impl = OPS[op].implementations.get(name)
            if impl is not None and impl.no_capture:
                reasons.append(f"operator {op}, implementation {name}: {impl.no_capture}")
        return result, [*reasons, *watch.reasons]

    def _capture(self, kind: _Kind, values: list[Any], structure: Any, device: Any) -> None:
        """Sets the trace of a kind of calls, or the reason why it has none."""
        assert self._recorder is not None
        began = time.perf_counter()
        try:
            trace = Trace(self._f, values, structure, kind.successors)
            with _inside():
                trace.capture(self._recorder, device.type, kind.steps)
            reasons = trace.reasons
            recording = trace.recording
        except Exception as error:
            # whatever it is, the call can run as it is: nothing has been computed, or written
            trace = recording = None
            lines = str(error).strip().splitlines()
            said = f"{type(error).__name__}: {lines[0] if lines else ''}"
            reasons = [f"{place_of(error)}: {said}".removeprefix(": ")]
        finally:
            kind.steps = []
        if trace is None or recording is None:
            self._refuse(kind, reasons)
            return
        trace.seconds = time.perf_counter() - began
        kind.trace = trace
        self._note(
            f"jit: {self._name} is captured, in {trace.seconds:.1f} s and "
            f"{recording.nbytes / 2**20:.0f} MiB of its own"
        )

    def _refuse(self, kind: _Kind, reasons: list[str]) -> None:
        more = f" (and {len(reasons) - 3} more)" if len(reasons) > 3 else ""
        kind.reason = "; ".join(reasons[:3]) + more
        if not self._strict:
            self._note(f"jit: {self._name} is not captured: {kind.reason}")

    def _kind(self, values: list[Any], structure: Any, device: torch.device) -> _Kind:
        parts = []
        for x in values:
            if isinstance(x, Tensor):
                parts.append((x.shape, x.stride(), x.dtype))
            else:
                parts.append((type(x), x))
        key = (structure, tuple(parts), _settings(device))
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= _MAX_TRACES:
                self._other.reason = (
                    f"its calls are of more than {_MAX_TRACES} kinds (shapes, dtypes, values that "
                    "are no tensors)"
                )
                return self._other
            kind = self._kinds[key] = _Kind()
        return kind

    def _refuse_floats(self, args: Any, kwargs: Any, values: list[Any]) -> None:
        if not any(isinstance(x, float) for x in values):
            return
        for path, x in self._paths(args, kwargs):
            if isinstance(x, float):
                raise ValueError(
                    f"jit: {path}={x} of {self._name} is a Python float, which a graph would keep "
                    "for ever; pass a tensor on the device, such as torch.full((), x, "
                    "device=device)"
                )

    def _misplaced(self, args: Any, kwargs: Any, device: torch.device) -> str:
        """The argument that is not where the others are; empty: all are."""
        for path, x in self._paths(args, kwargs):
            if isinstance(x, Tensor) and x.device.type != device.type:
                return f"{path} of its arguments is on {x.device}, others are on {device}"
        return ""

    @staticmethod
    def _paths(args: Any, kwargs: Any) -> list[tuple[str, Any]]:
        arguments = (*args, kwargs) if kwargs else args
        return tree.flatten_with_paths(arguments, allow_none=True)

    def describe(self) -> str:
        """See :func:`describe`."""
        lines = [f"{self._name}: {len(self._kinds)} of at most {_MAX_TRACES} kinds of calls"]
        for number, kind in enumerate((*self._kinds.values(), self._other), 1):
            if kind.trace is not None and kind.trace.recording is not None:
                lines.append(
                    f"  {number}: launched {kind.trace.num_replays} times; captured in "
                    f"{kind.trace.seconds:.1f} s, {kind.trace.recording.nbytes / 2**20:.0f} MiB of "
                    f"its own; {kind.num_eager} calls before it"
                )
            elif kind.num_eager or kind.reason:
                reason = kind.reason or "the third is captured"
                lines.append(f"  {number}: {kind.num_eager} calls as they are: {reason}")
        return "\n".join(lines)


@contextlib.contextmanager
def _inside(value: bool = True) -> Iterator[None]:
    token = _INSIDE.set(value)
    try:
        yield
    finally:
        _INSIDE.reset(token)


def _copies(argument: Any) -> Any:
    """The tree with copies of its tensors."""
    leaves, structure = tree.flatten(argument, allow_none=True)
    copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
    return tree.unflatten(structure, copies)


def _settings(device: torch.device) -> tuple[Any, ...]:
    """What changes an operator and is no argument."""
    values: dict[str, Any] = {}
    for variable, value in contextvars.copy_context().items():
        if variable.name.startswith("k31fn_") and variable.name not in _COUNTERS and value:
            # such as implementations by operator
            is_mapping = isinstance(value, Mapping)
            values[variable.name] = tuple(sorted(value.items())) if is_mapping else value
    autocast = ()
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        autocast = torch.get_autocast_dtype(device.type)
    return (
        tuple(sorted(values.items())),
        device,
        autocast,
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )
