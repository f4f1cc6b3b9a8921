"""Bytes that a rank holds of each weight, with its gradient and optimiser state."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from k31fn import tree
from k31fn.config.recipe import Recipe
from k31fn.parallel.fsdp.placement import reduce_dtype
from k31fn.trainer.forecast.abstract_rank import abstract_rank
from k31fn.trainer.state import TrainState

__all__ = ["RankWeight", "rank_weights"]


class RankWeight(NamedTuple):
    """A rank's part of one weight, with what belongs to it; in bytes.

    Attributes:
        path: of the weight.
        shape: of the whole.
        part: of this rank's part.
        axes: of the mesh, by dimension.
        weight: of the part.
        gradient: of its gradient; 0 if it is not trained.
        optimizer: of its part of the optimiser's state.
    """

    path: str
    shape: tuple[int, ...]
    part: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    weight: int
    gradient: int
    optimizer: int


def rank_weights(recipe: Recipe, stage_rank: int = 0) -> list[RankWeight]:
    """What a rank holds of each weight; all ranks at one place of the pipeline hold as much."""
    layout, state = abstract_rank(recipe, stage_rank)
    optimizer_bytes = _optimizer_bytes(state)
    local_params = dict(tree.flatten_with_paths(state.params))
    placements = tree.leaves(layout.placements)
    result = []
    for (path, spec), place in zip(tree.flatten_with_paths(layout.specs), placements, strict=True):
        part = local_params[path]
        grad_dtype = reduce_dtype(part, place)
        axes = tuple(tuple(a.name for a in dim) for dim in place.dims)
        result.append(
            RankWeight(
                path=path,
                shape=spec.shape,
                part=tuple(part.shape),
                axes=axes,
                weight=part.nbytes,
                gradient=0 if "frozen" in spec.tags else part.numel() * grad_dtype.itemsize,
                optimizer=optimizer_bytes[path],
            )
        )
    return result


def _optimizer_bytes(state: TrainState) -> Counter[str]:
    """Bytes of the optimiser's state by path of the weight that they belong to."""
    weights = set(tree.paths(state.params))
    sizes = Counter[str]()
    for path, x in tree.flatten_with_paths(state.opt_state):
        # The optimiser's trees have the parameters' paths behind names of their own.
        names = path.split(".")
        while names and ".".join(names) not in weights:
            names.pop(0)
        # what belongs to no weight, such as the number of steps, is counted under ""
        sizes[".".join(names)] += x.nbytes
    return sizes
