"""Processes of a group on this machine, for tests.

A job is a folder: ``job.json`` names a function by its import path and says how its arguments are
built from the tensors of ``tensors.safetensors``; each rank answers with ``out.<rank>.safetensors``
and ``reply.<rank>.json``. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["Ranks", "decode", "encode", "import_path", "import_target", "spawn_ranks"]


def import_path(f: Callable[..., Any]) -> str:
    """``module:name`` of a function or class that another process can import.

    Raises:
        ValueError: a closure, a lambda or a function of a script.
    """
    module, name = getattr(f, "__module__", None), getattr(f, "__qualname__", "<locals>")
    if module in (None, "__main__") or "<" in name:
        raise ValueError(
            f"{name}: only a function at the top of an importable module can run in another process"
        )
    return f"{module}:{name}"


def import_target(path: str) -> Any:
    """What :func:`import_path` named."""
    module, _, name = path.partition(":")
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    return target


def encode(node: Any, tensors: list[Tensor]) -> Any:
    """A tree as JSON; its tensors are appended to ``tensors``.

    Raises:
        ValueError: a leaf that is neither tensor, number, string, boolean nor None.
    """
    if isinstance(node, Tensor):
        tensors.append(node)
        return {"tensor": len(tensors) - 1}
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        fields = {f.name: encode(getattr(node, f.name), tensors) for f in dataclasses.fields(node)}
        return {"node": import_path(type(node)), "fields": fields}
    if isinstance(node, tuple) and hasattr(node, "_asdict"):
        fields = {k: encode(v, tensors) for k, v in node._asdict().items()}  # pyright: ignore[reportAttributeAccessIssue]
        return {"tuple of": import_path(type(node)), "fields": fields}
    if isinstance(node, tuple | list):
        return {type(node).__name__: [encode(v, tensors) for v in node]}
    if isinstance(node, dict):
        return {"dict": [[k, encode(v, tensors)] for k, v in node.items()]}
    if node is None or isinstance(node, bool | int | float | str):
        return {"value": node}
    raise ValueError(f"{node!r} cannot be sent to another process; build it in the function")


def decode(data: Any, tensors: list[Tensor]) -> Any:
    """The inverse of :func:`encode`."""
    match data:
        case {"tensor": i}:
            return tensors[i]
        case {"node": path, "fields": fields}:
            cls = import_target(path)
            node = object.__new__(cls)  # as tree.dataclass rebuilds: any kind of leaf
            for name, value in fields.items():
                object.__setattr__(node, name, decode(value, tensors))
            return node
        case {"tuple of": path, "fields": fields}:
            return import_target(path)(**{k: decode(v, tensors) for k, v in fields.items()})
        case {"tuple": values}:
            return tuple(decode(v, tensors) for v in values)
        case {"list": values}:
            return [decode(v, tensors) for v in values]
        case {"dict": pairs}:
            return {k: decode(v, tensors) for k, v in pairs}
        case _:
            return data["value"]


class Ranks:
    """Running processes; give them jobs with :meth:`run`. Made by :func:`spawn_ranks`."""

    def __init__(self, processes: list[subprocess.Popen[str]], folder: Path) -> None:
        self.size, self._processes, self._folder, self._jobs = len(processes), processes, folder, 0

    def run(
        self, f: Callable[..., Any], *args: Any, timeout: float | int = 100.0
    ) -> list[tuple[list[Tensor], dict[str, Any]]]:
        """``f(*args)`` on every rank, which returns a list of tensors and a JSON dict; in the order
        of ranks.

        Raises:
            ValueError: an argument cannot be sent.
            RuntimeError: a rank failed (with its traceback), died or did not answer in time.
        """
        self._jobs += 1
        job = self._folder / f"job{self._jobs}"
        job.mkdir()
        tensors: list[Tensor] = []
        data = {"function": import_path(f), "args": [encode(a, tensors) for a in args]}
        write_tensors(tensors, job / "tensors.safetensors")
        (job / "job.json").write_text(json.dumps(data))
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{job}\n")
            process.stdin.flush()
        deadline = time.monotonic() + timeout
        return [self._answer(job, rank, deadline) for rank in range(self.size)]

    def _answer(self, job: Path, rank: int, deadline: float) -> tuple[list[Tensor], dict[str, Any]]:
        reply = job / f"reply.{rank}.json"
        while not reply.exists():
            dead = self._processes[rank].poll()
            if dead is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {rank} "
                    + ("did not answer in time" if dead is None else f"died ({dead})")
                )
            time.sleep(0.005)
        answer = json.loads(reply.read_text())
        if "error" in answer:
            raise RuntimeError(f"rank {rank} failed:\n{answer['error']}")
        return read_tensors(job / f"out.{rank}.safetensors"), answer["value"]


@contextlib.contextmanager
def spawn_ranks(size: int, *, timeout: float | int = 60.0, device: str = "cpu") -> Iterator[Ranks]:
    """``size`` processes in a group, which import what this process can import; ended on leaving.

    A job that failed may leave the group unusable: spawn anew after it.

    Args:
        size: number of processes.
        timeout: seconds that a rank waits for the others in a collective.
        device: the kind; decides the backend. Of ``cuda`` and ``npu`` each rank has one, its
            current one.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
    }
    command = [sys.executable, "-m", "k31fn.testing.rank", str(timeout), device]
    with tempfile.TemporaryDirectory(prefix="k31fn-ranks-") as folder:
        processes = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, env={**environment, "RANK": str(r)}, text=True
            )
            for r in range(size)
        ]
        try:
            yield Ranks(processes, Path(folder))
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.communicate()


def write_tensors(tensors: list[Tensor], path: Path) -> None:
    """In order, as copies of their own (safetensors refuses views that share memory)."""
    save_file({str(i): t.detach().clone().contiguous() for i, t in enumerate(tensors)}, path)


def read_tensors(path: Path) -> list[Tensor]:
    """What :func:`write_tensors` wrote."""
    loaded = load_file(path)
    return [loaded[str(i)] for i in range(len(loaded))]


def answer(job: Path, rank: int, value: dict[str, Any]) -> None:
    """Writes a rank's reply; whole as soon as it exists."""
    partial = job / f"reply.{rank}.partial"
    partial.write_text(json.dumps(value))
    partial.rename(job / f"reply.{rank}.json")


def perform(job: Path) -> tuple[list[Tensor], dict[str, Any]]:
    """Runs a job in this process."""
    data = json.loads((job / "job.json").read_text())
    tensors = read_tensors(job / "tensors.safetensors")
    return import_target(data["function"])(*(decode(a, tensors) for a in data["args"]))
