"""A rank of a recipe's mesh without the others: its step on meta tensors.

Everything a step does to shapes happens, and nothing is computed. Collectives return at once, so
one process can run the step of any rank of any mesh.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import data, model, segments
from k31fn.autodiff.transforms import vjp
from k31fn.config.recipe import Recipe
from k31fn.layers.patches import Images, Patches
from k31fn.parallel import fsdp
from k31fn.parallel.backends.abstract import abstract_axes
from k31fn.parallel.collective_record import CollectiveRecord, record_collectives
from k31fn.trainer.gradient import make_gradient, make_loss
from k31fn.trainer.layout import RankLayout, lay_out
from k31fn.trainer.state import TrainState, abstract_state, split
from k31fn.trainer.step import make_batches, make_step

__all__ = [
    "META",
    "abstract_rank",
    "local_rows",
    "run_gradient",
    "run_loss",
    "run_step",
]

META = torch.device("meta")


class _AbstractRank(NamedTuple):
    """A rank's layout and its state of meta tensors."""

    layout: RankLayout
    state: TrainState


# Two are remembered: that of a whole model, and that of the model with few layers beside it. More
# would keep large trees alive, of one forecast after another.
@functools.lru_cache(maxsize=2)
def abstract_rank(recipe: Recipe, stage_rank: int = 0) -> _AbstractRank:
    """The first of the ranks at place ``stage_rank`` of the pipeline, which all hold as much."""
    axes = abstract_axes(recipe.mesh, {**recipe.mesh.coordinate(0), "pp": stage_rank})
    layout = lay_out(recipe, axes)
    return _AbstractRank(layout, abstract_state(layout))


def run_step(recipe: Recipe, stage_rank: int = 0) -> CollectiveRecord:
    """The collectives that a rank issues in a step, in order."""
    layout, state = abstract_rank(recipe, stage_rank)
    with record_collectives() as record:
        make_step(layout)(state, _micro_batches(layout), 1e-3)
    return record


def run_gradient(recipe: Recipe, stage_rank: int = 0) -> None:
    """Runs the loss of a rank's step and its gradient, without the update.

    For those who watch what it calls or makes.
    """
    layout, state = abstract_rank(recipe, stage_rank)
    make_gradient(layout)(state, _micro_batches(layout))


def run_loss(recipe: Recipe) -> Any:
    """Runs the loss of one micro-batch, without its gradient.

    What the gradient needs lives as long as what is returned, which has the pullback in it.
    """
    # By position, as all ask: the cache takes another spelling for another rank, and a second state
    # would be counted as what the loss keeps.
    layout, state = abstract_rank(recipe, 0)
    trained, frozen = split(fsdp.enter_step(state.params, layout.placements), layout.specs)
    loss = make_loss(layout, frozen, state.balance)
    batch = _micro_batches(layout)[0]
    return vjp(lambda weights: loss(weights, batch), trained, has_aux=True)


def local_rows(recipe: Recipe) -> int:
    """Rows of a rank in a step."""
    return recipe.batch_size // (recipe.mesh.dp * recipe.mesh.fsdp)


def _micro_batches(layout: RankLayout) -> list[model.Batch]:
    recipe = layout.recipe
    tokens = torch.empty(local_rows(recipe), recipe.length, dtype=torch.int64, device=META)
    packing = segments.Segments(tokens, tokens)
    rows = data.Example(tokens, tokens, packing, _images(recipe, tokens))
    return make_batches(recipe, rows, META, layout.axes)


def _images(recipe: Recipe, tokens: Tensor) -> Images | tuple[()]:
    """Images of so many patches as the recipe's rows have; ``()`` for text."""
    tower = recipe.model.vision
    if not recipe.patches or isinstance(tower, tuple):
        return ()
    index = torch.empty(len(tokens), recipe.patches, dtype=torch.int64, device=META)
    pixels = torch.empty(*index.shape, tower.pixels_per_patch, device=META)
    # each field has a number for every patch; cells are of clips, and these are images
    patches = Patches(index, index, index, index, index, index, index, cells=())
    return Images(pixels, patches, tokens)
