"""Operators and their implementations.

An :class:`Op` is a function of tensors with one reference, written in plain torch and
differentiable to any order, and any number of registered implementations. Layers call the op; which
implementation runs is chosen per call, by the device of its first tensor and the dtype of its first
floating one:

1. the one named by an enclosing :func:`use_impl`; if it cannot run, the call raises with the
  reason;
2. otherwise the first one registered for that device and dtype that can run; if none can, the call
   raises with all the reasons: nothing falls back to the reference silently;
3. otherwise the reference: where nothing is registered for that device and dtype (float64 on most),
   or only what has declared that it cannot run under ``torch.func.vmap``, and the call is.

A fused implementation is first order only: its backward is a kernel, so a second derivative through
it raises and names the reference (:class:`k31fn.autodiff.custom_vjp`, ``opaque=True``). ``python -m
k31fn.kernels`` lists all of them.

Every call is counted in the enclosing :func:`record_impls`, so a test can assert which
implementation ran. (On meta tensors inside :func:`k31fn.kernels.shapes.shapes_only` none runs.)
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from k31fn import _functorch, kernels, tree
from k31fn.autodiff.ambient import carry
from k31fn.autodiff.compiled import refuse_compile
from k31fn.kernels import shapes

__all__ = ["OPS", "Implementation", "Op", "load_all", "record_impls", "use_impl", "watch_calls"]

OPS: dict[str, Op] = {}
# carried: a backward runs on another thread, and a replay there must choose as the forward did
_OVERRIDES: contextvars.ContextVar[Mapping[str, str]] = carry(
    contextvars.ContextVar("k31fn_impl_overrides", default=MappingProxyType({}))
)
_RECORDS: contextvars.ContextVar[tuple[Counter[tuple[str, str]], ...]] = carry(
    contextvars.ContextVar("k31fn_impl_records", default=())
)


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        name: what :func:`use_impl` and the tables call it.
        devices: device types on which it is chosen by default.
        fn: the function, with the reference's signature.
        accepts: ``fn``'s arguments -> ``""`` if it can compute them, else the reason why not.
        dtypes: of the first floating argument; empty: all.
        by_default: those of ``dtypes`` for which it is chosen by default; empty: all of them.
        on_request: device types on which it runs where :func:`use_impl` names it, and only there.
        no_vmap: why it cannot run on arguments batched by ``torch.func.vmap``; empty: it can.
        no_capture: why a graph cannot hold a call of it (:func:`k31fn.jit.jit`); empty: one can.
        missing: ``""`` if what it needs is on this machine, else what is not.
        kernels: the module with its kernels, whose ``builds(device)`` lists them for compilation
            ahead of time; empty: it has none of its own.
        calls: ops that it calls, forward or backward, whose kernels are to be compiled with it.
    """

    name: str
    devices: tuple[str, ...]
    fn: Callable[..., Any]
    accepts: Callable[..., str] = lambda *_, **__: ""
    dtypes: tuple[torch.dtype, ...] = ()
    by_default: tuple[torch.dtype, ...] = ()
    on_request: tuple[str, ...] = ()
    no_vmap: str = ""
    no_capture: str = ""
    missing: Callable[[], str] = lambda: ""
    kernels: str = ""
    calls: tuple[str, ...] = ()

    def refusal(self, call: _Arguments) -> str:
        """Why it cannot run; ``""`` if it can."""
        if call.device not in self.devices + self.on_request:
            places = ", ".join(self.devices + self.on_request) or "no device of this process"
            return f"it runs on {places}, the arguments are on {call.device}"
        if self.dtypes and call.dtype not in self.dtypes:
            return f"it computes {', '.join(map(str, self.dtypes))}, got {call.dtype}"
        if self.no_vmap and call.batched:
            return self.no_vmap
        # accepts last: it looks at shapes, the others at what no shape can mend
        return self.missing() or self.accepts(*call.args, **call.kwargs)

    def registered_for(self, call: _Arguments) -> bool:
        """Whether a call without :func:`use_impl` is for it: then it runs, or says why not."""
        # not whether it can run: what is registered and cannot raises, it does not step aside
        dtypes = self.by_default or self.dtypes
        takes = call.device in self.devices and (not dtypes or call.dtype in dtypes)
        return takes and not (self.no_vmap and call.batched)


