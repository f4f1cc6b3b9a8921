"""Operators that run by their references, and why: what a run on a GPU or NPU says at first."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from k31fn import tree
from k31fn.kernels.registry import Op

__all__ = ["ReferenceCalls"]


class ReferenceCalls:
    """Collects calls that run by references: an instance is what
    :func:`~k31fn.kernels.registry.watch_calls` takes.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._firsts: dict[str, str] = {}

    def __call__(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes a call, if the reference will run."""
        reason = op.why_reference(*args, **kwargs)
        if not reason:
            return
        self._counts[op.name] = self._counts.get(op.name, 0) + 1
        if op.name not in self._firsts:
            leaves = tree.leaves((args, kwargs), allow_none=True)
            first = next((x for x in leaves if isinstance(x, Tensor)), None)
            of = "" if first is None else f", the first of {list(first.shape)}"
            self._firsts[op.name] = f"{of}: {reason}"

    def lines(self) -> list[str]:
        """A line for each operator."""
        lines = []
        for name, count in self._counts.items():
            calls = "1 call" if count == 1 else f"{count} calls"
            lines.append(f"{name} runs by its reference, {calls}{self._firsts[name]}")
        return lines
