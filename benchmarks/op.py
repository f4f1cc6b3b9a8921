"""One op at one shape: is it right, and how fast beside its peers, in one run.

A subject gives inputs, the fused function, and the same mathematics written plainly for torch.
Peers: the plain form as it is, replayed from a CUDA graph, and under torch.compile; and others that
the subject names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.measure import Row, Work, error, graphed, take_turns
from k31fn import device as devices
from k31fn import tree
from k31fn.kernels.launch import Tile

__all__ = ["Subject", "check", "cotangents", "measure", "repeats_alike", "tune", "variants"]

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
        bare: moves what the forward must move and computes next to nothing; its time under
            torch.compile says how near to the floor the device comes.
    """

    shape: str
    draw: Callable[[], list[Tensor]]
    fused: Function
    plain: Function
    exact: Function
    forward_bytes: int
    both_bytes: int
    peers: dict[str, Function] = field(default_factory=dict)
    bare: Function | None = None


def _both(
    f: Function, inputs: Sequence[Tensor], cts: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    outs = tree.leaves(f(*leaves))
    return outs, list(torch.autograd.grad(outs, leaves, list(cts)))


def cotangents(f: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Random ones for all outputs."""
    with torch.no_grad():
        return [torch.randn_like(o) for o in tree.leaves(f(*inputs))]


def check(subject: Subject, runs: int = 20) -> float:
    """Largest relative error of a value or gradient against float64 over fresh inputs.

    Raises:
        AssertionError: two runs on the same inputs differ in a bit.
    """
    worst = 0.0
    inputs = subject.draw()
    assert repeats_alike(subject, inputs, cotangents(subject.fused, inputs), runs), (
        "two runs differ"
    )
    for _ in range(3):
        inputs = subject.draw()
        cts = cotangents(subject.fused, inputs)
        ours = _both(subject.fused, inputs, cts)
        wide = _both(subject.exact, [x.double() for x in inputs], [c.double() for c in cts])
        pairs = zip([*ours[0], *ours[1]], [*wide[0], *wide[1]], strict=True)
        worst = max(worst, *(error(a, b) for a, b in pairs))
    return worst


def repeats_alike(
    subject: Subject, inputs: Sequence[Tensor], cts: Sequence[Tensor], runs: int = 20
) -> bool:
    """Whether all runs give the same bits."""
    first: list[Tensor] = []
    for _ in range(runs):
        outs, grads = _both(subject.fused, inputs, cts)
        results = [*outs, *grads]
        first = first or results
        if not all(map(torch.equal, results, first)):
            return False
    return True


def measure(
    subject: Subject,
    where: torch.device,
    *,
    repeats: int,
    each: Callable[[Row], None] | None = None,
) -> list[Row]:
    """A row per implementation, one after the other, all on the same sets of inputs, which take
    turns.

    There are two sets, or as many as move 2 GiB in the forward: no input is in a cache, and a
    graph, which runs them all, takes long beside its own launch. The forward is the one that a
    backward follows; of the fused op also that without gradients. The bare form has a forward only,
    from a graph.

    Args:
        subject: what is measured.
        where: the device.
        repeats: timed calls of each.
        each: called with every row as soon as it is there.
    """
    drawn = [subject.draw() for _ in range(max(2, -(-(2**31) // subject.forward_bytes)))]
    cts = [cotangents(subject.plain, inputs) for inputs in drawn]
    candidates: dict[str, Function] = {"fused": subject.fused, "eager": subject.plain}
    if where.type == "cuda":
        candidates["torch.compile"] = torch.compile(subject.plain, dynamic=False)
    candidates |= subject.peers
    rate = (devices.peak_rates(where) or devices.PeakRates(float("nan"), float("nan"))).bytes
    floors = (1e3 * subject.forward_bytes / rate, 1e3 * subject.both_bytes / rate)
    rows: list[Row] = []
    for name, f in candidates.items():
        try:
            peak, times = _times(name, f, drawn, cts, where, repeats)
        except Exception as e:  # a peer that fails is a row that says so, whatever it raised
            if name == "fused":
                raise
            note = f"{type(e).__name__}: {str(e).splitlines()[0][:80]}"
            peak, times = 0, {name: (float("nan"), float("nan"), float("nan"))}
        else:
            note = ""
        for form, (forward, both, inference) in times.items():
            rows.append(Row(subject.shape, form, forward, both, *floors, peak, note, inference))
            if each is not None:
                each(rows[-1])
    if subject.bare is not None and where.type == "cuda":
        forward = _replayed(torch.compile(subject.bare, dynamic=False), drawn, where, repeats)
        rows.append(Row(subject.shape, "bare, graph", forward, float("nan"), *floors, 0))
        if each is not None:
            each(rows[-1])
    return rows


def _replayed(
    f: Function, drawn: Sequence[Sequence[Tensor]], where: torch.device, repeats: int
) -> float:
    """Milliseconds of one call without gradients, from a graph of a call on each set."""
    work = graphed(lambda: [_without_gradients(f, x) for x in drawn], where)
    return take_turns({"": [work]}, where, repeats)[""] / len(drawn)


def _times(
    name: str,
    f: Function,
    drawn: Sequence[Sequence[Tensor]],
    cts: Sequence[Sequence[Tensor]],
    where: torch.device,
    repeats: int,
) -> tuple[int, dict[str, tuple[float, float, float]]]:
    """Peak bytes; and forward, both and, of the fused, forward without gradients; as called and
    from a CUDA graph.
    """
    kinds: list[list[Work]] = [
        [lambda x=x: f(*(a.detach().requires_grad_() for a in x)) for x in drawn],
        [lambda x=x, c=c: _both(f, x, c) for x, c in zip(drawn, cts, strict=True)],
    ]
    if name == "fused":
        kinds.append([lambda x=x: _without_gradients(f, x) for x in drawn])
    peak = _peak(kinds[1][0], where)
    works = {f"{name}|{i}": kind for i, kind in enumerate(kinds)}
    forms = {name: 1}
    if where.type == "cuda":
        forms[f"{name}, graph"] = len(drawn)  # one graph runs all sets
        for i, kind in enumerate(kinds):
            works[f"{name}, graph|{i}"] = [graphed(lambda some=kind: [w() for w in some], where)]
    times = take_turns(works, where, repeats)
    by_form = {}
    for form, runs in forms.items():
        forward, both, inference = (times.get(f"{form}|{i}", float("nan")) / runs for i in range(3))
        by_form[form] = (forward, both, inference)
    return peak, by_form


def _without_gradients(f: Function, inputs: Sequence[Tensor]) -> Any:
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


def variants(
    module: Any, kind: str, options: Sequence[Mapping[str, Sequence[int]]]
) -> Iterator[tuple[int, Tile, Any]]:
    """Each kernel's tile over all combinations of its options, the other kernels as they are in the
    table.

    Args:
        module: the kernels, with their ``_TILES``.
        kind: of device.
        options: per kernel, values per field of its tile.

    Yields:
        The kernel's position in the table, its changed tile, and the entry of the table with it.
    """
    base = module._TILES[kind]
    for position, choice in enumerate(options):
        for values in itertools.product(*choice.values()):
            changed = base[position]._replace(**dict(zip(choice, values, strict=True)))
            tiles = [changed if i == position else t for i, t in enumerate(base)]
            yield (
                position,
                changed,
                type(base)(*tiles) if hasattr(base, "_fields") else tuple(tiles),
            )


def tune(
    subject: Subject,
    module: Any,
    where: torch.device,
    options: Sequence[Mapping[str, Sequence[int]]],
    *,
    repeats: int,
    slack: float = 1.03,
) -> bool:
    """Times every tile of :func:`variants`, prints the best of each kernel, and says if the table's
    are among them.

    A tile with which twenty runs are not the same bits is left out, and named.

    Args:
        subject: what is run, forward and backward, from a graph.
        module: the kernels; its ``_TILES`` are replaced while this runs.
        where: a CUDA device.
        options: per kernel, values per field of its tile.
        repeats: timed calls of each.
        slack: how much slower than the best a tile of the table may be.
    """
    kind = where.type
    inputs = subject.draw()
    cts = cotangents(subject.plain, inputs)

    def milliseconds(tiles: Any) -> float:
        with mock.patch.dict(module._TILES, {kind: tiles}):
            if not repeats_alike(subject, inputs, cts):
                raise ValueError("two runs differ")
            work = graphed(lambda: _both(subject.fused, inputs, cts), where)
            return take_turns({"": [work]}, where, repeats)[""]

    now = milliseconds(module._TILES[kind])
    found: dict[int, list[tuple[float, str]]] = {}
    for position, tile, tiles in variants(module, kind, options):
        try:
            found.setdefault(position, []).append((milliseconds(tiles), str(tile)))
        except Exception as e:  # too many registers or too much shared memory: not a candidate
            print(f"  {tile}: {type(e).__name__}: {str(e).splitlines()[0][:80]}")
    for position, some in found.items():
        for time, tile in sorted(some)[:3]:
            print(
                f"{subject.shape} tile {position}: {time:.4f} ms (table: {now:.4f})  {tile}",
                flush=True,
            )
    return all(now <= slack * min(some)[0] for some in found.values())
