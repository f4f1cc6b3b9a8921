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
from k31fn.parallel.axis import axis_names
from k31fn.parallel.collective_record import CollectiveRecord, current_records, record_into
from k31fn.parallel.mesh import Coordinate, Mesh

__all__ = ["each_rank"]


class _AbortedError(RuntimeError):
    """Another rank failed first.

    A class of its own, so that :func:`each_rank` raises that rank's error and not this one.
    """


@dataclass(eq=False)
class _World:
    """The state that the ranks share.

    Attributes:
        coordinates: of each rank.
        timeout: seconds that a rank waits for others.
        changed: guards what is below, and wakes those who wait when it changes.
        slots: under a collective's key, what each rank posted.
        num_taken: how many ranks have collected under a key.
        ended: ranks whose function has ended.
        failed: whether one of them raised.
    """

    coordinates: list[Coordinate]
    timeout: float | int
    changed: threading.Condition = field(default_factory=threading.Condition)
    slots: dict[tuple[Any, ...], dict[int, Any]] = field(default_factory=dict)
    num_taken: dict[tuple[Any, ...], int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    failed: bool = False

    def post(self, key: tuple[Any, ...], rank: int, value: Any) -> None:
        with self.changed:
            self.slots.setdefault(key, {})[rank] = value
            self.changed.notify_all()

    def collect(self, key: tuple[Any, ...], ranks: list[int], what: str) -> list[Any]:
        """The values that all ``ranks`` posted under ``key``, in their order."""
        deadline = time.monotonic() + self.timeout
        with self.changed:
            posted = self.slots.setdefault(key, {})
            while True:
                missing = [r for r in ranks if r not in posted]
                if not missing:
                    break
                # A rank that will never post is named at once: a timeout would hide its error.
                if self.failed:
                    raise _AbortedError(f"{what}: another rank failed")
                for rank in missing:
                    if rank in self.ended:
                        raise ValueError(
                            f"{what}: the rank at {self.coordinates[rank]} returned without taking "
                            "part"
                        )
                woken = self.changed.wait(max(0.0, deadline - time.monotonic()))
                # Woken by a post under another key, it looks again; the deadline stays.
                if not woken and time.monotonic() >= deadline:
                    where = [self.coordinates[r] for r in missing]
                    raise ValueError(f"{what}: waited {self.timeout} s for the ranks at {where}")
            values = [posted[r] for r in ranks]
            # The last one clears the slot: it holds tensors that nobody else may need any more.
            self.num_taken[key] = self.num_taken.get(key, 0) + 1
            if self.num_taken[key] == len(ranks):
                del self.slots[key]
                del self.num_taken[key]
        return values

    def leave(self, rank: int, *, failed: bool) -> None:
        with self.changed:
            self.ended.add(rank)
            self.failed |= failed
            self.changed.notify_all()


@dataclass(eq=False)
class _ThreadHost:
    """One rank's view of the world."""

    world: _World
    mesh: Mesh
    rank: int
    names: tuple[str, ...]
    channels: dict[tuple[str, ...], _ThreadChannel] = field(default_factory=dict)

    def token(self, name: str) -> Tensor | None:
        return None

    def channel(self, names: tuple[str, ...]) -> _ThreadChannel:
        if names not in self.channels:
            ranks = self.mesh.group_of(self.rank, names)
            self.channels[names] = _ThreadChannel(self.world, self.rank, ranks, names)
        return self.channels[names]


class _ThreadChannel:
    """Ranks exchange references to tensors, each posts its n-th collective under number n."""

    def __init__(self, world: _World, rank: int, ranks: list[int], names: tuple[str, ...]) -> None:
        self.world = world
        self.rank = rank
        self.ranks = ranks
        self.names = names
        self.size = len(ranks)
        self.index = ranks.index(rank)
        self.num_issued = 0
        self.num_messages: Counter[tuple[int, int]] = Counter()  # by (from, to)

    def start(self, op: str, x: Tensor, kw: Mapping[str, Any]) -> Callable[[], Tensor]:
        # Names and first rank say which group it is, and the number which of its collectives: all
        # ranks of a group issue in one order, or disagree and are told so.
        key = (self.names, self.ranks[0], self.num_issued)
        self.num_issued += 1
        self.world.post(key, self.rank, (op, x, kw))
        what = f"{op} over {self.names} on the rank at {self.world.coordinates[self.rank]}"
        return lambda: self._finish(self.world.collect(key, self.ranks, what), what)

    def send(self, x: Tensor, to: int) -> Callable[[], Tensor]:
        self.world.post(self._next(self.index, to), self.rank, x)
        return lambda: x

    def recv(self, into: Tensor, source: int) -> Callable[[], Tensor]:
        key = self._next(source, self.index)
        sender = self.ranks[source]
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
        """The key of the next message, which sender and receiver count alike."""
        self.num_messages[source, to] += 1
        return (self.names, self.ranks[0], source, to, self.num_messages[source, to])

    def _finish(self, posted: list[tuple[str, Tensor, Mapping[str, Any]]], what: str) -> Tensor:
        op_here, x_here, _ = posted[self.index]
        # Ranks that run unlike code meet in the same number: said here, with both sides, and not
        # as a wrong sum.
        for rank, (op, x, _) in zip(self.ranks, posted, strict=True):
            same_shape = x.shape == x_here.shape or op == "ragged_all_to_all"
            if op != op_here or x.dtype != x_here.dtype or not same_shape:
                raise ValueError(
                    f"{what}: operand {list(x_here.shape)} {x_here.dtype}, but the rank at "
                    f"{self.world.coordinates[rank]} called {op} of {list(x.shape)} {x.dtype}"
                )
        return _compute_one_rank(posted, self.index, what)


def _compute_one_rank(
    posted: list[tuple[str, Tensor, Mapping[str, Any]]], me: int, what: str
) -> Tensor:
    """The result of rank ``me``; never a tensor that another rank holds, for it may be changed."""
    xs = [x for _, x, _ in posted]
    n = len(posted)
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
            sizes = list(map(len, parts))
            if sizes != list(kw["recv"]):
                raise ValueError(f"{what}: recv={list(kw['recv'])}, but the ranks send {sizes}")
            return torch.cat(parts)
        case "ppermute":
            for source, target in kw["perm"]:
                if target == me:
                    return xs[source].clone()
            return torch.zeros_like(x)
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
    names = axis_names(mesh.axes().atoms)
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    rank_records = [CollectiveRecord() for _ in coordinates]

    def run_rank(rank: int) -> None:
        failed = True
        try:
            devices.attach_thread()
            # The backwards of all ranks would share one thread per device, on which the first
            # collective waits for the others, behind it: a deadlock. So each runs on its own.
            torch.autograd.set_multithreading_enabled(False)
            axes = mesh.axes(_ThreadHost(world, mesh, rank, names))
            with record_into((rank_records[rank],)):
                results[rank] = f(axes, *args(coordinates[rank]))
            failed = False
        # Interrupts too: whatever ends a rank must reach those that wait for it.
        except BaseException as e:
            e.add_note(f"on the rank at {coordinates[rank]}")
            errors[rank] = e
        finally:
            world.leave(rank, failed=failed)

    threads: list[threading.Thread] = []
    for rank in range(len(coordinates)):
        # A copy of the context for each: overrides around the call hold on its ranks, and what a
        # rank sets stays its own. A daemon, so that a hanging rank cannot keep the process alive.
        context = contextvars.copy_context()
        threads.append(
            threading.Thread(
                target=context.run, args=(run_rank, rank), name=f"rank {rank}", daemon=True
            )
        )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _add_to_records(rank_records)
    # The error that came first, not those of the ranks that it stopped.
    for e in errors.values():
        if not isinstance(e, _AbortedError):
            raise e
    for e in errors.values():
        raise e
    return [results[rank] for rank in range(len(coordinates))]


def _add_to_records(rank_records: list[CollectiveRecord]) -> None:
    """Writes what the ranks issued into the records around :func:`each_rank`."""
    for record in current_records():
        record.events.extend(rank_records[0].events)
        # A record may span several calls; its ranks go on.
        if not record.ranks:
            record.ranks = [CollectiveRecord() for _ in rank_records]
        for total, rank_record in zip(record.ranks, rank_records, strict=True):
            total.events.extend(rank_record.events)
