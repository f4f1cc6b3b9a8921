"""The training process's side of a writer: starting it, requests and answers."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from k31fn.checkpoint.shared_buffer import open_memory

__all__ = ["WriterAnswer", "WriterProcess"]

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
_END_S = 10.0  # for the end of a writer with nothing left to do
# Writers that were left to end by themselves: Popen warns of one that is freed while it runs.
_LEFT: list[subprocess.Popen[bytes]] = []


class WriterAnswer(NamedTuple):
    """What became of a request.

    Attributes:
        error: empty if it was done.
        damaged: whether what was read is not what was written.
        committed: of a commit that failed, whether the step is complete all the same.
        seconds: that it took.
    """

    error: str = ""
    damaged: bool = False
    committed: bool = False
    seconds: float = 0.0


class WriterProcess:
    """A running writer, started without waiting for it: requests queue in a pipe until it is
    ready.
    """

    def __init__(self, setup: Mapping[str, Any], inherited: tuple[int, ...]) -> None:
        # Not a file on disk: a full disk may be what the log has to tell.
        self._log = os.fdopen(open_memory(), "rb")
        # A terminal or a cluster sends these to every process of a job, and the last save would be
        # lost. A process inherits the signal mask of the thread that starts it, so the writer never
        # sees them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            # -P: a file of the user's folder must not stand in for a module of the writer's.
            python = [sys.executable, "-P", "-W", "ignore", "-c", _START]
            self._process = subprocess.Popen(
                [*python, json.dumps(setup), str(_HERE.parent), str(_HERE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                bufsize=0,  # `answered` polls the descriptor, which knows no bytes in a buffer
                pass_fds=(setup["buffer"], *inherited),
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,  # nor does it end with the terminal
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._awaited: deque[bool] = deque()  # for each answer to come: is it waited for
        self._text = b""  # received, not yet taken as answers

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def request(self, *, awaited: bool = True, **fields: Any) -> None:
        """Sends a request; requests are done in order.

        Args:
            awaited: whether :meth:`answer` will be called for it.
            fields: of the request.
        """
        assert self._process.stdin is not None
        self._awaited.append(awaited)
        with contextlib.suppress(BrokenPipeError):  # a dead writer: `answer` says how it ended
            self._process.stdin.write(json.dumps(fields).encode() + b"\n")

    def forget(self) -> None:
        """Gives up the answers to come: each is dropped when it arrives."""
        self._awaited = deque([False] * len(self._awaited))

    def answered(self) -> bool:
        """Whether :meth:`answer` would return at once."""
        assert self._process.stdout is not None
        ready = select.poll()
        ready.register(self._process.stdout, select.POLLIN)
        while not self._next_line():
            if not ready.poll(0):
                return False
            if not self._receive():
                return True
        return True

    def answer(self) -> WriterAnswer:
        """Waits for the answer to the oldest request that is awaited, or for the writer's end."""
        line = self._next_line()
        while not line:
            if not self._receive():
                self._awaited.clear()
                return WriterAnswer(self._last_words())
            line = self._next_line()
        self._text = self._text[len(line) :]
        self._awaited.popleft()
        return WriterAnswer(**json.loads(line))

    def running(self) -> bool:
        """Whether it can take another request."""
        return self._process.poll() is None

    def stop(self, *, wait: bool = True) -> None:
        """Lets it end after what it was asked to do.

        Args:
            wait: for its end, which is near; else, or if it does not come, it goes on by itself.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            # Of one that is frozen, all has been answered: nothing is lost with it.
            self._process.wait(_END_S if wait else 0.0)
        except subprocess.TimeoutExpired:
            _LEFT.append(self._process)
        self._process.stdout.close()
        self._log.close()

    def _next_line(self) -> bytes:
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

    def _last_words(self) -> str:
        """How the process ended, with the last line of its log."""
        code = self._process.wait()
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")
        lines = [line for line in log.splitlines() if line.strip()]
        if code < 0:
            text = f"the writer process was killed by {signal.Signals(-code).name}"
        else:
            text = f"the writer process ended with status {code}"
        return f"{text}; its last line: {lines[-1][:300]}" if lines else text
