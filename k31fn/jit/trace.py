"""One captured call: the tensors that it reads and writes, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from k31fn import tree
from k31fn.jit.recorders import Recorder, Recording
from k31fn.jit.watch import OpStep, Watch

__all__ = ["Trace", "find_successors"]


def find_successors(args: Sequence[Any], donate: Sequence[int], result: Any) -> dict[int, int]:
    """Which leaf of the result takes the place of which donated leaf: numbers among the leaves of
    all results, by those among the leaves of all arguments.

    The successor of a donated argument is the result, or the first item of a tuple that is not
    taken yet, of its structure, shapes and dtypes. An argument without one has no entries.
    """
    is_tuple = isinstance(result, tuple)
    items = list(result) if is_tuple else [result]
    if is_tuple and len(donate) == 1 and _alike(args[donate[0]], result):
        items = [result]  # the state itself is a tuple
    starts = _starts(items)
    starts_of_args = _starts(args)
    taken: set[int] = set()
    successors: dict[int, int] = {}
    for number in donate:
        for i, item in enumerate(items):
            if i not in taken and _alike(args[number], item):
                taken.add(i)
                for k in range(len(tree.leaves(item, allow_none=True))):
                    successors[starts_of_args[number] + k] = starts[i] + k
                break
    return successors


def _starts(trees: Sequence[Any]) -> list[int]:
    starts = [0]
    for x in trees:
        starts.append(starts[-1] + len(tree.leaves(x, allow_none=True)))
    return starts


def _alike(a: Any, b: Any) -> bool:
    a_leaves, a_structure = tree.flatten(a, allow_none=True)
    b_leaves, b_structure = tree.flatten(b, allow_none=True)
    if a_structure != b_structure:
        return False
    return all(map(_same_kind, a_leaves, b_leaves))


def _same_kind(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


class Trace:
    """A call of ``f`` with arguments of one kind, recorded.

    Attributes:
        recording: of it; None while it could not be made.
        reasons: why it could not be made.
        num_replays: how many times it was launched.
        seconds: that it took to capture.
    """

    def __init__(
        self, f: Callable[..., Any], values: list[Any], structure: Any, successors: dict[int, int]
    ) -> None:
        self.recording: Recording | None = None
        self.reasons: list[str] = []
        self.num_replays = 0
        self.seconds = 0.0
        self._f = f
        self._structure = structure
        self._successors = successors
        self._buffers = _make_buffers(values, successors)
        self._outputs: list[Any] = []
        self._result_structure: Any = None
        self._outside: list[Tensor] = []

    def capture(self, recorder: Recorder, kind: str, before: list[OpStep]) -> None:
        """Records ``f`` on the buffers; nothing is computed, and no argument changes.

        Raises:
            Exception: what ``f`` or the device raises; the arguments are as they were.
        """
        inputs = [x for x in self._buffers if isinstance(x, Tensor)]
        watch = Watch(kind, inputs, before)

        def run() -> None:
            with watch:
                args, kwargs = tree.unflatten(self._structure, self._buffers)
                result = self._f(*args, **kwargs)
            self._outputs, self._result_structure = tree.flatten(result, allow_none=True)
            del result
            self._write_back()

        recording = recorder.record(run, inputs)
        watch.finish()
        self.reasons = list(watch.reasons)
        if not self.reasons:
            self.recording = recording
            self._outside = list(watch.outside.values())

    def _write_back(self) -> None:
        """Recorded too: what was made for a donated leaf goes to the address of that leaf."""
        storages = self._donated_storages()
        moves: list[tuple[int, int, Tensor]] = []
        for i, k in self._successors.items():
            buffer, output = self._buffers[i], self._outputs[k]
            if not isinstance(output, Tensor) or _is_same(buffer, output):
                continue
            # part of another donated leaf: it may be written before it is read
            moves.append((i, k, output.clone() if _address(output) in storages else output))
        kept = set(self._successors.values())
        for k, output in enumerate(self._outputs):
            # an old value among the results is read before a new one takes its place
            if k not in kept and isinstance(output, Tensor) and _address(output) in storages:
                self._outputs[k] = output.clone()
        for i, _, output in moves:
            self._buffers[i].copy_(output)
        for i, k in self._successors.items():
            self._outputs[k] = self._buffers[i]

    def _donated_storages(self) -> set[int]:
        buffers = [self._buffers[i] for i in self._successors]
        return {_address(x) for x in buffers if isinstance(x, Tensor)}

    def __call__(self, values: list[Any]) -> Any:
        """The result for these leaves of the arguments."""
        assert self.recording is not None
        self._fill(values)
        self.recording.replay()
        self.num_replays += 1
        kept = set(self._successors.values())
        results: list[Any] = []
        for k, output in enumerate(self._outputs):
            # a copy: the next call writes here
            is_new = isinstance(output, Tensor) and k not in kept
            results.append(output.detach().clone() if is_new else output)
        return tree.unflatten(self._result_structure, results)

    def _fill(self, values: list[Any]) -> None:
        storages: set[int] = set()
        moves: list[tuple[Tensor, Tensor]] = []
        for buffer, value in zip(self._buffers, values, strict=True):
            if buffer is value or not isinstance(buffer, Tensor) or _is_same(buffer, value):
                continue
            if not storages:
                storages = self._donated_storages()
            # part of a donated leaf, as in a state whose leaves changed places
            moves.append((buffer, value.clone() if _address(value) in storages else value))
        with torch.no_grad():
            for buffer, value in moves:
                buffer.copy_(value)


def _make_buffers(values: list[Any], successors: dict[int, int]) -> list[Any]:
    """Donated leaves themselves; of others copies, which later calls write into."""
    buffers: list[Any] = []
    taken: set[int] = set()
    for i, x in enumerate(values):
        if not isinstance(x, Tensor):
            buffers.append(x)
            continue
        # not twice the same memory, and no element that stands for several
        is_whole = x.data_ptr() not in taken and 0 not in x.stride()
        if i in successors and is_whole:
            taken.add(x.data_ptr())
            buffers.append(x)
        else:
            buffers.append(x.detach().clone())
    return buffers


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
