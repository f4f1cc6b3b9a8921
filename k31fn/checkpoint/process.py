"""The training process's side of the writer: starting it, shared memory, requests and answers."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn.checkpoint import writer

__all__ = ["Answer", "Slot", "WriterProcess", "map_tensors", "open_buffer", "pack"]

# glibc would keep the memory of tensors it has freed, four times the state after some restores; mapped blocks go back.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def open_buffer() -> int:
    """A descriptor of shared memory that has no name: it is gone with the last process that holds it, killed or not.

    Not limited by the size of /dev/shm. Where the system has no such memory it is an unlinked temporary file.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("k31fn-checkpoint", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Slot(NamedTuple):
    """A tensor in the buffer."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def pack(tensors: Mapping[str, Tensor]) -> dict[str, Slot]:
    """A place in the buffer for each tensor."""
    slots: dict[str, Slot] = {}
    end = 0
    for name, x in tensors.items():
        nbytes = x.numel() * x.element_size()
        slots[name] = Slot(str(x.dtype).removeprefix("torch."), tuple(x.shape), end, nbytes)
        end = writer.data_start(end + nbytes)
    return slots


def map_tensors(buffer: int, slots: Mapping[str, Slot], header: bytes) -> dict[str, Tensor]:
    """Writes the header and returns the slots as tensors in the buffer, which grows if it must.

    Raises:
        OSError: there is not so much memory.
    """
    start = writer.data_start(len(header))
    size = start + max(s.offset + s.nbytes for s in slots.values())
    if size > os.fstat(buffer).st_size:
        grow = getattr(os, "posix_fallocate", lambda descriptor, _, length: os.ftruncate(descriptor, length))
        grow(buffer, 0, size)  # without its memory, an OSError here; with ftruncate, a SIGBUS at the first write
    memory = mmap.mmap(buffer, size)
    memory[: len(header)] = header
    data = torch.frombuffer(memory, dtype=torch.uint8)[start:]
    return {
        name: data[s.offset : s.offset + s.nbytes].view(getattr(torch, s.dtype)).view(s.shape)
        for name, s in slots.items()
    }


class Answer(NamedTuple):
    """What became of a request; ``error`` is empty if it was done."""

    error: str = ""
    damaged: bool = False


class WriterProcess:
    """A running writer, started without waiting for it: requests queue in a pipe until it is ready."""

    def __init__(self, directory: Path, buffer: int, *, keep: int, inherited: tuple[int, ...]) -> None:
        options = json.dumps({"directory": str(directory.resolve()), "buffer": buffer, "keep": keep})
        self._log = os.fdopen(open_buffer(), "rb")  # not a file on disk: that may be what is full
        # A terminal or a cluster sends these to every process of a job, and the last save would be lost. A process
        # inherits the signal mask of the thread that starts it, so the writer never sees them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", writer.__file__, options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                bufsize=0,
                pass_fds=(buffer, *inherited),
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,  # nor does it end with the terminal
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def request(self, **fields: Any) -> None:
        """Asks for something, one at a time: :meth:`answer` is called before the next request."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead writer: `answer` says how it ended
            self._process.stdin.write(json.dumps(fields).encode() + b"\n")

    def answer(self) -> Answer:
        """Waits for the answer to the request, or for the writer's end."""
        assert self._process.stdout is not None
        line = self._process.stdout.read(writer.ANSWER_BYTES)
        return Answer(**json.loads(line)) if line else Answer(self._death())

    def running(self) -> bool:
        """Whether it can take another request."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Lets it finish what it was asked, and waits for its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _death(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"the writer process {how}" + (f"; its last line: {lines[-1][:300]}" if lines else "")
