"""Operators and their implementations.

An :class:`Op` is a function of tensors with one reference, written in plain torch and differentiable to any order, and
any number of registered implementations. Layers call the op; which implementation runs is chosen per call:

1. the one named by an enclosing :func:`use_impl`; if it cannot run, it raises with the reason;
2. otherwise the first registered implementation for the device that accepts the arguments;
3. otherwise the reference.

Every call is counted in the enclosing :func:`record_impls`, so a test can assert which implementation ran.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from k31fn import _functorch, tree

__all__ = ["OPS", "Implementation", "Op", "record_impls", "use_impl"]

OPS: dict[str, Op] = {}
_OVERRIDES: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar(
    "k31fn_impl_overrides", default=MappingProxyType({})
)
_RECORDS: contextvars.ContextVar[tuple[Counter[tuple[str, str]], ...]] = contextvars.ContextVar(
    "k31fn_impl_records", default=()
)


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        name: what :func:`use_impl` and the tables call it.
        devices: device types it runs on.
        fn: the function, with the reference's signature.
        accepts: ``fn``'s arguments -> ``""`` if it can compute them, else the reason why not.
    """

    name: str
    devices: tuple[str, ...]
    fn: Callable[..., Any]
    accepts: Callable[..., str]


class Op:
    """A named operator. Calling it runs the implementation chosen as the module says."""

    def __init__(self, name: str, reference: Callable[..., Any]) -> None:
        if name in OPS:
            raise ValueError(f"Op {name!r} exists already; register an implementation of it instead")
        self.name = name
        self.reference = reference
        self.implementations: dict[str, Implementation] = {}
        self.__doc__ = reference.__doc__
        OPS[name] = self

    def register(self, implementation: Implementation) -> None:
        """Adds an implementation; earlier ones are preferred."""
        if implementation.name in self.implementations or implementation.name == "reference":
            raise ValueError(f"op {self.name!r} has an implementation {implementation.name!r} already")
        self.implementations[implementation.name] = implementation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The op's value, by the implementation chosen as the module says."""
        if _functorch.forward_mode_active():
            raise RuntimeError(
                f"op {self.name!r} under forward-mode differentiation (jvp, jacfwd, torch.func.hessian): k31fn's "
                "operators are reverse-mode only, so that a layer behaves alike on every device; use torch.func.jacrev "
                "or k31fn.autodiff.hessian (reverse over reverse)"
            )
        name, fn = self._choose(args, kwargs)
        for record in _RECORDS.get():
            record[self.name, name] += 1
        return fn(*args, **kwargs)

    def _choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Callable[..., Any]]:
        tensors = (a for a in tree.leaves((args, kwargs), allow_none=True) if isinstance(a, torch.Tensor))
        device = next((t.device.type for t in tensors), "cpu")
        wanted = _OVERRIDES.get().get(self.name)
        if wanted == "reference":
            return wanted, self.reference
        if wanted is not None:
            impl = self.implementations[wanted]
            if reason := _refusal(impl, device, args, kwargs):
                raise ValueError(f"op {self.name!r}: implementation {wanted!r} was asked for but cannot run: {reason}")
            return wanted, impl.fn
        for impl in self.implementations.values():
            if not _refusal(impl, device, args, kwargs):
                return impl.name, impl.fn
        return "reference", self.reference


def _refusal(impl: Implementation, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if device not in impl.devices:
        return f"it runs on {', '.join(impl.devices)}, the arguments are on {device}"
    return impl.accepts(*args, **kwargs)


@contextlib.contextmanager
def use_impl(**names: str) -> Iterator[None]:
    """Chooses implementations by op name: ``with use_impl(grouped_matmul="reference"): ...``.

    Raises:
        ValueError: an unknown op or implementation; the message lists the known ones.
    """
    for op, name in names.items():
        if op not in OPS:
            raise ValueError(f"use_impl: unknown op {op!r}; known: {', '.join(sorted(OPS))}")
        if name != "reference" and name not in OPS[op].implementations:
            known = ", ".join(["reference", *OPS[op].implementations])
            raise ValueError(f"use_impl: op {op!r} has no implementation {name!r}; known: {known}")
    token = _OVERRIDES.set({**_OVERRIDES.get(), **names})
    try:
        yield
    finally:
        _OVERRIDES.reset(token)


@contextlib.contextmanager
def record_impls() -> Iterator[Counter[tuple[str, str]]]:
    """Counts ``(op, implementation)`` of every call made inside, replays of ``remat`` included."""
    counter: Counter[tuple[str, str]] = Counter()
    token = _RECORDS.set((*_RECORDS.get(), counter))
    try:
        yield counter
    finally:
        _RECORDS.reset(token)
