"""What a training run carries from step to step."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from k31fn import balance, checkpoint, model, optim, params, random, tree
from k31fn.config.recipe import Recipe
from k31fn.model.stages import select
from k31fn.parallel.partition import local_shape
from k31fn.params import ParamSpec
from k31fn.trainer.adapter_base import init_adapted
from k31fn.trainer.layout import RankLayout, cut, lay_out, make_schedule

__all__ = [
    "TrainState",
    "abstract_state",
    "checkpoint_layout",
    "completed",
    "first_state",
    "held_by",
    "init_state",
    "merge",
    "saved",
    "split",
]


@tree.dataclass
class TrainState:
    """Everything needed to resume, besides the recipe. On a mesh: what one rank holds of it.

    Attributes:
        step: steps done, int64 scalar.
        params: model parameters.
        opt_state: optimiser state.
        balance: the routers' biases; part of the trunk, so they stay when only the indexer is
            trained.
        key: of the run's random draws.
        guard: what spikes are told by (:class:`k31fn.optim.SpikeState`); ``()`` in a run that looks
            for none.
    """

    step: Tensor
    params: model.Params[Tensor]
    opt_state: Any
    balance: balance.State
    key: Tensor
    guard: Any = ()


def split(weights: model.Params[Tensor], specs: model.Params[ParamSpec]) -> tuple[Any, Any]:
    """``(trained, frozen)``: two trees like the parameters, each with ``()`` in place of the
    other's leaves.
    """
    spec_leaves, structure = tree.flatten(specs)
    trained: list[Any] = []
    frozen: list[Any] = []
    for weight, spec in zip(tree.leaves(weights), spec_leaves, strict=True):
        is_frozen = "frozen" in spec.tags
        trained.append(() if is_frozen else weight)
        frozen.append(weight if is_frozen else ())
    return tree.unflatten(structure, trained), tree.unflatten(structure, frozen)


def merge(trained: Any, frozen: Any, specs: model.Params[ParamSpec]) -> model.Params[Tensor]:
    """The parameters that :func:`split` took apart."""
    spec_leaves, structure = tree.flatten(specs)
    trained_leaves = iter(tree.leaves(trained))
    frozen_leaves = iter(tree.leaves(frozen))
    weights = []
    for spec in spec_leaves:
        # () is an empty tree, so each iterator has its own leaves alone, in this order
        weights.append(next(frozen_leaves if "frozen" in spec.tags else trained_leaves))
    return tree.unflatten(structure, weights)


def init_state(layout: RankLayout, device: torch.device) -> TrainState:
    """The state before the first step: a rank draws its own part, and all parts together are equal
    on every mesh.
    """
    recipe = layout.recipe
    # keys of their own for the initial values and for the run's draws (first_state has 1)
    key = random.fold_in(random.key(recipe.seed, device=device), 0)
    if recipe.lora:
        weights, biases = init_adapted(recipe, layout.specs, key, layout.tiles)
    else:
        weights = params.init(layout.specs, key, dtype=recipe.precision.param, tile=layout.tiles)
        biases = model.init_balance(recipe.model, device=device)
    return first_state(layout, weights, biases)


def first_state(
    layout: RankLayout, weights: model.Params[Tensor], biases: balance.State
) -> TrainState:
    """The state before the first step from given parameters, this rank's part of them, and the
    routers' biases.
    """
    recipe = layout.recipe
    device = biases.bias.device
    return TrainState(
        step=torch.zeros((), dtype=torch.int64, device=device),
        params=weights,
        opt_state=layout.optimizer.init(weights),
        balance=biases,
        key=random.fold_in(random.key(recipe.seed, device=device), 1),
        guard=_init_guard(recipe, device),
    )


def abstract_state(layout: RankLayout) -> TrainState:
    """:func:`init_state` in meta tensors.

    Of the layout without a mesh it is the whole state, which is what a checkpoint holds.
    """
    recipe = layout.recipe
    weights = params.abstract(layout.specs, dtype=recipe.precision.param)
    if layout.axes.atoms:
        # of the whole's shapes, cut as the rank's parts are: an uneven split is refused by then
        weights = tree.map(
            lambda x, p: x.new_empty(local_shape(p, x.shape, recipe.mesh)),
            weights,
            layout.partition,
        )
    return TrainState(
        step=torch.empty((), dtype=torch.int64, device="meta"),
        params=weights,
        opt_state=layout.optimizer.init(weights),
        balance=model.init_balance(recipe.model, device="meta"),
        key=torch.empty(2, dtype=torch.int64, device="meta"),
        guard=_init_guard(recipe, "meta"),
    )


def _init_guard(recipe: Recipe, device: torch.device | str) -> Any:
    if not recipe.optimizer.spike:
        return ()
    return optim.init_spikes(device=device, dtype=recipe.precision.reduce)


def saved(state: TrainState, layout: RankLayout) -> TrainState:
    """What a checkpoint holds of a state: all, but without what is frozen if the run trains
    adapters.
    """
    if not layout.recipe.lora:
        return state
    trained, _ = split(state.params, layout.specs)
    return dataclasses.replace(state, params=trained)


def completed(state: TrainState, layout: RankLayout, device: torch.device) -> TrainState:
    """The state that :func:`saved` was given; what it left out comes from the base."""
    if not layout.recipe.lora:
        return state
    # drawn or read again, with adapters that are thrown away: a second way to make the base alone
    # could differ from the first
    _, frozen = split(init_state(layout, device).params, layout.specs)
    return dataclasses.replace(state, params=merge(state.params, frozen, layout.specs))


def held_by(recipe: Recipe) -> dict[str, checkpoint.Holders]:
    """Which ranks hold each tensor of the whole state; by path, without those that all ranks hold
    whole.
    """
    return _held_by(lay_out(recipe))


def checkpoint_layout(recipe: Recipe) -> checkpoint.StateLayout:
    """How what a checkpoint holds lies on the recipe's mesh."""
    whole = lay_out(recipe)
    return checkpoint.StateLayout(saved(abstract_state(whole), whole), _held_by(whole), recipe.mesh)


def _held_by(whole: RankLayout) -> dict[str, checkpoint.Holders]:
    """:func:`held_by` of the recipe's layout without its mesh."""
    weights = _weights_held(whole)
    result = {}
    for path in tree.paths(abstract_state(whole)):
        # The optimiser's trees have the parameters' paths behind names of their own.
        names = path.split(".")[1:]
        while names and ".".join(names) not in weights:
            names.pop(0)
        if names:
            result[path] = weights[".".join(names)]
    return result


def _weights_held(whole: RankLayout) -> dict[str, checkpoint.Holders]:
    """The parameters alone, with the ranks of the pipeline that have each."""
    recipe = whole.recipe
    table = make_schedule(recipe, recipe.mesh.pp)
    parts = cut(recipe.model, table)
    weights = {}
    for path, spec in tree.flatten_with_paths(whole.partition):
        weights[path] = checkpoint.Holders(spec)
    if table.num_ranks > 1:
        # a weight of several stages (none today) would be held by all of their ranks
        for rank in range(table.num_ranks):
            own = select(whole.partition, [parts[s] for s in table.stages_of(rank)])
            for path, spec in tree.flatten_with_paths(own):
                weights[path] = checkpoint.Holders(spec, (*weights[path].stages, rank))
    return weights
