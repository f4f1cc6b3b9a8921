"""Captured steps beside eager ones, from the same state: ``python -m benchmarks.jit``.

For each case: whether all leaves of the state and all metrics have the same bits after so many
steps (one of them skipped), the time of a step, of the step that captures, peak memory, and the
share of a launched step in which the device computes nothing. ``tiny`` is ``configs/tiny.py``;
``wide`` are two layers of ``configs/k31_pro.py`` at full width with 32 experts, 2 x 4,096 tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import cuda_device
from k31fn import config, data, lora, trainer, tree
from k31fn import device as devices
from k31fn.kernels.registry import use_impl
from k31fn.trainer.current_phase import JitMode, begin_phase

__all__ = ["CASES", "idle_share", "main", "measure"]

_ADAMW = config.Optimizer(kind="adamw", peak_lr=1e-3)
_PROFILED = 3


def _tiny(**changes: Any) -> config.Recipe:
    tiny = config.load_recipe("configs/tiny.py")
    changes = {"batch_size": 8, "compute": "bfloat16", "optimizer": _ADAMW, **changes}
    return dataclasses.replace(tiny, **changes)


def _wide(**changes: Any) -> config.Recipe:
    pro = config.load("configs/k31_pro.py")
    experts = dataclasses.replace(pro.sublayers["moe"], num_experts=32)
    model = dataclasses.replace(
        pro.with_sublayers(moe=experts),
        vocab_size=264,
        layers=(("kda", "moe"), ("full_attention", "moe")),
    )
    base = config.Recipe(
        name="wide",
        model=model,
        data=data.Config(path="stdlib"),
        optimizer=dataclasses.replace(_ADAMW, peak_lr=1e-4),
        batch_size=2,
        length=4096,
        remat="layer",
        compute="bfloat16",
    )
    return dataclasses.replace(base, **changes)


_MUON = config.Optimizer(kind="muon", peak_lr=5e-3)
_CLIPPED = dataclasses.replace(_ADAMW, qk_clip=0.5, spike=3.0)
CASES: dict[str, Callable[[], config.Recipe]] = {
    "tiny, AdamW": _tiny,
    "tiny, AdamW, float32": lambda: _tiny(compute="float32"),
    "tiny, Muon": lambda: _tiny(optimizer=_MUON),
    "tiny, Muon, remat layer, 2 micro-batches": lambda: _tiny(
        optimizer=_MUON, remat="layer", micro_batches=2
    ),
    "tiny, AdamW, master bfloat16": lambda: _tiny(master="bfloat16"),
    "tiny, remat intra_layer": lambda: _tiny(remat="intra_layer"),
    "tiny, remat cross_layer, QK-Clip, spikes": lambda: _tiny(
        remat="cross_layer", optimizer=_CLIPPED
    ),
    "tiny, adapters": lambda: _tiny(lora=lora.Config(rank=4)),
    "tiny, mHC": lambda: dataclasses.replace(
        config.load_recipe("configs/tiny_mhc.py"), batch_size=8, compute="bfloat16"
    ),
    "wide, AdamW, remat layer": _wide,
    "wide, Muon, remat layer": lambda: _wide(optimizer=dataclasses.replace(_MUON, peak_lr=1e-4)),
}


def _steps(
    recipe: config.Recipe, device: torch.device, mode: JitMode, count: int, timed: int
) -> dict[str, Any]:
    """State, metrics, times and memory of ``count`` steps, then the times of as many as ``timed``
    with nothing between them.
    """
    layout = trainer.lay_out(recipe)
    lines: list[str] = []
    phase = begin_phase(layout, 0, device, mode, lines.append)
    dataset = trainer.load_corpus(recipe).dataset
    gc.collect()
    torch.cuda.empty_cache()
    devices.reset_peak_memory(device)
    state = trainer.init_state(layout, device)
    rates = [devices.number(1e-3 / (i + 1), device) for i in range(count)]
    metrics: list[Tensor] = []
    times: list[float] = []
    for i, rate in enumerate(rates):
        rows = dataset.batch_at(i)
        if i == count // 2:  # without labels: a step that is skipped
            rows = dataclasses.replace(rows, labels=torch.full_like(rows.labels, -100))
        batches = trainer.make_batches(recipe, rows, device)
        devices.synchronize(device)
        began = time.perf_counter()
        state, numbers = phase.step(state, batches, rate)
        devices.synchronize(device)
        times.append(1e3 * (time.perf_counter() - began))
        metrics.append(numbers.flat())
    found: dict[str, Any] = {
        "peak_bytes": devices.peak_memory(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
        "note": "; ".join(lines),
        "third_ms": times[2],
        "step_ms": statistics.median(times[3:]),
        # on the host: the other mode's state takes the device's memory
        "bits": [x.cpu() for x in [*tree.leaves(state), *metrics]],
    }
    rows = dataset.batch_at(count)
    batches = trainer.make_batches(recipe, rows, device)
    devices.synchronize(device)
    began = time.perf_counter()
    for _ in range(timed):
        state, _ = phase.step(state, batches, rates[-1])
    devices.synchronize(device)
    found["in_a_row_ms"] = 1e3 * (time.perf_counter() - began) / max(1, timed)
    if mode == "on":
        hold = [state]

        def one() -> None:
            hold[0], _ = phase.step(hold[0], batches, rates[-1])

        found["idle"] = idle_share(one)
    return found


def idle_share(step: Callable[[], None]) -> float:
    """The share of some steps in a row in which no kernel runs, from the first one to the last."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_PROFILED):
            step()
        torch.cuda.synchronize()
    spans: list[tuple[float, float]] = []
    for event in profile.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.elapsed_us():
            spans.append((event.time_range.start, event.time_range.end))
    return idle_of(spans)


