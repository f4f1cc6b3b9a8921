"""What the benchmarks of single ops share: times of implementations that take turns, from graphs
too, and a table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from k31fn import device as devices

__all__ = [
    "Row",
    "cuda_device",
    "error",
    "graphed",
    "print_rows",
    "take_turns",
    "told",
    "write_json",
]

Work = Callable[[], Any]
T = TypeVar("T")


class Row(NamedTuple):
    """One implementation at one shape; times in milliseconds, ``nan`` where it did not run.

    ``forward`` is the one that a backward follows, ``inference`` that without gradients, where
    measured.
    """

    shape: str
    name: str
    forward: float
    both: float
    forward_floor: float
    both_floor: float
    peak_bytes: int
    note: str = ""
    inference: float = float("nan")


def told(parser: argparse.ArgumentParser, call: Callable[[], T]) -> T:
    """The result of ``call``; its ValueError is said in the parser's line, and ends the program."""
    try:
        return call()
    except ValueError as e:
        parser.error(str(e))


def cuda_device(parser: argparse.ArgumentParser, name: str) -> torch.device:
    """The CUDA device of ``--device``; of any other the parser says that the kernels do not run
    there, and exits.
    """
    where = told(parser, lambda: devices.parse(name))
    if where.type != "cuda":
        parser.error(f"--device {name}: times kernels, which need a CUDA device")
    return where


def error(actual: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm; NaN is never small."""
    return float((actual.detach().double() - exact.detach()).norm() / exact.detach().norm())


def graphed(work: Work, where: torch.device) -> Work:
    """Replays ``work`` from a CUDA graph: its kernels without what the host does between them."""
    stream = torch.cuda.Stream(where)
    stream.wait_stream(torch.cuda.current_stream(where))
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream(where).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    return lambda: (graph.replay(), kept)[0]


def take_turns(
    works: Mapping[str, Sequence[Work]], where: torch.device, repeats: int
) -> dict[str, float]:
    """Median milliseconds of each, by device events (by the clock on a CPU).

    Args:
        works: per name the same work on several sets of inputs, which take turns so that none stays
            in the cache.
        where: the device.
        repeats: timed calls per name.
    """
    for some in works.values():
        for work in some:
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for i in range(repeats):
        for name, some in works.items():
            times[name].append(_once(some[i % len(some)], where))
    return {name: statistics.median(t) for name, t in times.items()}


def _once(work: Work, where: torch.device) -> float:
    devices.synchronize(where)
    if where.type != "cuda":
        started = time.perf_counter()
        work()
        devices.synchronize(where)
        return 1e3 * (time.perf_counter() - started)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def print_rows(rows: Sequence[Row], forward_bytes: int, both_bytes: int) -> None:
    """A table: milliseconds, achieved TB/s of the bytes that must move, share of the floor."""
    for r in rows:
        backward, floor = r.both - r.forward, r.both_floor - r.forward_floor
        print(
            f"{r.shape:20} {r.name:28} fwd {r.forward:8.4f} ms "
            f"{forward_bytes / r.forward / 1e9:5.2f} TB/s "
            f"{r.forward_floor / r.forward:5.0%} (no grad {r.inference:8.4f} ms)   "
            f"bwd {backward:8.4f} ms {floor / backward:5.0%}   "
            f"both {r.both:8.4f} ms {both_bytes / r.both / 1e9:5.2f} TB/s "
            f"{r.both_floor / r.both:5.0%}   "
            f"peak {r.peak_bytes / 2**20:7.0f} MiB {r.note}",
            flush=True,
        )


def write_json(
    path: str, op: str, where: torch.device, rows: Sequence[Row], extra: Mapping[str, Any]
) -> None:
    """All rows of an op, with the hardware, the versions of what was measured, and what else was
    found. NaN is null.
    """
    if path:
        found = {"op": op, "hardware": _hardware(where), "versions": _versions(), **extra}
        plain = [{k: None if v != v else v for k, v in r._asdict().items()} for r in rows]
        text = json.dumps({**found, "rows": plain}, indent=1, allow_nan=False)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text + "\n", encoding="utf-8")


def _hardware(where: torch.device) -> str:
    return (
        torch.cuda.get_device_name(where)
        if where.type == "cuda"
        else f"{where.type}, {platform.machine()}"
    )


def _versions() -> dict[str, str]:
    """Versions of the packages that matter here, as far as they are installed."""
    found = {}
    for package in ("torch", "triton", "fla-core"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
