"""Ranks as processes: gloo, NCCL or HCCL, as ``k31fn.device`` says.

Groups are made when a tuple of axes is first used, by its members only. Nothing but tensors
travels: Python values go as JSON bytes.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k31fn import device as devices
from k31fn.parallel.axis import Axes
from k31fn.parallel.collectives import all_gather
from k31fn.parallel.flight_recorder import FlightRecorder, IssuedCollective
from k31fn.parallel.mesh import Coordinate, Mesh, MeshAxes

__all__ = [
    "CollectiveError",
    "CollectiveProgress",
    "axes_of_process",
    "exchange_json",
    "progress_of",
    "start_processes",
    "stop_processes",
]


class CollectiveError(RuntimeError):
    """A collective or a message did not come to its end: another rank died, hangs or disagrees."""


@dataclass
class CollectiveProgress:
    """The state of a process's collectives, for another thread to look at.

    Attributes:
        issued: how many so far.
        waiting: the one that it waits for; empty while it does something else.
        flight: the last ones.
    """

    issued: int = 0
    waiting: str = ""
    flight: FlightRecorder = field(default_factory=FlightRecorder)

    def begin(self, kind: str, axes: tuple[str, ...], x: Tensor) -> IssuedCollective:
        """Notes one that is about to be issued."""
        self.issued += 1
        return self.flight.add(kind, axes, tuple(x.shape), str(x.dtype).removeprefix("torch."))


def start_processes(device_type: str, *, timeout: float | int = 600.0) -> dist.Store:
    """Joins the process group that ``torchrun`` (or its environment variables) describes.

    Args:
        device_type: ``cpu``, ``cuda`` or ``npu``; decides the backend.
        timeout: seconds after which a collective that a rank does not join raises (with NCCL: ends
            the process).

    Returns:
        The key-value store that the processes share.
    """
    limit = datetime.timedelta(seconds=timeout)
    # By hand, where init_process_group would do it: this way there is a store to return, on which
    # watchdogs and shared work can meet without a collective.
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=limit)))
    store.set_timeout(limit)
    backend = devices.process_group_backend(device_type)
    # A prefix of its own keeps the group's keys apart from those of other users of the store.
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=limit
    )
    return store


def stop_processes(axes: MeshAxes | None = None) -> None:
    """Leaves the process group.

    Args:
        axes: those that were bound to it, which lose their groups: one that still lives when the
            interpreter ends may abort the process (gloo, torch 2.13: ``terminate called without an
            active exception``).
    """
    for axis in axes.atoms if axes else ():
        if isinstance(axis.host, _ProcessHost):
            axis.host.channels.clear()
    dist.destroy_process_group()


def axes_of_process(mesh: Mesh) -> tuple[MeshAxes, Coordinate]:
    """The mesh's axes bound to this process, and its coordinate.

    Raises:
        ValueError: the mesh does not have as many ranks as there are processes.
    """
    mesh.check_world(dist.get_world_size())
    host = _ProcessHost(mesh, tuple(a.name for a in mesh.axes().atoms))
    return mesh.axes(host), mesh.coordinate(dist.get_rank())


def progress_of(axes: MeshAxes) -> CollectiveProgress:
    """The progress of this process's collectives over axes that :func:`axes_of_process` bound; for
    other axes one that stands still.
    """
    host = axes.atoms[0].host if axes.atoms else None
    return host.progress if isinstance(host, _ProcessHost) else CollectiveProgress()


def exchange_json(value: Any, axis: Axes, *, device: torch.device | str = "cpu") -> list[Any]:
    """The value that each rank of ``axis`` passed, in rank order; any JSON value, sent as bytes.
    For threads as well.

    Args:
        value: of this rank.
        axis: over which; all its ranks must call.
        device: on which the bytes travel: that of the process group's backend.
    """
    data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=device)
    # Sizes first: a gather takes parts of one size, and bytes of values differ in number.
    sizes = all_gather(torch.tensor([data.numel()], device=device), axis).tolist()
    padded = torch.nn.functional.pad(data, (0, max(sizes) - data.numel()))
    rows = all_gather(padded[None], axis)
    values: list[Any] = []
    for row, size in zip(rows, sizes, strict=True):
        values.append(json.loads(bytes(row[:size].tolist())))
    return values


@dataclass(eq=False)
class _ProcessHost:
    mesh: Mesh
    names: tuple[str, ...]
    channels: dict[tuple[str, ...], _ProcessChannel] = field(default_factory=dict)
    progress: CollectiveProgress = field(default_factory=CollectiveProgress)

    def token(self, name: str) -> Tensor | None:
        return None

    def channel(self, names: tuple[str, ...]) -> _ProcessChannel:
        if names not in self.channels:
            rank = dist.get_rank()
            ranks = self.mesh.group_of(rank, names)
            where = f"over {names} on rank {rank} at {self.mesh.coordinate(rank)}"
            with _named(f"making the group {where}", self.progress):
                group: Any = dist.group.WORLD
                if len(ranks) < dist.get_world_size():
                    # Its members only: with a barrier of the world, a group that some ranks never
                    # use (that of a pipeline stage) would wait for them for ever.
                    group = dist.new_group(ranks, use_local_synchronization=True)
            self.channels[names] = _ProcessChannel(
                group, len(ranks), ranks.index(rank), where, self.progress, names
            )
        return self.channels[names]


# torch 2.13 renames these; the old names, all that 2.11 has, warn there.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(eq=False)
class _ProcessChannel:
    group: Any
    size: int
    index: int
    where: str  # for messages
    progress: CollectiveProgress = field(default_factory=CollectiveProgress)
    names: tuple[str, ...] = ()

    def start(self, op: str, x: Tensor, kw: Mapping[str, Any]) -> Callable[[], Tensor]:
        # Noted before it is issued: one that hangs on its way in must be in the report.
        issued = self.progress.begin(op, self.names, x)
        what = f"{op} {self.where}"
        with _named(what, self.progress):
            wait = self._issue(op, x.detach().contiguous(), kw)

        def wait_and_note() -> Tensor:
            with _named(what, self.progress):
                y = wait()
            issued.waited = time.monotonic()
            return y

        return wait_and_note

    def send(self, x: Tensor, to: int) -> Callable[[], Tensor]:
        x = x.detach().contiguous()
        return self._start_message(
            f"send to {to}", lambda: dist.isend(x, group=self.group, group_dst=to), x
        )

    def recv(self, into: Tensor, source: int) -> Callable[[], Tensor]:
        return self._start_message(
            f"recv from {source}",
            lambda: dist.irecv(into, group=self.group, group_src=source),
            into,
        )

    def _start_message(
        self, message: str, issue: Callable[[], Any], buffer: Tensor
    ) -> Callable[[], Tensor]:
        """Issues a send or a receive; the function returned waits, and keeps the buffer alive until
        then.
        """
        issued = self.progress.begin(message, self.names, buffer)
        what = f"{message} {self.where}"
        with _named(what, self.progress):
            work = issue()

        def wait_and_note() -> Tensor:
            with _named(what, self.progress):
                work.wait()
            issued.waited = time.monotonic()
            return buffer

        return wait_and_note

    def _issue(self, op: str, x: Tensor, kw: Mapping[str, Any]) -> Callable[[], Tensor]:
        match op:
            case "psum" | "pmax":
                y = x.clone()  # all_reduce writes into its operand, which is the caller's
                kind = dist.ReduceOp.SUM if op == "psum" else dist.ReduceOp.MAX
                return _then(dist.all_reduce(y, kind, group=self.group, async_op=True), lambda: y)
            case "all_gather" | "all_gather_invariant":
                return self._all_gather(x, kw["dim"])
            case "psum_scatter":
                return self._psum_scatter(x, kw["dim"])
            case "pslice":
                part = x.chunk(self.size, kw["dim"])[self.index].clone()
                return lambda: part
            case "all_to_all":
                parts = torch.stack(x.chunk(self.size, kw["split"]))
                y = torch.empty_like(parts)
                work = dist.all_to_all_single(y, parts, group=self.group, async_op=True)
                return _then(work, lambda: torch.cat(y.unbind(0), kw["concat"]))
            case "ragged_all_to_all":
                y = x.new_empty(sum(kw["recv"]), *x.shape[1:])
                recv = list(kw["recv"])
                send = list(kw["send"])
                work = dist.all_to_all_single(y, x, recv, send, group=self.group, async_op=True)
                return _then(work, lambda: y)
            case "ppermute":
                return self._ppermute(x, kw["perm"])
            case _:
                raise ValueError(f"{op} over process groups: no such collective")

    def _all_gather(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        # The backend gathers along the first dimension only; along another one the parts are
        # concatenated when they have come.
        y = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        work = _gather(y, x, group=self.group, async_op=True)
        return _then(work, lambda: y if dim == 0 else torch.cat(y.chunk(self.size), dim))

    def _psum_scatter(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        parts = x if dim == 0 else torch.cat(x.chunk(self.size, dim))
        y = parts.new_empty(parts.shape[0] // self.size, *parts.shape[1:])
        return _then(_reduce_scatter(y, parts, group=self.group, async_op=True), lambda: y)

    def _ppermute(self, x: Tensor, perm: tuple[tuple[int, int], ...]) -> Callable[[], Tensor]:
        # As one exchange in which most sizes are 0, and not as sends and receives: every rank
        # issues it, also one that neither sends nor receives, so the group counts alike.
        send = [0] * self.size
        recv = [0] * self.size
        for source, target in perm:
            if source == self.index:
                send[target] = x.numel()
            if target == self.index:
                recv[source] = x.numel()
        received = x.new_empty(sum(recv))
        sent = x.flatten() if any(send) else x.new_empty(0)
        work = dist.all_to_all_single(received, sent, recv, send, group=self.group, async_op=True)
        is_target = any(target == self.index for _, target in perm)
        return _then(work, lambda: received.view(x.shape) if is_target else torch.zeros_like(x))


def _then(work: Any, result: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def finish() -> Tensor:
        work.wait()
        return result()

    return finish


@contextlib.contextmanager
def _named(what: str, progress: CollectiveProgress) -> Iterator[None]:
    """A scope in which the backend's errors (a timeout, a lost peer) say which collective it was,
    and on which rank.
    """
    progress.waiting = what
    try:
        yield
    except RuntimeError as e:
        raise CollectiveError(f"{e}\nin {what}") from e
    finally:
        progress.waiting = ""
