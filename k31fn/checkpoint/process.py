"""The training process's side of the writer: starting it, shared memory, requests and answers."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn.checkpoint.blocks import Box

__all__ = ["Answer", "Buffer", "Slot", "WriterProcess", "pack"]

# The writer's packages without their __init__ files, which import torch.
_START = """
import os, sys, types
for name, path in zip(("k31fn", "k31fn.checkpoint"), sys.argv[2:]):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from k31fn.checkpoint import writer
# all is on disk; the exit handlers of jax and tensorstore take most of a second
os._exit(writer.main(sys.argv[1]))
"""
_HERE = Path(__file__).parent
# glibc would keep the memory of tensors it has freed, four times the state after some restores;
# mapped blocks go back.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
_ALIGNMENT = 64
_LEFT: list[
    subprocess.Popen[bytes]
] = []  # kept, since one that is forgotten while it runs is warned of


class Slot(NamedTuple):
    """A part of a tensor and its place in the buffer."""

    dtype: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def pack(parts: Mapping[str, tuple[torch.dtype, Box]]) -> dict[str, Slot]:
    """A place in the buffer for each part."""
    slots: dict[str, Slot] = {}
    end = 0
    for name, (dtype, box) in parts.items():
        nbytes = box.numel * dtype.itemsize
        slots[name] = Slot(str(dtype).removeprefix("torch."), box.start, box.shape, end, nbytes)
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return slots


class Buffer:
    """Shared memory that has no name: it is gone with the last process that holds it, killed or
    not.

    Not limited by the size of /dev/shm. Where the system has no such memory it is an unlinked
    temporary file.
    """

    def __init__(self) -> None:
        self.descriptor = _open_memory()
        self._memory: mmap.mmap | None = None
        self._header = 0  # where it begins, after the slots

    def hold(
        self, slots: Mapping[str, Slot], header: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], tuple[int, int]]:
        """The slots as tensors in the memory, which grows if it must, and the place of the header
        written behind them.

        Raises:
            OSError: there is not so much memory.
            ValueError: the header is not JSON data.
        """
        content = {**header, "slots": {name: slot._asdict() for name, slot in slots.items()}}
        text = json.dumps(content, allow_nan=False).encode()
        end = max((s.offset + s.nbytes for s in slots.values()), default=0)
        memory = self._mapped(end + len(text))
        memory[end : end + len(text)] = text
        data = torch.frombuffer(memory, dtype=torch.uint8)
        tensors = {
            name: data[s.offset : s.offset + s.nbytes].view(getattr(torch, s.dtype)).view(s.shape)
            for name, s in slots.items()
        }
        return tensors, (end, len(text))

    def close(self) -> None:
        """Lets go of it. A second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self._memory = -1, None

    def _mapped(self, size: int) -> mmap.mmap:
        """Kept from save to save: the pages of a new mapping would have to be found one by one
        again.
        """
        if self._memory is None or len(self._memory) < size:
            if size > os.fstat(self.descriptor).st_size:
                grow = getattr(
                    os,
                    "posix_fallocate",
                    lambda descriptor, _, length: os.ftruncate(descriptor, length),
                )
                grow(
                    self.descriptor, 0, size
                )  # without its memory, an OSError here; else a SIGBUS at the first write
            self._memory = mmap.mmap(self.descriptor, size)
        return self._memory


class Answer(NamedTuple):
    """What became of a request; ``error`` is empty if it was done."""

    error: str = ""
    damaged: bool = False


class WriterProcess:
    """A running writer, started without waiting for it: requests queue in a pipe until it is
    ready.
    """

    def __init__(self, setup: Mapping[str, Any], inherited: tuple[int, ...]) -> None:
        self._log = os.fdopen(_open_memory(), "rb")  # not a file on disk: that may be what is full
        # A terminal or a cluster sends these to every process of a job, and the last save would be
        # lost. A process inherits the signal mask of the thread that starts it, so the writer never
        # sees them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-W",
                    "ignore",
                    "-c",
                    _START,
                    json.dumps(setup),
                    str(_HERE.parent),
                    str(_HERE),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                bufsize=0,
                pass_fds=(setup["buffer"], *inherited),
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,  # nor does it end with the terminal
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._awaited: deque[bool] = (
            deque()
        )  # for each answer to come: whether someone waits for it
        self._text = b""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def request(self, *, awaited: bool = True, **fields: Any) -> None:
        """Asks for something; requests are done in order.

        Args:
            awaited: whether :meth:`answer` will be called for it.
            fields: of the request.
        """
        assert self._process.stdin is not None
        self._awaited.append(awaited)
        with contextlib.suppress(BrokenPipeError):  # a dead writer: `answer` says how it ended
            self._process.stdin.write(json.dumps(fields).encode() + b"\n")

    def forget(self) -> None:
        """Nobody waits any more for the answers to come."""
        self._awaited = deque([False] * len(self._awaited))

    def answered(self) -> bool:
        """Whether :meth:`answer` would return at once."""
        assert self._process.stdout is not None
        ready = select.poll()
        ready.register(self._process.stdout, select.POLLIN)
        while not self._next():
            if not ready.poll(0):
                return False
            if not self._receive():
                return True
        return True

    def answer(self) -> Answer:
        """Waits for the answer to the oldest request that is awaited, or for the writer's end."""
        while not (line := self._next()):
            if not self._receive():
                self._awaited.clear()
                return Answer(self._death())
        self._text = self._text[len(line) :]
        self._awaited.popleft()
        return Answer(**json.loads(line))

    def running(self) -> bool:
        """Whether it can take another request."""
        return self._process.poll() is None

    def stop(self, *, wait: bool = True) -> None:
        """Lets it end after what it was asked to do.

        Args:
            wait: for its end; else it goes on by itself.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        if wait:
            self._process.wait()
        else:
            _LEFT.append(self._process)
        self._process.stdout.close()
        self._log.close()

    def _next(self) -> bytes:
        """The next awaited answer's line, if it is there; drops those before it."""
        while b"\n" in self._text:
            line = self._text[: self._text.index(b"\n") + 1]
            if self._awaited[0]:
                return line
            self._text = self._text[len(line) :]
            self._awaited.popleft()
        return b""

    def _receive(self) -> bool:
        """Reads on; whether there was something, for which it waits."""
        assert self._process.stdout is not None
        data = self._process.stdout.read(1 << 16)
        self._text += data or b""
        return bool(data)

    def _death(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = [
            line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()
        ]
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with status {code}"
        )
        return f"the writer process {how}" + (
            f"; its last line: {lines[-1][:300]}" if lines else ""
        )


def _open_memory() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("k31fn-checkpoint", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
