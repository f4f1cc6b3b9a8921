"""A trace of some steps: ``--profile 10:12`` records steps 10 and 11, as Python's slices do.

Each rank writes ``RUN/trace/steps-10-11.rank0.json``, in the format of chrome://tracing and
https://ui.perfetto.dev, with the scopes of :mod:`k31fn.scopes`; the first rank prints what the
scopes took. Recording costs time: the steps recorded are slower than others. On an NPU only what
its host does is in the trace.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from k31fn import device as devices
from k31fn import scopes

__all__ = ["Profile", "parse_steps"]

_ROWS = 16  # of the table: the scopes that took most


def parse_steps(text: str) -> range:
    """The steps that ``A:B`` means: A to B - 1. Of an empty text none.

    Raises:
        ValueError: it is not two numbers of which the first is smaller.
    """
    if not text:
        return range(0)
    match = re.fullmatch(r"(\d+):(\d+)", text)
    steps = range(int(match[1]), int(match[2])) if match else range(0)
    if not steps:
        raise ValueError(f"profile={text!r} must be FIRST:END, such as 10:12 for steps 10 and 11")
    return steps


class Profile:
    """Records ``steps`` of a run; without any it does nothing.

    Args:
        steps: which.
        folder: of the run.
        rank: of this process.
        device: of this rank.
        note: takes lines of text.
    """

    def __init__(
        self,
        steps: range,
        folder: Path,
        rank: int,
        device: torch.device,
        note: Callable[[str], object],
    ) -> None:
        self._steps, self._device, self._note = steps, device, note
        self._folder, self._rank = folder / "trace", rank
        self._done: list[int] = []
        self._open: tuple[contextlib.ExitStack, Any, set[str]] | None = None

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around everything that is done for a step."""
        if number not in self._steps:
            yield
            return
        if self._open is None:
            self._begin()
        with scopes.scope(f"step {number}"):
            yield
        self._done.append(number)

    def after(self, number: int) -> None:
        """Writes the trace if that was the last of the steps.

        Raises:
            OSError: it cannot be written.
        """
        if number in self._steps and number == self._steps[-1]:
            self.close()

    def _begin(self) -> None:
        stack = contextlib.ExitStack()
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # what was queued by earlier steps would be in the trace
        devices.synchronize(self._device)
        # acc_events: without it torch warns that it drops the events of earlier cycles
        profiler = stack.enter_context(
            torch.profiler.profile(activities=activities, acc_events=True)
        )
        self._open = stack, profiler, stack.enter_context(scopes.recording())

    def close(self) -> None:
        """Writes what was recorded, if the run ends before the last of its steps; a second call
        does nothing.

        Raises:
            OSError: it cannot be written.
        """
        if self._open is None:
            return
        stack, profiler, names = self._open
        self._open = None  # before anything can fail: a second call must not end it again
        devices.synchronize(self._device)
        stack.close()
        if not self._done:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"steps-{self._done[0]}-{self._done[-1]}.rank{self._rank}.json"
        # written aside and moved: nobody opens half a trace
        temporary = file.with_name(f".{file.name}.partial.json")
        try:
            profiler.export_chrome_trace(str(temporary))
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
        for line in _table(profiler.key_averages(), names):
            self._note(line)
        self._note(f"trace: {file}")


def _table(averages: Any, names: set[str]) -> list[str]:
    """The scopes that took most, as lines: calls, and milliseconds on the host and on the device in
    all of them.
    """
    rows = []
    for x in averages:
        if x.key in names:  # else it is an operation, of which there are thousands
            rows.append((x.key, x.count, x.cpu_time_total / 1e3, x.device_time_total / 1e3))
    rows.sort(key=lambda row: -max(row[2:]))
    lines = [f"{'scope':<32}{'calls':>8}{'host ms':>12}{'device ms':>12}"]
    for name, calls, host_ms, device_ms in rows[:_ROWS]:
        lines.append(f"{name:<32}{calls:>8}{host_ms:>12.1f}{device_ms:>12.1f}")
    return lines
