"""One op at one shape: is it right, and how fast beside its peers, in one run.

A subject gives inputs, the fused function, and the same mathematics written plainly for torch. Peers: the plain form
as it is, replayed from a CUDA graph, and under torch.compile; and others that the subject names.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.measure import Row, Work, error, graphed, take_turns
from k31fn import device as devices
from k31fn import tree

__all__ = ["Subject", "check", "measure", "tune"]

Function = Callable[..., Any]


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        shape: its name.
        draw: new inputs: a flat list of tensors, each differentiated.
        fused: the function of them, by the fused kernels.
        plain: the same in plain torch.
        exact: the same for float64 inputs.
        forward_bytes: that must move in the forward.
        both_bytes: that must move in forward and backward.
        peers: more functions of the same inputs, by name.
    """

    shape: str
    draw: Callable[[], list[Tensor]]
    fused: Function
    plain: Function
    exact: Function
    forward_bytes: int
    both_bytes: int
    peers: dict[str, Function] = field(default_factory=dict)


def _both(f: Function, inputs: Sequence[Tensor], cts: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    outs = tree.leaves(f(*leaves))
    return outs, list(torch.autograd.grad(outs, leaves, list(cts)))


def _cotangents(f: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [torch.randn_like(o) for o in tree.leaves(f(*inputs))]


def check(subject: Subject, runs: int = 20) -> float:
    """Largest relative error of a value or gradient against float64 over fresh inputs.

    Raises:
        AssertionError: two runs on the same inputs differ in a bit.
    """
    worst, inputs = 0.0, subject.draw()
    assert _repeats(subject, inputs, _cotangents(subject.fused, inputs), runs), "two runs differ"
    for _ in range(3):
        inputs = subject.draw()
        cts = _cotangents(subject.fused, inputs)
        ours = _both(subject.fused, inputs, cts)
        wide = _both(subject.exact, [x.double() for x in inputs], [c.double() for c in cts])
        pairs = zip([*ours[0], *ours[1]], [*wide[0], *wide[1]], strict=True)
        worst = max(worst, *(error(a, b) for a, b in pairs))
    return worst


def _repeats(subject: Subject, inputs: Sequence[Tensor], cts: Sequence[Tensor], runs: int) -> bool:
    """Whether all runs give the same bits."""
    first, *others = ([*outs, *grads] for outs, grads in (_both(subject.fused, inputs, cts) for _ in range(runs)))
    return all(torch.equal(a, b) for other in others for a, b in zip(other, first, strict=True))


def measure(subject: Subject, where: torch.device, *, sets: int, repeats: int) -> list[Row]:
    """A row per implementation, all in turns on the same sets of inputs."""
    drawn = [subject.draw() for _ in range(sets)]
    cts = [_cotangents(subject.plain, inputs) for inputs in drawn]
    candidates: dict[str, Function] = {"fused": subject.fused, "eager": subject.plain, **subject.peers}
    cuda = where.type == "cuda"
    if cuda:
        candidates["torch.compile"] = torch.compile(subject.plain)
    works: dict[str, list[Work]] = {}
    notes: dict[str, str] = {}
    peaks: dict[str, int] = {}
    for name, f in candidates.items():
        forward = [lambda f=f, x=x: _forward(f, x) for x in drawn]
        both = [lambda f=f, x=x, c=c: _both(f, x, c) for x, c in zip(drawn, cts, strict=True)]
        try:
            peaks[name] = peaks[f"{name}, graph"] = _peak(both[0], where)
            works[f"{name}|forward"], works[f"{name}|both"] = forward, both
            if cuda:
                works[f"{name}, graph|forward"] = [graphed(w, where) for w in forward]
                works[f"{name}, graph|both"] = [graphed(w, where) for w in both]
        except Exception as e:  # a peer that fails is a row that says so, whatever it raised
            if name == "fused":
                raise
            notes[name] = f"{type(e).__name__}: {str(e).splitlines()[0][:80]}"
    times = take_turns(works, where, repeats)
    rate = (devices.peak_rates(where) or devices.PeakRates(float("nan"), float("nan"))).bytes
    floor, floor_both = 1e3 * subject.forward_bytes / rate, 1e3 * subject.both_bytes / rate
    names = [n for base in candidates for n in (base, f"{base}, graph")]
    return [
        Row(subject.shape, n, times[f"{n}|forward"], times[f"{n}|both"], floor, floor_both, peaks[n])
        for n in names
        if f"{n}|both" in times
    ] + [Row(subject.shape, n, float("nan"), float("nan"), floor, floor_both, 0, note) for n, note in notes.items()]


def _forward(f: Function, inputs: Sequence[Tensor]) -> Any:
    with torch.no_grad():
        return f(*inputs)


def _peak(work: Work, where: torch.device) -> int:
    if where.type == "cpu":
        return 0
    work()
    devices.synchronize(where)
    before = devices.memory_allocated(where)
    devices.reset_peak_memory(where)
    work()
    devices.synchronize(where)
    return devices.peak_memory(where) - before


@contextlib.contextmanager
def _tiles(module: Any, kind: str, tiles: Any) -> Iterator[None]:
    with mock.patch.dict(module._TILES, {kind: tiles}):
        yield


def tune(
    subject: Subject, module: Any, where: torch.device, options: dict[str, Sequence[Any]], *, repeats: int
) -> None:
    """Times each kernel's tile over all combinations of ``options``, the other kernels as they are; prints the best.

    A tile with which twenty runs are not the same bits is left out, and named.

    Args:
        subject: what is run, forward and backward, from a graph.
        module: the kernels; its ``_TILES`` are replaced.
        where: a CUDA device.
        options: values per field of a tile.
        repeats: timed calls of each.
    """
    kind, inputs = where.type, subject.draw()
    cts = _cotangents(subject.plain, inputs)
    base = module._TILES[kind]
    for position in range(len(base)):
        found: list[tuple[float, str]] = []
        for values in itertools.product(*options.values()):
            changed = base[position]._replace(**dict(zip(options, values, strict=True)))
            tiles = [changed if i == position else t for i, t in enumerate(base)]
            rebuilt = type(base)(*tiles) if hasattr(base, "_fields") else tuple(tiles)
            try:
                with _tiles(module, kind, rebuilt):
                    if not _repeats(subject, inputs, cts, 20):
                        print(f"  {changed}: two runs differ")
                        continue
                    work = graphed(lambda: _both(subject.fused, inputs, cts), where)
                    found.append((take_turns({"": [work]}, where, repeats)[""], str(changed)))
            except Exception as e:  # too many registers or too much shared memory: not a candidate
                print(f"  {changed}: {type(e).__name__}: {str(e).splitlines()[0][:80]}")
        for milliseconds, tile in sorted(found)[:5]:
            print(f"{subject.shape} tile {position}: {milliseconds:.4f} ms  {tile}", flush=True)
