"""A recorder for the CPU, so that a test sees whether a function can be captured, without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # torch 2.11, 2.13

from k31fn.jit.recorders import STAND_IN
from k31fn.jit.watch import MethodWatch, Watch

__all__ = ["captures_on_cpu"]


@contextlib.contextmanager
def captures_on_cpu() -> Iterator[None]:
    """Inside, :func:`k31fn.jit.jit` captures calls on the CPU as it does on a GPU.

    Their operators are written down, with the tensors that they were given, and run again in that
    order. So a number that the host read, or computed, is a constant, and a tensor from outside is
    read at its address. What a GPU refuses is refused here. A kernel that is no operator of torch's
    is not seen: use the reference.

        with captures_on_cpu():
            step = jit(step, donate=(0,), strict=True)
    """
    token = STAND_IN.set(_TapeRecorder())
    try:
        yield
    finally:
        STAND_IN.reset(token)


class _Tape(TorchDispatchMode):
    """Writes down what runs inside: each operator, its arguments, and what it made."""

    def __init__(self) -> None:
        super().__init__()
        # Held, all of them: as in a graph, every tensor has memory of its own, always the same.
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, _flat(result)))
        return result


class _TapeRecording:
    def __init__(self, tape: _Tape) -> None:
        self._tape = tape
        self.nbytes = 0
        for _, _, _, made in tape.calls:
            self.nbytes += sum(x.nbytes for x in made)

    def replay(self) -> None:
        """Runs it again; what an operator makes goes to where it went when it was recorded."""
        with torch.no_grad():
            for func, args, kwargs, made in self._tape.calls:
                for x, old in zip(_flat(func(*args, **kwargs)), made, strict=True):
                    # a view, or what was written into in place, is there already
                    if x.untyped_storage().data_ptr() != old.untyped_storage().data_ptr():
                        old.copy_(x)


class _TapeRecorder:
    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        with MethodWatch(watch):
            yield

    def record(self, run: Callable[[], None], inputs: Sequence[Tensor]) -> _TapeRecording:
        before = [x.clone() for x in inputs]
        tape = _Tape()
        try:
            with tape:
                run()
        finally:
            # unlike a device's, this recording computes: the inputs get their values back
            with torch.no_grad():
                for x, old in zip(inputs, before, strict=True):
                    x.copy_(old)
        return _TapeRecording(tape)


def _flat(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    parts: list[Tensor] = []
    if isinstance(x, (tuple, list)):
        for part in x:
            parts += _flat(part)
    return parts
