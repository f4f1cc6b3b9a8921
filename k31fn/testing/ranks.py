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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["Ranks", "import_path", "import_target", "spawn_ranks"]


def import_path(f: Callable[..., Any]) -> str:
    """``module:name`` of a function or class that another process can import.

    Raises:
        ValueError: a closure, a lambda or a function of a script.
    """
    module = getattr(f, "__module__", None)
    name = getattr(f, "__qualname__", "<locals>")
    # "<locals>" and "<lambda>" in a name: nothing that an import could reach
    if module in (None, "__main__") or "<" in name:
        raise ValueError(
            f"{name}: only a function at the top of an importable module can run in another process"
        )
    return f"{module}:{name}"


def import_target(path: str) -> Any:
    """The object that :func:`import_path` named."""
    module, _, name = path.partition(":")
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    return target


def _encode(node: Any, tensors: list[Tensor]) -> Any:
    """A tree as JSON; its tensors are appended to ``tensors``.

    Raises:
        ValueError: a leaf that is neither tensor, number, string, boolean nor None.
    """
    if isinstance(node, Tensor):
        tensors.append(node)
        return {"tensor": len(tensors) - 1}
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        fields = {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
        return {"node": import_path(type(node)), "fields": _encode_values(fields, tensors)}
    # before plain tuples, which a NamedTuple is too
    if isinstance(node, tuple) and hasattr(node, "_asdict"):
        fields = node._asdict()  # pyright: ignore[reportAttributeAccessIssue]
        return {"class": import_path(type(node)), "keywords": _encode_values(fields, tensors)}
    if isinstance(node, tuple | list):
        return {type(node).__name__: [_encode(value, tensors) for value in node]}
    if isinstance(node, dict):
        # pairs and not an object: JSON would make a key of 1 a key of "1"
        return {"dict": list(_encode_values(node, tensors).items())}
    # of names, which its class takes as keywords: the sublayers of a model
    if isinstance(node, Mapping):
        fields = _encode_values(dict(node), tensors)
        return {"class": import_path(type(node)), "keywords": fields}
    if node is None or isinstance(node, bool | int | float | str):
        return {"value": node}
    raise ValueError(f"{node!r} cannot be sent to another process; build it in the function")


def _encode_values(fields: dict[Any, Any], tensors: list[Tensor]) -> dict[Any, Any]:
    return {name: _encode(value, tensors) for name, value in fields.items()}


def _decode(data: Any, tensors: list[Tensor]) -> Any:
    """The inverse of :func:`_encode`."""
    match data:
        case {"tensor": i}:
            return tensors[i]
        case {"node": path, "fields": fields}:
            cls = import_target(path)
            # without __init__, whose checks are of a user's values: as tree.dataclass rebuilds
            node = object.__new__(cls)
            for name, value in fields.items():
                object.__setattr__(node, name, _decode(value, tensors))
            return node
        case {"class": path, "keywords": fields}:
            return import_target(path)(**_decode_values(fields.items(), tensors))
        case {"tuple": values}:
            return tuple(_decode({"list": values}, tensors))
        case {"list": values}:
            return [_decode(value, tensors) for value in values]
        case {"dict": pairs}:
            return _decode_values(pairs, tensors)
        case _:
            return data["value"]


def _decode_values(pairs: Iterable[Any], tensors: list[Tensor]) -> dict[Any, Any]:
    return {name: _decode(value, tensors) for name, value in pairs}


class Ranks:
    """Running processes; give them jobs with :meth:`run`. Made by :func:`spawn_ranks`."""

    def __init__(self, processes: list[subprocess.Popen[str]], folder: Path) -> None:
        self.size = len(processes)
        self._processes = processes
        self._folder = folder
        self._jobs = 0

    def run(
        self, f: Callable[..., Any], *args: Any, timeout: float | int = 100.0
    ) -> list[tuple[list[Tensor], dict[str, Any]]]:
        """``f(*args)`` on every rank, which returns a list of tensors and a JSON dict; in the order
        of ranks.

        Raises:
            ValueError: an argument cannot be sent.
            RuntimeError: a rank failed (with its traceback), died or did not answer in time.
        """
        # a folder for each job: an answer that comes too late is not taken for the next job's
        self._jobs += 1
        job = self._folder / f"job{self._jobs}"
        job.mkdir()
        tensors: list[Tensor] = []
        data = {"function": import_path(f), "args": _encode(args, tensors)}
        write_tensors(tensors, job / "tensors.safetensors")
        (job / "job.json").write_text(json.dumps(data))
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{job}\n")
            process.stdin.flush()
        # one deadline for all: the ranks work side by side
        deadline = time.monotonic() + timeout
        return [self._answer(job, rank, deadline) for rank in range(self.size)]

    def _answer(self, job: Path, rank: int, deadline: float) -> tuple[list[Tensor], dict[str, Any]]:
        reply = job / f"reply.{rank}.json"
        while not reply.exists():
            status = self._processes[rank].poll()
            if status is not None:
                raise RuntimeError(f"rank {rank} died ({status})")
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {rank} did not answer in time")
            time.sleep(0.005)
        answer = json.loads(reply.read_text())
        if "error" in answer:
            raise RuntimeError(f"rank {rank} failed:\n{answer['error']}")
        return _read_tensors(job / f"out.{rank}.safetensors"), answer["value"]


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
    # port 0: the system chooses one that is free, so that tests may run side by side
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    search_path = [folder or os.getcwd() for folder in sys.path]  # "" is the folder of the parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(search_path),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
    }
    command = [sys.executable, "-m", "k31fn.testing.rank", str(timeout), device]
    with tempfile.TemporaryDirectory(prefix="k31fn-ranks-") as folder:
        processes = []
        for rank in range(size):
            of_rank = {**environment, "RANK": str(rank)}
            processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, env=of_rank, text=True)
            )
        try:
            yield Ranks(processes, Path(folder))
        finally:
            # all are killed before one is waited for: none hangs in a collective with a dead one
            for process in processes:
                process.kill()
            for process in processes:
                process.communicate()


def write_tensors(tensors: list[Tensor], path: Path) -> None:
    """Writes tensors; :func:`_read_tensors` gives them back in order."""
    named = {}
    for i, tensor in enumerate(tensors):
        # a copy of its own: safetensors refuses views that share memory
        named[str(i)] = tensor.detach().clone().contiguous()
    save_file(named, path)


def _read_tensors(path: Path) -> list[Tensor]:
    named = load_file(path)
    return [named[str(i)] for i in range(len(named))]


def answer(job: Path, rank: int, value: dict[str, Any]) -> None:
    """Writes a rank's reply, which is whole as soon as it exists."""
    partial = job / f"reply.{rank}.partial"
    partial.write_text(json.dumps(value))
    partial.rename(job / f"reply.{rank}.json")


def perform(job: Path) -> tuple[list[Tensor], dict[str, Any]]:
    """Runs a job in this process."""
    data = json.loads((job / "job.json").read_text())
    tensors = _read_tensors(job / "tensors.safetensors")
    return import_target(data["function"])(*_decode(data["args"], tensors))
