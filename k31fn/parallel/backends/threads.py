"""Ranks as threads of one process: arbitrary Python, ragged exchanges, any kernel."""

from __future__ import annotations

import contextvars
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from k31fn import device as devices
from k31fn.parallel.collective_record import CollectiveRecord, current_records, record_into
from k31fn.parallel.mesh import Coordinate, Mesh

__all__ = ["each_rank"]


class _AbortedError(RuntimeError):
    """Another rank failed first."""


@dataclass(eq=False)
class _World:
    """What the ranks share."""

    coordinates: list[Coordinate]
    timeout: float | int
    changed: threading.Condition = field(default_factory=threading.Condition)
    slots: dict[tuple[Any, ...], dict[int, Any]] = field(default_factory=dict)
    taken: dict[tuple[Any, ...], int] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    failed: bool = False

    def post(self, key: tuple[Any, ...], rank: int, value: Any) -> None:
        with self.changed:
            self.slots.setdefault(key, {})[rank] = value
            self.changed.notify_all()

    def collect(self, key: tuple[Any, ...], ranks: list[int], what: str) -> list[Any]:
        """What all ``ranks`` posted under ``key``, in their order."""
        deadline = time.monotonic() + self.timeout
        with self.changed:
            posted = self.slots.setdefault(key, {})
            while missing := [r for r in ranks if r not in posted]:
                if self.failed:
                    raise _AbortedError(f"{what}: another rank failed")
                if gone := [r for r in missing if r in self.left]:
                    raise ValueError(
                        f"{what}: the rank at {self.coordinates[gone[0]]} returned without taking "
                        "part"
                    )
                if (
                    not self.changed.wait(max(0.0, deadline - time.monotonic()))
                    and time.monotonic() >= deadline
                ):
                    where = [self.coordinates[r] for r in missing]
                    raise ValueError(f"{what}: waited {self.timeout} s for the ranks at {where}")
            values = [posted[r] for r in ranks]
            self.taken[key] = self.taken.get(key, 0) + 1
            if self.taken[key] == len(ranks):
                del self.slots[key], self.taken[key]
        return values

    def leave(self, rank: int, *, failed: bool) -> None:
        with self.changed:
            self.left.add(rank)
            self.failed |= failed
            self.changed.notify_all()


@dataclass(eq=False)
class _ThreadHost:
    """One rank's view of the world."""

    world: _World
    rank: int
    names: tuple[str, ...]
    channels: dict[tuple[str, ...], _ThreadChannel] = field(default_factory=dict)

    def token(self, name: str) -> Tensor | None:
        return None

    def channel(self, names: tuple[str, ...]) -> _ThreadChannel:
        if names not in self.channels:
            mine = self.world.coordinates[self.rank]
            ranks = [
                r
                for r, c in enumerate(self.world.coordinates)
                if all(c[n] == mine[n] for n in self.names if n not in names)
            ]
            self.channels[names] = _ThreadChannel(self.world, self.rank, ranks, names)
        return self.channels[names]


class _ThreadChannel:
    """Ranks exchange references to tensors, each posts its n-th collective under number n."""

    def __init__(self, world: _World, rank: int, ranks: list[int], names: tuple[str, ...]) -> None:
        self.world, self.rank, self.ranks, self.names = world, rank, ranks, names
        self.size, self.index = len(ranks), ranks.index(rank)
        self.issued = 0
        self.sent: Counter[tuple[int, int]] = Counter()  # by (from, to)

    def start(self, op: str, x: Tensor, kw: Mapping[str, Any]) -> Callable[[], Tensor]:
        key = (self.names, self.ranks[0], self.issued)
        self.issued += 1
        self.world.post(key, self.rank, (op, x, kw))
        what = f"{op} over {self.names} on the rank at {self.world.coordinates[self.rank]}"
        return lambda: self._finish(self.world.collect(key, self.ranks, what), what)

    def send(self, x: Tensor, to: int) -> Callable[[], Tensor]:
        self.world.post(self._next(self.index, to), self.rank, x)
        return lambda: x

    def recv(self, into: Tensor, source: int) -> Callable[[], Tensor]:
        key, sender = self._next(source, self.index), self.ranks[source]
        what = (
            f"recv from {source} over {self.names} on the rank at "
            f"{self.world.coordinates[self.rank]}"
        )

        def finish() -> Tensor:
            (x,) = self.world.collect(key, [sender], what)
            if x.shape != into.shape or x.dtype != into.dtype:
                raise ValueError(
                    f"{what}: {list(into.shape)} {into.dtype} is expected, but {list(x.shape)} "
                    f"{x.dtype} was sent"
                )
            return into.copy_(x.detach())

        return finish

    def _next(self, source: int, to: int) -> tuple[Any, ...]:
        self.sent[source, to] += 1
        return (self.names, self.ranks[0], source, to, self.sent[source, to])

    def _finish(self, posted: list[tuple[str, Tensor, Mapping[str, Any]]], what: str) -> Tensor:
        for rank, (op, x, _) in zip(self.ranks, posted, strict=True):
            mine = posted[self.index]
            same_shape = x.shape == mine[1].shape or op == "ragged_all_to_all"
            if op != mine[0] or x.dtype != mine[1].dtype or not same_shape:
                raise ValueError(
                    f"{what}: operand {list(mine[1].shape)} {mine[1].dtype}, but the rank at "
                    f"{self.world.coordinates[rank]} called {op} of {list(x.shape)} {x.dtype}"
                )
        return _mine(posted, self.index, what)


