"""Which part of the model each kernel of a profiled step works for.

A step that is launched kernel by kernel tells it: by the scopes (:mod:`k31fn.scopes`) that its
launch was in, and by the kernel's name. A captured step launches the same kernels in the same
order, all from one call: there the n-th kernel works for what the n-th one of a launched step did.
"""

from __future__ import annotations

import bisect
import difflib
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

from k31fn import scopes

__all__ = ["PARTS", "Kernel", "kernels_of", "matched", "part_of", "profiled", "summary"]

PARTS = ("experts", "KDA", "DSA", "head", "optimiser", "residual", "permute", "elementwise")

_OF_SUBLAYER = {"KDA": "KDA", "DSA": "DSA", "MoE": "experts", "dense": "experts"}
_BY_NAME = (
    (r"^(attn_res|mhc)_", "residual"),
    (r"^expert_(scatter|sum|combine)", "permute"),
    (r"^head_(statistics|gradient)", "head"),
)
# what torch launches besides products: copies, sums, sorts, comparisons
_OF_TORCH = re.compile(r"at::native|at_cuda_detail|cub::|^Mem(cpy|set)")


class Kernel(NamedTuple):
    """A kernel, copy or fill on the device.

    Attributes:
        name: as the profiler has it.
        start, end: in microseconds.
        scopes: that its launch was in, outermost first.
    """

    name: str
    start: float
    end: float
    scopes: tuple[str, ...] = ()


def profiled(step: Callable[[], object], *, scoped: bool) -> list[Kernel]:
    """The kernels of a step in the order in which they ran; ``scoped`` records the host too, which
    makes the gaps between kernels longer.
    """
    activities = [ProfilerActivity.CUDA]
    if scoped:
        activities.append(ProfilerActivity.CPU)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        if scoped:
            with scopes.recording():
                step()
        else:
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return kernels_of(json.loads(file.read_text()))


def kernels_of(trace: Mapping[str, Any]) -> list[Kernel]:
    """The kernels of a trace in chrome's format, in the order in which they ran."""
    kernels: list[dict[str, Any]] = []
    launches: dict[int, tuple[int, float]] = {}
    annotations: dict[int, list[tuple[float, float, str]]] = {}
    for event in trace["traceEvents"]:
        kind = event.get("cat")
        if event.get("ph") != "X":
            continue
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append(event)
        elif kind in ("cuda_runtime", "cuda_driver"):
            launches[event["args"].get("correlation", -1)] = (event["tid"], event["ts"])
        elif kind == "user_annotation":
            span = (event["ts"], event["ts"] + event["dur"], event["name"])
            annotations.setdefault(event["tid"], []).append(span)
    for spans in annotations.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
    found = []
    for event in sorted(kernels, key=lambda event: event["ts"]):
        thread, at = launches.get(event["args"].get("correlation", -1), (-1, 0.0))
        inside = _enclosing(annotations.get(thread, []), at)
        found.append(Kernel(event["name"], event["ts"], event["ts"] + event["dur"], inside))
    return found


def _enclosing(spans: Sequence[tuple[float, float, str]], at: float) -> tuple[str, ...]:
    """Names of the spans, sorted by their start, that a time is in."""
    first = bisect.bisect_right(spans, (at, float("inf"), ""))
    return tuple(name for _, end, name in spans[:first] if end >= at)


def part_of(kernel: Kernel) -> str:
    """One of :data:`PARTS`, or ``other``: a product outside of all layers but the head's."""
    if "optimiser" in kernel.scopes:
        return "optimiser"
    for pattern, part in _BY_NAME:
        if re.search(pattern, kernel.name):
            return part
    if _OF_TORCH.search(kernel.name):
        return "elementwise"
    for scope in reversed(kernel.scopes):
        direction, _, title = scope.partition(" ")
        if direction in ("forward", "backward"):
            # a layer's own kernels, outside of its sublayers, join these: norms
            return _OF_SUBLAYER.get(title, "residual")
    return "residual" if kernel.name.startswith("rms_norm") else "head"


def matched(kernels: Sequence[Kernel], like: Sequence[Kernel]) -> list[Kernel]:
    """``kernels`` of a step with the scopes of ``like``, the same step launched one by one, where
    their names are in the same order; what is copied before and behind a graph has none.
    """
    names = [kernel.name for kernel in kernels]
    matcher = difflib.SequenceMatcher(None, [k.name for k in like], names, autojunk=False)
    found = list(kernels)
    for block in matcher.get_matching_blocks():
        for i in range(block.size):
            scopes_of = like[block.a + i].scopes
            found[block.b + i] = found[block.b + i]._replace(scopes=scopes_of)
    return found


def summary(kernels: Sequence[Kernel], most: int = 60) -> dict[str, Any]:
    """Milliseconds and kernels by part, elementwise ones by the innermost scope, idle time, and the
    names that take most.
    """
    parts = {part: [0.0, 0] for part in (*PARTS, "idle")}
    elementwise: dict[str, list[float]] = {}
    names: dict[tuple[str, str, str], list[float]] = {}
    reached = kernels[0].start if kernels else 0.0
    for kernel in kernels:
        part = part_of(kernel)
        ms = 1e-3 * (kernel.end - kernel.start)
        inner = kernel.scopes[-1] if kernel.scopes else ""
        sums = [parts[part], names.setdefault((part, inner, kernel.name), [0.0, 0])]
        if part == "elementwise":
            sums.append(elementwise.setdefault(inner, [0.0, 0]))
        for total in sums:
            total[0] += ms
            total[1] += 1
        if kernel.start > reached:
            parts["idle"][0] += 1e-3 * (kernel.start - reached)
            parts["idle"][1] += 1
        reached = max(reached, kernel.end)
    ordered = sorted(names.items(), key=lambda item: -item[1][0])[:most]
    return {
        "parts": parts,
        "elementwise": elementwise,
        "names": [[*key[:2], key[2][:120], *total] for key, total in ordered],
        "total_ms": 1e-3 * (reached - kernels[0].start) if kernels else 0.0,
    }
