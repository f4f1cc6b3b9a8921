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

from typing import Any, NamedTuple

from k31fn import model, tree
from k31fn.config.recipe import Recipe
from k31fn.kernels.shapes import shapes_only
from k31fn.layers import kinds
from k31fn.parallel.collectives import axis_size
from k31fn.testing.memory import live_bytes
from k31fn.trainer.forecast.abstract_rank import abstract_rank, run_gradient, run_loss
from k31fn.trainer.forecast.few_layers import layer_kinds, with_layers
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
    held = rank_weights(recipe)
    gradients = _gradients(recipe)
    gathered = _gathered(recipe)
    step = _peak(recipe)
    return Memory(
        frozen=sum(x.weight for x in held if not x.gradient),
        trained=sum(x.weight for x in held if x.gradient),
        optimizer=sum(x.optimizer for x in held),
        gradients=gradients,
        gathered=gathered,
        activations=max(0, step - gradients - gathered),
    )


def _peak(recipe: Recipe) -> int:
    """The most bytes of tensors that a gradient makes.

    While the last layers run backward all is there that others keep; while the first do, the
    others' gradients are.
    """
    layers, known = layer_kinds(recipe.model), ShapeCache()
    each = list(dict.fromkeys(layers))
    orders = [sorted(each, key=lambda kind, last=last: kind == last) for last in each]
    largest = max(
        _peak_of(r, known) for r in dict.fromkeys(with_layers(recipe, order) for order in orders)
    )
    kept = _kept(with_layers(recipe, each), known)
    more = {kind: layers.count(kind) - 1 for kind in each}
    by_kind = {
        kind: _kept(with_layers(recipe, [*each, kind]), known) - kept
        for kind, n in more.items()
        if n
    }
    gradients = _gradients(recipe) - _gradients(with_layers(recipe, each))
    largest += max(gradients, sum(more[kind] * size for kind, size in by_kind.items()))
    return largest + _snapshots(recipe, len(layers)) - _snapshots(recipe, len(each))


def _gradients(recipe: Recipe) -> int:
    return sum(x.gradient for x in rank_weights(recipe))


def _peak_of(recipe: Recipe, known: ShapeCache) -> int:
    abstract_rank(recipe, 0)  # what the rank holds is not counted
    with shapes_only("grouped_matmul"), live_bytes() as live, known:
        run_gradient(recipe)
    return live.peak


def _kept(recipe: Recipe, known: ShapeCache) -> int:
    """Between forward and backward."""
    abstract_rank(recipe, 0)
    with shapes_only("grouped_matmul"), live_bytes() as live, known:
        alive = run_loss(recipe)
        kept = live.current
    del alive
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
    return (
        2
        * (blocks - 1)
        * rows
        * tokens
        * recipe.model.hidden_size
        * recipe.precision.compute.itemsize
    )


def _gathered(recipe: Recipe) -> int:
    layout, state = abstract_rank(recipe, 0)
    sizes = sorted(
        sum(
            x.numel() * axis_size(place.gather) * (place.dtype or x.dtype).itemsize
            for x, place in zip(tree.leaves(layer), tree.leaves(places), strict=True)
            if place.gather
        )
        for layer, places in zip(_layers(state.params), _layers(layout.placements), strict=True)
    )
    return sum(sizes[-2:])


def _layers(params: model.Params[Any]) -> tuple[Any, ...]:
    return params.layers