def _mine(posted: list[tuple[str, Tensor, Mapping[str, Any]]], me: int, what: str) -> Tensor:
    """This rank's result; never a tensor that another rank holds."""
    xs, n = [x for _, x, _ in posted], len(posted)
    op, x, kw = posted[me]
    match op:
        case "psum":
            return torch.stack(xs).sum(0, dtype=x.dtype)
        case "pmax":
            return torch.stack(xs).amax(0)
        case "all_gather" | "all_gather_invariant":
            return torch.cat(xs, kw["dim"])
        case "psum_scatter":
            return torch.stack([t.chunk(n, kw["dim"])[me] for t in xs]).sum(0, dtype=x.dtype)
        case "pslice":
            return x.chunk(n, kw["dim"])[me].clone()
        case "all_to_all":
            return torch.cat([t.chunk(n, kw["split"])[me] for t in xs], kw["concat"])
        case "ragged_all_to_all":
            parts = [t.split(k["send"])[me] for _, t, k in posted]
            if [len(p) for p in parts] != list(kw["recv"]):
                raise ValueError(
                    f"{what}: recv={list(kw['recv'])}, but the ranks send {[len(p) for p in parts]}"
                )
            return torch.cat(parts)
        case "ppermute":
            source = {target: s for s, target in kw["perm"]}
            return xs[source[me]].clone() if me in source else torch.zeros_like(x)
        case _:
            raise ValueError(f"{what}: no such collective")


def each_rank(
    f: Callable[..., Any],
    mesh: Mesh,
    args: Callable[[Coordinate], tuple[Any, ...]],
    *,
    timeout: float | int = 60.0,
) -> list[Any]:
    """``f(axes, *args(coordinate))`` on every rank; any Python goes in and out.

    Args:
        f: the function. Backward passes run on the rank's own thread.
        mesh: of which each rank is a thread.
        args: a rank's arguments, made on its thread.
        timeout: seconds that a rank waits for the others in a collective.

    Returns:
        The results in the order of ranks.

    Raises:
        ValueError: ranks disagree about a collective, or one does not come in time; names
            coordinates.
        Exception: whatever ``f`` raises first, with a note that says on which rank.
    """
    coordinates = list(mesh.coordinates())
    world = _World(coordinates, timeout)
    names = tuple(a.name for a in mesh.axes().atoms)
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    outer, own = current_records(), [CollectiveRecord() for _ in coordinates]

    def go(rank: int) -> None:
        failed = True
        try:
            devices.attach_thread()
            torch.autograd.set_multithreading_enabled(
                False
            )  # a device's shared backward thread would deadlock
            with record_into((own[rank],)):
                results[rank] = f(
                    mesh.axes(_ThreadHost(world, rank, names)), *args(coordinates[rank])
                )
            failed = False
        except BaseException as e:
            e.add_note(f"on the rank at {coordinates[rank]}")
            errors[rank] = e
        finally:
            world.leave(rank, failed=failed)

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run, args=(go, r), name=f"rank {r}", daemon=True
        )
        for r in range(len(coordinates))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for r in outer:
        r.events.extend(own[0].events)
        before = r.ranks or [CollectiveRecord() for _ in own]
        r.ranks = [CollectiveRecord(a.events + b.events) for a, b in zip(before, own, strict=True)]
    if errors:
        raise next(
            (e for e in errors.values() if not isinstance(e, _AbortedError)),
            next(iter(errors.values())),
        )
    return [results[r] for r in range(len(coordinates))]