class _Arguments:
    """The arguments of a call, and what the choice depends on."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        leaves = tree.leaves((args, kwargs), allow_none=True)
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.device = self.tensors[0].device.type if self.tensors else "cpu"
        floating = [t for t in self.tensors if t.is_floating_point()]
        self.dtype = floating[0].dtype if floating else None

    @property
    def batched(self) -> bool:
        return any(map(_functorch.is_batched, self.tensors))


class Op:
    """A named operator. Calling it runs the implementation chosen as the module says.

    ``differentiable``: whether any of its results has a gradient; if not, implementations have no
    backward.
    """

    def __init__(
        self, name: str, reference: Callable[..., Any], *, differentiable: bool = True
    ) -> None:
        if name in OPS:
            raise ValueError(
                f"Op {name!r} exists already; register an implementation of it instead"
            )
        self.name = name
        self.reference = reference
        self.differentiable = differentiable
        self.implementations: dict[str, Implementation] = {}
        self.__doc__ = reference.__doc__
        OPS[name] = self

    def register(self, implementation: Implementation) -> None:
        """Adds an implementation; earlier ones are preferred."""
        # the reference is no entry: it takes every device and dtype, and has nothing to refuse
        if implementation.name in self.implementations or implementation.name == "reference":
            raise ValueError(
                f"op {self.name!r} has an implementation {implementation.name!r} already"
            )
        self.implementations[implementation.name] = implementation

    def refusal(self, implementation: str, *args: Any, **kwargs: Any) -> str:
        """Why that implementation cannot run with these arguments on request; ``""`` if it can."""
        return self.implementations[implementation].refusal(_Arguments(args, kwargs))

    def chosen(self, *args: Any, **kwargs: Any) -> str:
        """The implementation that a call with these arguments runs: its name, or
        ``"reference"``.
        """
        return self._choose(args, kwargs)[0]

    def why_reference(self, *args: Any, **kwargs: Any) -> str:
        """The reason why a call with these arguments runs the reference; ``""`` if it does not."""
        if self.chosen(*args, **kwargs) != "reference":
            return ""
        if _OVERRIDES.get().get(self.name) == "reference":
            return "it was asked for"
        call = _Arguments(args, kwargs)
        reasons: list[str] = []
        for impl in self.implementations.values():
            if call.device in impl.devices:
                reasons.append(f"{impl.name}: {impl.refusal(call)}")
            elif call.device in impl.on_request:
                reasons.append(f"{impl.name}: on request, --kernels {self.name}:{impl.name}")
        return "; ".join(reasons) or f"nothing else is written for {call.device}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Value of the op, by the implementation chosen as the module says."""
        # refused before the choice: what works with a reference would fail on a device later
        refuse_compile(f"op {self.name!r}")
        if _functorch.forward_mode_active():
            raise RuntimeError(
                f"op {self.name!r} under forward-mode differentiation (jvp, jacfwd, "
                "torch.func.hessian): k31fn's operators are reverse-mode only, so that a layer "
                "behaves alike on every device; use k31fn.autodiff.hvp or hessian (reverse over "
                "reverse), or torch.func.jacrev"
            )
        for watcher in shapes.WATCHERS.get():
            watcher(self, args, kwargs)
        results = shapes.known(self.name, self.reference, args, kwargs)
        if results is not None:
            return results
        name, fn = self._choose(args, kwargs)
        for record in _RECORDS.get():
            record[self.name, name] += 1
        return fn(*args, **kwargs)

    def _choose(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, Callable[..., Any]]:
        wanted = _OVERRIDES.get().get(self.name)
        # first, and without looking at the arguments: most ops of most calls on a CPU end here
        if wanted == "reference" or not self.implementations:
            return "reference", self.reference
        call = _Arguments(args, kwargs)
        if wanted is not None:
            impl = self.implementations[wanted]
            reason = impl.refusal(call)
            if reason:
                raise ValueError(
                    f"op {self.name!r}: implementation {wanted!r} was asked for but cannot run: "
                    f"{reason}"
                )
            return wanted, impl.fn
        reasons: list[str] = []
        for impl in self.implementations.values():
            if impl.registered_for(call):
                reason = impl.refusal(call)
                if not reason:
                    return impl.name, impl.fn
                reasons.append(f"{impl.name}: {reason}")
        # never the reference in silence: a run would be slower by a factor that nobody sees
        if reasons:
            raise ValueError(
                f"op {self.name!r} on {call.device}: no implementation can run "
                f"({'; '.join(reasons)}); "
                f"use_impl({self.name}='reference') runs the reference"
            )
        return "reference", self.reference


def load_all() -> None:
    """Imports every op's package, so that all ops are in ``OPS``."""
    for module in pkgutil.iter_modules(kernels.__path__):
        if module.ispkg:
            importlib.import_module(f"{kernels.__name__}.{module.name}")


@contextlib.contextmanager
def use_impl(**names: str) -> Iterator[None]:
    """Chooses implementations by op name: ``with use_impl(grouped_matmul="reference"): ...``.

    Raises:
        ValueError: an unknown op or implementation; the message lists the known ones.
    """
    if not names.keys() <= OPS.keys():
        load_all()  # an op whose package nobody has imported yet
    for op, name in names.items():
        if op not in OPS:
            raise ValueError(f"use_impl: unknown op {op!r}; known: {', '.join(sorted(OPS))}")
        if name != "reference" and name not in OPS[op].implementations:
            known = ", ".join(["reference", *OPS[op].implementations])
            raise ValueError(f"use_impl: op {op!r} has no implementation {name!r}; known: {known}")
    # over what is chosen outside, op by op: an inner block leaves the other ops as they are
    token = _OVERRIDES.set({**_OVERRIDES.get(), **names})
    try:
        yield
    finally:
        _OVERRIDES.reset(token)


@contextlib.contextmanager
def record_impls() -> Iterator[Counter[tuple[str, str]]]:
    """Counts ``(op, implementation)`` of every call made inside, replays of ``remat`` included."""
    counter: Counter[tuple[str, str]] = Counter()
    # beside those outside: an inner block does not hide its calls from an outer one
    token = _RECORDS.set((*_RECORDS.get(), counter))
    try:
        yield counter
    finally:
        _RECORDS.reset(token)


@contextlib.contextmanager
def watch_calls(watcher: Callable[[Op, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Calls ``watcher(op, args, kwargs)`` before each call of an op inside, replays of ``remat``
    and calls on meta tensors included.

    In :func:`k31fn.kernels.shapes.shapes_only` the operators that a reference calls are seen once
    for each kind of arguments.
    """
    token = shapes.WATCHERS.set((*shapes.WATCHERS.get(), watcher))
    try:
        yield
    finally:
        shapes.WATCHERS.reset(token)
