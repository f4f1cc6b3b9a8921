"""What a function does that no graph can hold: seen operator by operator, with the place.

The one file of this package that uses ``torch.utils._python_dispatch``; tested with torch 2.11 and
2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jaxtyping
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OpStep", "Watch", "place_of"]

# frames in which nobody looks for a place: jaxtyping's stand between in tests
_SKIPPED = (
    *(str(Path(str(m)).parent) for m in (torch.__file__, jaxtyping.__file__, __file__)),
    "<",
)
_ROOT = str(Path(__file__).parents[2])

# The host needs a number of the device to go on: the number itself, or the shape of a result.
_READS = {
    "_local_scalar_dense": "reads a number on the host",
    "equal": "compares on the host",
    "is_nonzero": "reads a number on the host",
    "nonzero": "has a result whose shape depends on values",
    "masked_select": "has a result whose shape depends on values",
    "_unique2": "has a result whose shape depends on values",
    "unique_dim": "has a result whose shape depends on values",
    "unique_consecutive": "has a result whose shape depends on values",
    "bincount": "has a result whose shape depends on values",
}
_MADE = "makes a tensor of Python values; make it on the device (torch.full, torch.arange) or once"
# The lists of Tensor's methods that read on the host and, on the CPU, dispatch no operator.
_METHODS = ("tolist", "numpy")


class OpStep(NamedTuple):
    """An operator that ran, with what it was told that is no tensor of the device, and where."""

    op: str
    constants: tuple[Any, ...]
    place: str


class Watch(TorchDispatchMode):
    """Runs what is called inside, and notes in ``reasons`` what keeps it from being captured.

    Without ``before`` it looks for what makes the host wait or comes from the host. With it, the
    steps of a call that was watched so, it looks only for what differs: that is no constant.
    Backward passes need no care: autograd takes the mode along to its own threads.

    Args:
        kind: of the device that would capture.
        inputs: the tensors that are handed to the function.
        before: the steps of an earlier call.
    """

    def __init__(self, kind: str, inputs: list[Tensor], before: list[OpStep] | None = None) -> None:
        super().__init__()
        self.reasons: dict[str, None] = {}  # in order, each once
        self.steps: list[OpStep] = []
        self.device_tells = False  # of waits, through note_wait
        # What was neither handed in nor made inside. A graph reads it at its address, so whoever
        # holds the graph holds it too.
        self.outside: dict[int, Tensor] = {}
        self._kind = kind
        self._before = before
        self._compares = before is not None
        self._known = {_storage(x) for x in inputs}
        self._is_filled = False  # a number is written into a slice, which makes a tensor of it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given: list[Tensor] = []
        constants: list[Any] = []
        _take_apart((args, kwargs), given, constants)
        name = func.overloadpacket.__name__
        on_device = any(x.device.type == self._kind for x in given)
        if name != "lift_fresh":  # its argument is what Python has just made
            for x in given:
                if _storage(x) not in self._known and x.device.type == self._kind:
                    self.outside[_storage(x)] = x
                if on_device and x.device.type != self._kind and not x.ndim:
                    # a number of the host goes into the graph as a constant
                    constants.append(_comparable(x.item()))
        place = _find_place(sys._getframe(1))
        step = OpStep(str(func), tuple(constants), place)
        # autograd detaches where somebody holds a tensor too, which is no work of the function
        if name != "detach":
            self._compare(step)
            self.steps.append(step)
        result = func(*args, **kwargs)
        made: list[Tensor] = []
        _take_apart(result, made, [])
        self._known.update(map(_storage, made))
        reason = "" if self._compares else self._reason(name, args, given, made)
        if reason:
            self.note(f"{place}: {step.op} {reason}")
        return result

    def note(self, reason: str) -> None:
        """Adds a reason."""
        self.reasons[reason] = None

    def note_wait(self) -> None:
        """The device says that the operator that ran last made the host wait for it."""
        last = self.steps[-1] if self.steps else OpStep("what comes first", (), "")
        if not any(reason.startswith(f"{last.place}: {last.op} ") for reason in self.reasons):
            made = last.op.startswith("aten.lift_fresh")
            self.note(f"{last.place}: {last.op} {_MADE if made else 'makes the host wait'}")

    def finish(self) -> None:
        """Looks at what can be told only when the call is over."""
        if self._before is not None and len(self.steps) < len(self._before):
            self._differ(self._before[len(self.steps)])

    def _compare(self, step: OpStep) -> None:
        if self._before is None:
            return
        number = len(self.steps)
        if number >= len(self._before):
            self._differ(step)
        elif self._before[number][:2] != step[:2]:
            self._differ(step, self._before[number])

    def _differ(self, step: OpStep, before: OpStep | None = None) -> None:
        self._before = None  # the first difference says it; what follows is out of step
        if before is None or before.op != step.op:
            self.note(f"{step.place}: {step.op} runs in one call and not in another")
            return
        for old, new in zip(before.constants, step.constants, strict=False):
            if old != new:
                self.note(
                    f"{step.place}: {step.op} is given {old} in one call and {new} in another; "
                    "what changes must be a tensor on the device"
                )
                return
        self.note(f"{step.place}: {step.op} is given other arguments in another call")

    def _reason(self, name: str, args: Any, given: list[Tensor], made: list[Tensor]) -> str:
        """Why the operator cannot be captured; empty: it can."""
        is_here = [x.device.type == self._kind for x in given]
        if name in _READS and any(is_here):
            return _READS[name]
        if name in ("index", "index_put_", "_index_put_impl_") and _has_mask(args[1]):
            return "takes a mask for an index, so its result's shape depends on values"
        if name == "repeat_interleave" and len(given) == 1 and any(is_here):
            return "has a result whose shape depends on values; give output_size="
        if name == "lift_fresh":
            # a device tells of the copy, and a number written into a slice of a GPU needs none
            is_copied = given[0].device.type == self._kind and not self._is_filled
            return _MADE if is_copied and not self.device_tells else ""
        if name == "copy_" and self._is_filled:
            # torch fills several elements, but copies to a single one
            return "copies from the host; x[i].fill_(number) does not"
        if name in ("_to_copy", "copy_") and made:
            source = given[-1].device.type
            if source != self._kind == made[0].device.type:
                return "copies from the host; make the tensor on the device, or once"
            if source == self._kind != made[0].device.type:
                return "copies to the host"
        return ""


class MethodWatch(torch.overrides.TorchFunctionMode):
    """On the CPU, what dispatches no operator: lists made of tensors, and numbers written into
    slices.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _METHODS:
            place = _find_place(sys._getframe(1))
            self._watch.note(f"{place}: Tensor.{name} reads values on the host")
        # x[i] = 2.0 makes a tensor of the number: a fill on a device, and no copy
        before = self._watch._is_filled
        self._watch._is_filled = name == "__setitem__" and not isinstance(args[2], Tensor)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._watch._is_filled = before


