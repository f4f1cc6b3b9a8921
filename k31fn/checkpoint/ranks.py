"""The state of a run on several ranks, as one tree on the first of them.

Rank 0 writes the whole state: :func:`collect` brings the parts of one tensor after the other to its host memory, and
:func:`distribute` sends them back out, to ranks of any mesh. So a checkpoint does not know the mesh it was written on.
Rank 0 must hold the whole state on its host; the parts travel over the host's network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import tree
from k31fn.parallel import Mesh, MeshAxes, P, local_shape, ragged_all_to_all, tile
from k31fn.parallel.point_to_point import own_index

__all__ = ["Held", "collect", "distribute"]


class Held(NamedTuple):
    """Which ranks hold a tensor of the state.

    Attributes:
        spec: how it is split.
        stages: the pipeline stages that have it; ``()``: all.
    """

    spec: P = P()
    stages: tuple[int, ...] = ()


def collect(state: Any, whole: Any, held: Mapping[str, Held], mesh: Mesh, axes: MeshAxes) -> Any:
    """The whole state, on the first rank's CPU; ``()`` on the others. Every rank must call it.

    On a mesh of one rank it is ``state`` itself.

    Args:
        state: what this rank holds; a tree like ``whole``, or parts of it.
        whole: the state of one device, of meta tensors.
        held: by path in it; a path that is not named is held by all, whole.
        mesh: of the ranks.
        axes: bound to this one.
    """
    if mesh.world_size == 1:
        return state
    mine, full = dict(tree.flatten_with_paths(state)), []
    for path, like in tree.flatten_with_paths(whole):
        leaf = _Leaf(like, held.get(path, Held()), mesh)
        full.append(leaf.collect(mine.get(path), axes))
    return tree.unflatten(tree.flatten(whole)[1], full) if own_index(axes.atoms) == 0 else ()


def distribute(
    full: Any, state: Any, whole: Any, held: Mapping[str, Held], mesh: Mesh, axes: MeshAxes, *, device: torch.device
) -> Any:
    """What each rank holds of the first rank's ``full`` state. Every rank must call it.

    Args:
        full: on the first rank, as :func:`collect` returns it; not looked at on others.
        state: a tree like what this rank is to hold; of meta tensors.
        whole: as for :func:`collect`; so are the others.
        held: see there.
        mesh: see there.
        axes: see there.
        device: where to put the tensors.
    """
    if mesh.world_size == 1:
        return tree.map(lambda x: x.to(device), full)
    first = own_index(axes.atoms) == 0
    values = tree.leaves(full) if first else [()] * len(tree.leaves(whole))
    wanted, mine = set(tree.paths(state)), {}
    for (path, like), value in zip(tree.flatten_with_paths(whole), values, strict=True):
        part = _Leaf(like, held.get(path, Held()), mesh).distribute(value, axes)
        if path in wanted:
            mine[path] = part.to(device)
    return tree.map_with_path(lambda path, _: mine[path], state)


class _Leaf:
    """One tensor of the state and its tiles."""

    def __init__(self, like: Tensor, held: Held, mesh: Mesh) -> None:
        self.like, self.held, self.mesh = like, held, mesh
        self.local = torch.Size(local_shape(held.spec, like.shape, mesh))
        self.nbytes = self.local.numel() * like.element_size()
        self.coordinates = list(mesh.coordinates())
        self.holders = [r for r, c in enumerate(self.coordinates) if not held.stages or c.get("pp", 0) in held.stages]

    def collect(self, part: Any, axes: MeshAxes) -> Tensor | tuple[()]:
        """Each tile is sent by the first rank that holds it."""
        owners = {self._key(r): r for r in reversed(self.holders)}
        me = own_index(axes.atoms)
        sends = me in owners.values()
        data = _to_bytes(part) if sends else torch.empty(0, dtype=torch.uint8)
        arrived = _exchange(data, {(r, 0): self.nbytes for r in owners.values()}, self.mesh, axes)
        if me:
            return ()
        whole = torch.empty(self.like.shape, dtype=self.like.dtype)
        for r, piece in zip(sorted(owners.values()), arrived.split(max(self.nbytes, 1)), strict=True):
            whole[self._tile(r)] = self._from_bytes(piece)
        return whole

    def distribute(self, whole: Tensor | tuple[()], axes: MeshAxes) -> Tensor:
        """In rounds, of which each sends at most about as much as the whole tensor."""
        me, at_once = own_index(axes.atoms), len({self._key(r) for r in self.holders})
        found = torch.empty(0, dtype=torch.uint8)
        for i in range(0, len(self.holders), at_once):
            targets = self.holders[i : i + at_once]
            data = torch.empty(0, dtype=torch.uint8)
            if isinstance(whole, Tensor):
                data = torch.cat([_to_bytes(whole[self._tile(r)]) for r in targets])
            arrived = _exchange(data, {(0, r): self.nbytes for r in targets}, self.mesh, axes)
            found = arrived if me in targets else found
        return self._from_bytes(found) if me in self.holders else found

    def _tile(self, rank: int) -> tuple[slice, ...]:
        return tile(self.held.spec, self.like.shape, self.mesh, self.coordinates[rank])

    def _key(self, rank: int) -> tuple[int, ...]:
        return tuple(s.start for s in self._tile(rank))

    def _from_bytes(self, data: Tensor) -> Tensor:
        return data.clone().view(self.like.dtype).view(self.local)


def _to_bytes(x: Tensor) -> Tensor:
    return x.detach().to("cpu").contiguous().flatten().view(torch.uint8)


def _exchange(data: Tensor, sizes: Mapping[tuple[int, int], int], mesh: Mesh, axes: MeshAxes) -> Tensor:
    """Bytes from rank to rank, by ``(from, to)``; all ranks take part."""
    me, n = own_index(axes.atoms), mesh.world_size
    send, recv = [sizes.get((me, r), 0) for r in range(n)], [sizes.get((r, me), 0) for r in range(n)]
    return ragged_all_to_all(data, axes.atoms, send, recv)
