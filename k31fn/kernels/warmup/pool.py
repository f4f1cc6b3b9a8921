"""Processes that compile kernels, one kernel at a time each."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Compilers", "WarmUpError"]

_TRIES = 2


class WarmUpError(RuntimeError):
    """A kernel could not be compiled ahead of time."""


class Compilers:
    """Compiles kernels into a folder, in ``processes`` processes, which start at once and end with
    the block.

    They do not see a device. One that dies is replaced, and its kernel given to another one.

    Raises:
        ValueError: ``processes`` is less than 1.
    """

    def __init__(self, processes: int, folder: Path) -> None:
        if processes < 1:
            raise ValueError(f"processes={processes} compile nothing; use 1 or more")
        self._folder = folder
        # processes and not threads: a compiler holds Python's lock, and may crash
        self._processes = [_CompilerProcess(folder) for _ in range(processes)]

    def __enter__(self) -> Compilers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.end()

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes."""
        return [process.pid for process in self._processes]

    def compile(
        self, wanted: Sequence[Any], progress: Callable[[str], object] = lambda state: None
    ) -> list[str]:
        """Compiles kernels and says how each was made, in order: ``"found"`` in the cache,
        ``"compiled"`` or ``"rebuilt"``.

        Args:
            wanted: the launches.
            progress: called with the same, from several threads, as kernels are done.

        Raises:
            WarmUpError: a kernel does not compile, or two processes died over it.
        """
        states = [""] * len(wanted)
        errors: list[str] = []
        # number and tries so far; popping and appending are whole steps among Python's threads
        waiting = deque(enumerate([0] * len(wanted)))

        def work(process: _CompilerProcess) -> None:
            while waiting and not errors:
                try:
                    number, tries = waiting.popleft()
                except IndexError:  # another one took it
                    return
                answer = process.ask(wanted[number])
                if answer is None:
                    # it died: of a compiler's fault, or killed for memory, which may pass
                    process.start()
                    if tries + 1 < _TRIES:
                        waiting.append((number, tries + 1))
                    else:
                        errors.append(
                            f"{_name(wanted[number])}: the process that compiled it died, "
                            f"{_TRIES} times"
                        )
                elif "error" in answer:
                    errors.append(f"{_name(wanted[number])}: {answer['error']}")
                else:
                    states[number] = answer["state"]
                    progress(states[number])

        threads = [threading.Thread(target=work, args=(p,), daemon=True) for p in self._processes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors or waiting:  # all of them, so that one run names every kernel that fails
            raise WarmUpError("; ".join(errors))
        return states


class _CompilerProcess:
    """``python -m k31fn.kernels.warmup``: a line of JSON in, a line out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.start()

    def start(self) -> None:
        env = dict(os.environ)
        env.pop("TRITON_INTERPRET", None)
        env |= {
            # without a device: several contexts would take gigabytes from the run's
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        command = [sys.executable, "-m", "k31fn.kernels.warmup", str(self._folder)]
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, launch: Any) -> dict[str, Any] | None:
        """Its answer, or None if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(launch) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line.endswith("\n"):  # a part of an answer is none
            self.end()
            return None
        return json.loads(line)

    def end(self) -> None:
        """Kills it: it writes nothing that another process would take for whole."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _name(launch: Any) -> str:
    return f"kernel {launch[0]}.{launch[1]}"
