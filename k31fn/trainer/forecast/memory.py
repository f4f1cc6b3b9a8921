"""Bytes that a rank needs in a step, found by running its step on meta tensors.

What is held between steps is added up from the specs. What a step makes besides is measured: the
gradient of the loss runs on tensors that have shapes and no memory, and their bytes are counted as
they come and go (:func:`k31fn.testing.live_bytes`). That is done for a model with one layer of each
kind; what another layer of a kind keeps between forward and backward is added as often as there are
layers, or their gradients, if these are more. Snapshots of the residual state that only a deep
model has are added by hand.

Ops run their references, but for products of routed experts, of which the results are counted. A
fused implementation needs less. An allocator's rounding and cache, what a kernel takes for itself,
and the buffers of collectives' libraries are not in it; nor are the stages of a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from k31fn import tree
from k31fn.config.recipe import Recipe
from k31fn.kernels.shapes import shapes_only
from k31fn.layers import kinds
from k31fn.parallel.collectives import axis_size
from k31fn.testing.memory import live_bytes
from k31fn.trainer.forecast.abstract_rank import abstract_rank, run_gradient, run_loss
from k31fn.trainer.forecast.few_layers import LayerKind, layer_kinds, with_layers
from k31fn.trainer.forecast.rank_weights import rank_weights
from k31fn.trainer.forecast.shape_cache import ShapeCache

__all__ = ["Memory", "predict"]


class Memory(NamedTuple):
    """Bytes of one rank.

    Attributes:
        frozen: its parts of weights that are not trained, as they are held.
        trained: of those that are.
        optimizer: its state of the optimiser.
        gradients: of its trained parts.
        gathered: of the weights of two layers, those that take most, gathered as they travel; the
            next one's are there while one runs.
        activations: the most that a step holds besides: what is kept for the backward, and a layer
            at work.
    """

    frozen: int
    trained: int
    optimizer: int
    gradients: int
    gathered: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def predict(recipe: Recipe) -> Memory:
    """What a rank needs.

    Raises:
        ValueError: ``recipe`` has a pipeline.
    """
    if recipe.mesh.pp > 1:
        raise ValueError(
            f"memory: mesh.pp={recipe.mesh.pp}: stages of a pipeline are not predicted; set "
            "mesh.pp=1"
        )
    frozen = trained = optimizer = 0
    for weight in rank_weights(recipe):
        if weight.gradient:
            trained += weight.weight
        else:
            frozen += weight.weight
        optimizer += weight.optimizer
    gradients = _gradients(recipe)
    gathered = _gathered(recipe)
    # the peak of a gradient has both in it: what is left is what is kept and at work
    activations = max(0, _peak(recipe) - gradients - gathered)
    return Memory(frozen, trained, optimizer, gradients, gathered, activations)


def _peak(recipe: Recipe) -> int:
    """The most bytes of tensors that a gradient makes.

    While the last layers run backward all is there that others keep; while the first do, the
    others' gradients are.
    """
    layers = layer_kinds(recipe.model)
    each = list(dict.fromkeys(layers))
    few = with_layers(recipe, each)
    cache = ShapeCache()  # one for all runs, which have most operations in common
    largest = max(_peak_of(r, cache) for r in _orders(recipe, each))
    kept = _kept(few, cache)
    kept_by_others = 0
    for kind in each:
        others = layers.count(kind) - 1
        if others:
            kept_by_one = _kept(with_layers(recipe, [*each, kind]), cache) - kept
            kept_by_others += others * kept_by_one
    gradients_of_others = _gradients(recipe) - _gradients(few)
    # either is there at one end of the backward, and not both: activations go as gradients come
    largest += max(gradients_of_others, kept_by_others)
    return largest + _snapshots(recipe, len(layers)) - _snapshots(recipe, len(each))


def _orders(recipe: Recipe, each: Sequence[LayerKind]) -> list[Recipe]:
    """The model with a layer of each kind, each kind last once.

    The last layer runs backward first, beside what all others keep.
    """
    orders: dict[Recipe, None] = {}
    for last in each:
        others = [kind for kind in each if kind != last]
        # two may be the same model: layers without experts come first in any case
        orders[with_layers(recipe, [*others, last])] = None
    return list(orders)


def _gradients(recipe: Recipe) -> int:
    return sum(x.gradient for x in rank_weights(recipe))


def _peak_of(recipe: Recipe, cache: ShapeCache) -> int:
    abstract_rank(recipe, 0)  # made and remembered now: what the rank holds is not counted
    with shapes_only("grouped_matmul"), live_bytes() as live, cache:
        run_gradient(recipe)
    return live.peak


def _kept(recipe: Recipe, cache: ShapeCache) -> int:
    """Bytes that live between forward and backward."""
    abstract_rank(recipe, 0)
    with shapes_only("grouped_matmul"), live_bytes() as live, cache:
        alive = run_loss(recipe)
        kept = live.current
    del alive  # it is the pullback, and holds all that is counted: not before here
    return kept


def _snapshots(recipe: Recipe, num_layers: int) -> int:
    """Blocks of the residual state after the first, and their gradients."""
    residual, mesh = recipe.model.residual, recipe.mesh
    opens_block = kinds.residual_of(residual).opens_block
    blocks = sum(opens_block(residual, layer) for layer in range(num_layers))
    if not blocks:
        return 0
    rows = recipe.batch_size // (mesh.dp * mesh.fsdp * recipe.micro_batches)
    tokens = recipe.length // (mesh.cp * mesh.tp)
    snapshot = rows * tokens * recipe.model.hidden_size * recipe.precision.compute.itemsize
    return 2 * (blocks - 1) * snapshot  # each with its gradient


def _gathered(recipe: Recipe) -> int:
    layout, state = abstract_rank(recipe, 0)
    sizes = []
    for layer, placements in zip(state.params.layers, layout.placements.layers, strict=True):
        size = 0
        for x, place in zip(tree.leaves(layer), tree.leaves(placements), strict=True):
            if place.gather:  # others are used where they lie
                dtype = place.dtype or x.dtype
                size += x.numel() * axis_size(place.gather) * dtype.itemsize
        sizes.append(size)
    return sum(sorted(sizes)[-2:])
