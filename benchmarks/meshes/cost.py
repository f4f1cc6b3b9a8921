"""What a step costs: seconds, memory, bytes, and the communication that nothing hides."""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.meshes.exposed import measure
from benchmarks.meshes.here import ONE, Here, axes_of, dataset_of
from k31fn import config, trainer
from k31fn import device as devices
from k31fn.parallel import record_collectives
from k31fn.parallel.backends.processes import exchange_json

__all__ = ["timing"]


def timing(recipe: config.Recipe, here: Here) -> dict[str, Any]:
    """Costs of one GPU and of each mesh."""
    found: dict[str, Any] = {}
    for name, made in {ONE: recipe, **dict(here.meshes(recipe))}.items():
        time_it = functools.partial(_time, made, here)
        found[name] = here.attempt(
            f"timing of {recipe.name} in {recipe.compute} on {name}", time_it
        )
    return found


def _time(made: config.Recipe, here: Here) -> dict[str, Any]:
    """Costs of the rank that needs most: medians, peaks."""
    axes = axes_of(made)
    state = trainer.init_state(trainer.lay_out(made, axes), here.device)
    step = trainer.make_step(trainer.lay_out(made, axes))
    held = devices.memory_allocated(here.device)
    batches = trainer.make_batches(
        made, trainer.rows_at(dataset_of(made, here), 0, axes), here.device, axes
    )
    devices.reset_peak_memory(here.device)
    seconds: list[float] = []

    def once() -> None:
        nonlocal state
        begin = time.perf_counter()
        state, _ = step(state, batches, 1e-5)
        devices.synchronize(here.device)
        seconds.append(time.perf_counter() - begin)

    for _ in range(here.options.warmup + here.options.repeats):
        once()
    timed = seconds[here.options.warmup :]
    told = {
        "seconds": statistics.median(timed),
        "fastest": min(timed),
        "slowest": max(timed),
        "state_bytes": held,
        "peak_bytes": devices.peak_memory(here.device),
    }
    most: dict[str, Any] = {
        k: max(other[k] for other in exchange_json(told, here.everyone)) for k in told
    }
    with record_collectives() as record:
        once()
    most |= {"sent_bytes": dict(record.nbytes), "collectives": dict(record.counts)}
    if here.device.type != "cpu":
        most["profile"] = exchange_json(_profile(once, seconds), here.everyone)
    return most


def _profile(once: Callable[[], None], seconds: list[float]) -> dict[str, Any]:
    """Exposed communication of one step on this rank's GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        once()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        trace = json.loads(Path(file.name).read_text())
    return {"step": seconds[-1], **measure(trace)._asdict()}