def place_of(error: BaseException) -> str:
    """Where it was raised: the innermost file that is not torch's; empty if there is none."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(_SKIPPED):
            place = f"{_short(file)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _find_place(frame: FrameType | None) -> str:
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_SKIPPED):
            return f"{_short(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return "the backward"  # a node of autograd's own, on a thread without Python


def _short(file: str) -> str:
    return file.removeprefix(_ROOT + "/")


def _storage(x: Tensor) -> int:
    # the address of torch's own object: every Python wrapper of a storage is another object
    return x.untyped_storage()._cdata if x.layout == torch.strided else id(x)


def _take_apart(x: Any, tensors: list[Tensor], constants: list[Any]) -> None:
    """The tensors of an operator's arguments or results, and everything else in a form to compare.

    By hand: a general tree costs more than the operator.
    """
    if isinstance(x, Tensor):
        tensors.append(x)
    elif isinstance(x, (tuple, list)):
        constants.append(len(x))
        for part in x:
            _take_apart(part, tensors, constants)
    elif isinstance(x, dict):
        for key, part in x.items():
            constants.append(key)
            _take_apart(part, tensors, constants)
    else:
        constants.append(_comparable(x))


def _comparable(x: Any) -> Any:
    # NaN differs from itself, and -0.0 does not differ from 0.0
    return repr(x) if isinstance(x, float) else x


def _has_mask(indices: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
