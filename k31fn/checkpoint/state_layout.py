"""How a state lies on the ranks of a mesh, and which of those that hold the same part writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import tree
from k31fn.checkpoint.boxes import Box
from k31fn.parallel.collectives import own_index
from k31fn.parallel.mesh import Mesh, MeshAxes
from k31fn.parallel.partition import P, resolve, tile

__all__ = ["Holders", "StateLayout", "TensorPart"]


class Holders(NamedTuple):
    """Which ranks hold a tensor of the state.

    Attributes:
        spec: how it is split.
        stages: the pipeline stages that have it; ``()``: all.
    """

    spec: P = P()
    stages: tuple[int, ...] = ()


class TensorPart(NamedTuple):
    """A rank's part of a tensor.

    Attributes:
        whole: the tensor's shape.
        dtype: of its elements.
        box: what the rank holds of it.
        writes: whether it is the one that writes this part.
    """

    whole: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    writes: bool


@dataclass(frozen=True)
class StateLayout:
    """The whole state and how it is split.

    Attributes:
        whole: the state of one device, of meta tensors.
        holders: by path in it; a path that is not named is held by all, whole.
        mesh: of the ranks.
    """

    whole: Any
    holders: Mapping[str, Holders] = field(default_factory=dict)
    mesh: Mesh = field(default_factory=Mesh)

    def parts(self, axes: MeshAxes) -> dict[str, TensorPart]:
        """This rank's part of each tensor that it holds, by path.

        Ranks that hold the same part take turns, tensor by tensor, so that replicas share the work.
        """
        coordinate = {axis.name: own_index(axis) for axis in axes.atoms}
        parts: dict[str, TensorPart] = {}
        for number, (path, whole) in enumerate(tree.flatten_with_paths(self.whole)):
            holders = self.holders.get(path, Holders())
            if holders.stages and coordinate.get("pp", 0) not in holders.stages:
                continue
            slices = tile(holders.spec, whole.shape, self.mesh, coordinate)
            start = tuple(s.start for s in slices)
            shape = tuple(s.stop - s.start for s in slices)
            replica, num_replicas = _replica(holders, whole, self.mesh, axes, coordinate)
            # Counted over all tensors of the state, also those that this rank lacks: every rank
            # must come to the same turn.
            writes = number % num_replicas == replica
            parts[path] = TensorPart(tuple(whole.shape), whole.dtype, Box(start, shape), writes)
        return parts


def _replica(
    holders: Holders, whole: Tensor, mesh: Mesh, axes: MeshAxes, coordinate: Mapping[str, int]
) -> tuple[int, int]:
    """This rank's number among those that hold the same part, and how many they are."""
    split: set[str] = set()
    for dim in resolve(holders.spec, mesh.axes(), whole.ndim):
        split.update(axis.name for axis in dim)
    replica = 0
    num_replicas = 1
    for axis in axes.atoms:
        if axis.name in split:
            continue
        among = holders.stages if axis.name == "pp" and holders.stages else range(axis.size)
        replica = replica * len(among) + among.index(coordinate[axis.name])
        num_replicas *= len(among)
    return replica, num_replicas
