"""Kernels compiled before they are launched, in parallel processes, into a cache that later
processes load.

Three steps. :func:`launches` runs operators on arguments of the right shapes while Triton is told
to note what it would compile and not to compile it: names, types, constants, alignment and options
of each launch, exactly as the launch itself would ask for them. :class:`Compilers` gives these to
processes that compile them without a device. Then each process loads what it needs
(:func:`k31fn.kernels.warmup.triton.load`).

The cache is Triton's own, whose key has the target, Triton's version and the kernel's source with
all that it calls, in a folder for the device and the versions of torch and Triton. Triton writes
each file under another name and renames it, but believes what it finds. So beside the files of a
kernel stand their SHA-256, written last: an entry without them, or with others, is compiled again,
and one process at a time works on an entry.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import tree
from k31fn.autodiff.transforms import vjp
from k31fn.kernels.launch import INTERPRETED
from k31fn.kernels.registry import Op
from k31fn.kernels.warmup.pool import Compilers, WarmUpError

__all__ = ["Compilers", "Launch", "OpCall", "OpCalls", "WarmUpError", "launches"]


class Launch(NamedTuple):
    """A kernel as a launch asks for it; JSON data.

    Attributes:
        module: of the kernel.
        function: its name there.
        target: backend, architecture and warp size.
        data: what Triton's ``JITFunction.preload`` takes.
    """

    module: str
    function: str
    target: tuple[str, int | str, int]
    data: str


class _Like(NamedTuple):
    """A tensor without its values. ``offset``: bytes past a multiple of 16, which a kernel is
    compiled for.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> _Like:
        return cls(tuple(x.shape), x.stride(), int(x.storage_offset()) * x.itemsize % 16, x.dtype)

    def zeros(self, device: torch.device) -> Tensor:
        first = self.offset // self.dtype.itemsize
        size = 0  # elements that the view reaches over
        if 0 not in self.shape:
            size = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        # a fresh allocation is aligned, so the view begins as far past 16 bytes as the tensor did
        storage = torch.zeros(first + size, dtype=self.dtype, device=device)
        return storage.as_strided(self.shape, self.stride, first)


class OpCall(NamedTuple):
    """A call of an operator without its values."""

    op: Op
    structure: Any
    leaves: tuple[Any, ...]


class OpCalls:
    """Collects different calls: an instance is what :func:`~k31fn.kernels.registry.watch_calls`
    takes.
    """

    def __init__(self) -> None:
        self._calls: dict[Any, OpCall] = {}

    def __call__(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes a call."""
        leaves, structure = tree.flatten((args, kwargs), allow_none=True)
        likes = tuple(_Like.of(x) if isinstance(x, Tensor) else x for x in leaves)
        # by what a kernel is compiled for; a run has thousands of calls, of a few dozen kinds
        self._calls.setdefault((op.name, structure, likes), OpCall(op, structure, likes))

    def __iter__(self) -> Iterator[OpCall]:
        return iter(self._calls.values())


def launches(calls: Sequence[OpCall] | OpCalls, device: torch.device) -> list[Launch]:
    """The kernels that these calls and their backwards would compile, by the implementations in
    force; compiles none.

    Args:
        calls: of operators.
        device: where they run. Their arguments are made there, zeros, one call after the other.
    """
    if INTERPRETED:
        return []  # the interpreter compiles nothing
    wanted: dict[Launch, None] = {}  # in the order of the calls, each once
    for call in calls:
        values = [x.zeros(device) if isinstance(x, _Like) else x for x in call.leaves]
        args, kwargs = tree.unflatten(call.structure, values)
        implementation = call.op.implementations.get(call.op.chosen(*args, **kwargs))
        if implementation is not None and (implementation.kernels or implementation.calls):
            # imported only now: it imports triton, which need not be there
            record = importlib.import_module("k31fn.kernels.warmup.triton").record
            wanted |= dict.fromkeys(record(functools.partial(_forward_and_backward, call, values)))
    return list(wanted)


def _forward_and_backward(call: OpCall, values: list[Any]) -> None:
    index = [i for i, x in enumerate(values) if isinstance(x, Tensor) and x.is_floating_point()]
    leaves = [values[i] for i in index]

    def run(*leaves: Tensor) -> Any:
        replaced = list(values)
        for i, leaf in zip(index, leaves, strict=True):
            replaced[i] = leaf
        args, kwargs = tree.unflatten(call.structure, replaced)
        return call.op(*args, **kwargs)

    with torch.no_grad():  # as remat and evaluation run it; a kernel may store less then
        run(*leaves)
    if not call.op.differentiable:
        return
    out, pull = vjp(run, *leaves)
    pull(tree.map(torch.zeros_like, out))
