"""The part of a checkpoint that a rank reads and writes, and how ranks learn of each other's
failures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from k31fn import tree
from k31fn.hf_format.transforms import Tile, whole
from k31fn.parallel.backends.processes import exchange_json
from k31fn.parallel.mesh import Coordinate, Mesh, MeshAxes
from k31fn.parallel.partition import Partition, broadcast, resolve, tiles
from k31fn.params import ParamSpec

__all__ = ["ALONE", "RankPart", "part_of"]


@dataclass(frozen=True)
class RankPart:
    """A rank's part of the weights.

    Attributes:
        tile: ``(path, spec) -> slices`` of each parameter, as for :func:`k31fn.params.init`.
        writes: whether this rank writes the weight at a path: one of those that hold the same tile
            does.
        first: whether it makes the folder and finishes it: one rank does.
        meet: hands in an error, "" for none, and gives those of all ranks; all ranks call it
            equally often.
    """

    tile: Callable[[str, ParamSpec], Tile]
    writes: Callable[[str], bool]
    first: bool
    meet: Callable[[str], list[str]]

    def stage(self, work: Callable[[], Any]) -> Any:
        """Does ``work`` and waits for the others.

        Raises:
            Exception: what ``work`` raised.
            RuntimeError: another rank's work failed; says which and why.
        """
        error: Exception | None = None
        result = None
        try:
            result = work()
        except Exception as e:  # whatever it is, the others must not wait for this rank
            error = e
        errors = self.meet("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(errors)} ranks failed; {failed[0]}")
        return result


ALONE = RankPart(lambda _, spec: whole(spec.shape), lambda _: True, True, lambda error: [error])
"""One process that holds everything."""


def part_of(
    specs: Any,
    partition: Partition,
    mesh: Mesh,
    axes: MeshAxes,
    coordinate: Coordinate,
    *,
    device: torch.device | str = "cpu",
) -> RankPart:
    """A rank's part of parameters split over a mesh. Of the ranks that hold the same tile, the
    first writes.

    Args:
        specs: of the parameters.
        partition: of the same.
        mesh: of the ranks.
        axes: bound to this rank.
        coordinate: of this rank.
        device: that of the process group's backend, on which ranks tell each other of failures.
    """
    writes: dict[str, bool] = {}
    leaves = zip(tree.paths(specs), tree.leaves(specs), broadcast(partition, specs), strict=True)
    for path, spec, how in leaves:
        split: set[str] = set()
        for dim in resolve(how, mesh.axes(), len(spec.shape)):
            split.update(axis.name for axis in dim)
        # Ranks that differ along the other axes hold the same tile.
        writes[path] = all(coordinate[a.name] == 0 for a in axes.atoms if a.name not in split)
    first = not any(coordinate.values())

    def meet(error: str) -> list[str]:
        return exchange_json(error, axes.atoms, device=device) if axes.atoms else [error]

    tile = tiles(specs, partition, mesh, coordinate)
    # A path without a spec is the balance, which is whole on every rank.
    return RankPart(tile, lambda path: writes.get(path, first), first, meet)
