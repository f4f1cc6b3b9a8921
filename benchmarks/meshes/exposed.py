"""How much of a profiled step the GPU spends on communication that nothing else hides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Exposed", "measure"]

Span = tuple[float, float]


class Exposed(NamedTuple):
    """Seconds of a step on one GPU; a span in which several kernels run counts once.

    Attributes:
        compute: some kernel, copy or fill runs that is not NCCL's.
        communication: an NCCL kernel runs. It runs while it waits for the other GPUs, too.
        exposed: an NCCL kernel runs and nothing else.
        by_kind: exposed, of each kind of NCCL kernel alone; those that run at the same time each
            count.
    """

    compute: float
    communication: float
    exposed: float
    by_kind: dict[str, float]


def measure(trace: Mapping[str, Any]) -> Exposed:
    """Times of a Chrome trace as ``torch.profiler`` exports it, of one process."""
    compute: list[Span] = []
    communication: dict[str, list[Span]] = {}
    for event in trace["traceEvents"]:
        if event.get("ph") != "X" or event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        span = event["ts"], event["ts"] + event["dur"]
        if "nccl" in event["name"].lower():
            kind = re.search("AllGather|ReduceScatter|AllReduce|SendRecv|Broadcast", event["name"])
            communication.setdefault(kind[0] if kind else event["name"], []).append(span)
        else:
            compute.append(span)
    busy = union(compute)
    all_kinds = union(s for spans in communication.values() for s in spans)
    by_kind = {}
    for kind, spans in communication.items():
        of_kind = union(spans)
        by_kind[kind] = _length(of_kind) - _shared(of_kind, busy)
    return Exposed(
        compute=_length(busy),
        communication=_length(all_kinds),
        exposed=_length(all_kinds) - _shared(all_kinds, busy),
        by_kind=by_kind,
    )


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time in ascending spans that do not touch."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _length(spans: list[Span]) -> float:
    """Length in seconds; the trace has microseconds."""
    return 1e-6 * sum(end - begin for begin, end in spans)


def _shared(some: list[Span], others: list[Span]) -> float:
    """Seconds that two unions have in common."""
    total, j = 0.0, 0
    for begin, end in some:
        while j < len(others) and others[j][1] <= begin:
            j += 1
        k = j
        while k < len(others) and others[k][0] < end:
            total += min(end, others[k][1]) - max(begin, others[k][0])
            k += 1
    return 1e-6 * total