def idle_of(spans: list[tuple[float, float]]) -> float:
    """The share of the time from the first start to the last end that no span covers."""
    if not spans:
        return 1.0
    spans = sorted(spans)
    busy = 0.0
    reached = spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - spans[0][0])


def measure(name: str, device: torch.device, count: int, timed: int) -> dict[str, Any]:
    """One case."""
    recipe = CASES[name]()
    # in float32 the device has only a product of the experts that reads their counts
    reference = "float32" in name or "adapters" in name
    with use_impl(**({"grouped_matmul": "reference"} if reference else {})):
        eager = _steps(recipe, device, "off", count, min(timed, 5))
        captured = _steps(recipe, device, "on", count, timed)
    pairs = list(zip(eager.pop("bits"), captured.pop("bits"), strict=True))
    equal = sum(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    return {
        "case": name,
        "steps": count,
        "tokens": recipe.batch_size * recipe.length,
        "tensors": len(pairs),
        "equal": equal,
        "eager": eager,
        "captured": captured,
    }


def main() -> int:
    """Returns 1 if any bit differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jit", description=__doc__)
    parser.add_argument("cases", nargs="*", help="parts of their names; none: all")
    parser.add_argument("--steps", type=int, default=50, help="that are compared")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = cuda_device(parser, args.device)
    names = [n for n in CASES if not args.cases or any(part in n for part in args.cases)]
    rows = []
    for name in names:
        row = measure(name, device, args.steps, 20)
        rows.append(row)
        e, c = row["eager"], row["captured"]
        print(
            f"{name}: {row['equal']} of {row['tensors']} tensors equal after {row['steps']} steps; "
            f"eager {e['step_ms']:.1f} ms, launched {c['step_ms']:.1f} (in a row "
            f"{c['in_a_row_ms']:.1f}), the third {c['third_ms']:.0f}; idle {c['idle']:.1%}; peak "
            f"{c['peak_bytes'] / e['peak_bytes']:.3f} of {e['peak_bytes'] / 2**20:.0f} MiB; "
            f"{c['note']}",
            flush=True,
        )
        if args.json:
            about = {"hardware": devices.name(device), "torch": torch.__version__}
            args.json.write_text(json.dumps({**about, "cases": rows}, indent=1) + "\n")
    return int(any(row["equal"] != row["tensors"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
