"""What a rank was doing when a run was lost: stacks, memory, step times, the last collectives."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from k31fn import device as devices
from k31fn.parallel.backends.processes import CollectiveProgress
from k31fn.parallel.mesh import Mesh

__all__ = ["StepTimes", "describe", "write"]


class StepTimes:
    """How long steps took: counts by powers of two of a second, and the largest."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._longest = 0.0

    def add(self, seconds: float) -> None:
        """Counts a step."""
        # powers of two: a few counts tell a slow rank from one that was slow once, for any model
        self._counts[math.frexp(seconds)[1]] += 1
        self._longest = max(self._longest, seconds)

    def as_json(self) -> dict[str, Any]:
        """``{"below 0.5 s": 120, ...}`` ascending, and the longest in seconds."""
        counts = {}
        for exponent, count in sorted(self._counts.items()):
            counts[f"below {2.0**exponent:g} s"] = count
        return {"counts": counts, "longest": round(self._longest, 3)}


def describe(
    why: str,
    rank: int,
    mesh: Mesh,
    progress: CollectiveProgress,
    times: StepTimes,
    device: torch.device,
) -> dict[str, Any]:
    """All of it, as JSON; nothing in it waits for the device or for another rank."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {}
    for ident, frame in sys._current_frames().items():
        stacks[names.get(ident, str(ident))] = traceback.format_stack(frame)
    # asked of the allocators, not of the device, which may hang
    cpu = torch.device("cpu")
    memory = {"host": devices.memory_allocated(cpu), "host_peak": devices.peak_memory(cpu)}
    if device.type != "cpu":
        memory |= {
            "device": devices.memory_allocated(device),
            "device_peak": devices.peak_memory(device),
        }
    return {
        "rank": rank,
        "at": mesh.coordinate(rank),
        "why": why,
        "time": time.time(),
        "waiting": progress.waiting,
        "issued": progress.issued,
        "memory_bytes": memory,
        "step_seconds": times.as_json(),
        "stacks": stacks,
        "collectives": progress.flight.as_json(),
    }


def write(folder: Path, record: dict[str, Any]) -> bool:
    """Writes a rank's record to ``folder/rank-N.json``; whether it could."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{record['rank']}.json").write_text(json.dumps(record, indent=1))
    except OSError:
        # a full disk may be why the run was lost; the report goes to standard error in any case
        return False
    return True
