"""How a state lies on the ranks of a mesh, and which of those that hold the same part writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import tree
from k31fn.checkpoint.blocks import Box
from k31fn.parallel.collectives import own_index
from k31fn.parallel.mesh import Mesh, MeshAxes
from k31fn.parallel.partition import P, resolve, tile

__all__ = ["Held", "Layout", "Part"]


class Held(NamedTuple):
    """Which ranks hold a tensor of the state.

    Attributes:
        spec: how it is split.
        stages: the pipeline stages that have it; ``()``: all.
    """

    spec: P = P()
    stages: tuple[int, ...] = ()


class Part(NamedTuple):
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
class Layout:
    """The whole state and how it is split.

    Attributes:
        whole: the state of one device, of meta tensors.
        held: by path in it; a path that is not named is held by all, whole.
        mesh: of the ranks.
    """

    whole: Any
    held: Mapping[str, Held] = field(default_factory=dict)
    mesh: Mesh = field(default_factory=Mesh)

    def parts(self, axes: MeshAxes) -> dict[str, Part]:
        """This rank's part of each tensor that it holds, by path.

        Ranks that hold the same part take turns, tensor by tensor, so that replicas share the work.
        """
        coordinate = {a.name: own_index(a) for a in axes.atoms}
        found = {}
        for number, (path, like) in enumerate(tree.flatten_with_paths(self.whole)):
            held = self.held.get(path, Held())
            if held.stages and coordinate.get("pp", 0) not in held.stages:
                continue
            slices = tile(held.spec, like.shape, self.mesh, coordinate)
            box = Box(tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices))
            index, size = _replica(held, like, self.mesh, axes, coordinate)
            found[path] = Part(tuple(like.shape), like.dtype, box, number % size == index)
        return found


def _replica(
    held: Held, like: Tensor, mesh: Mesh, axes: MeshAxes, coordinate: Mapping[str, int]
) -> tuple[int, int]:
    """This rank's number among those that hold the same part, and how many they are."""
    split = {a.name for dim in resolve(held.spec, mesh.axes(), like.ndim) for a in dim}
    index, size = 0, 1
    for axis in axes.atoms:
        if axis.name in split:
            continue
        among = held.stages if axis.name == "pp" and held.stages else range(axis.size)
        index, size = index * len(among) + among.index(coordinate[axis.name]), size * len(among)
    return index, size
