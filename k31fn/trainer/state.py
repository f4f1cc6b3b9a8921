"""What a training run carries from step to step."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from k31fn import balance, model, optim, params, random, tree
from k31fn.checkpoint.state_layout import Holders, StateLayout
from k31fn.config.recipe import Recipe
from k31fn.model.stages import select
from k31fn.parallel.mesh import MeshAxes
from k31fn.parallel.partition import local_shape, tiles
from k31fn.params import ParamSpec
from k31fn.trainer.adapter_base import init_adapted
from k31fn.trainer.layout import cut, lay_out, make_schedule
from k31fn.trainer.ranks.agreement import coordinate_of

__all__ = [
    "TrainState",
    "abstract_state",
    "completed",
    "first_state",
    "held_by",
    "init_state",
    "layout_of",
    "merge",
    "saved",
    "split",
]

_ONE_RANK = MeshAxes()


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
    kinds, structure = tree.flatten(specs)
    pairs = list(zip(tree.leaves(weights), kinds, strict=True))
    trained, frozen = (
        [w if ("frozen" in s.tags) == f else () for w, s in pairs] for f in (False, True)
    )
    return tree.unflatten(structure, trained), tree.unflatten(structure, frozen)


def merge(trained: Any, frozen: Any, specs: model.Params[ParamSpec]) -> model.Params[Tensor]:
    """The parameters that :func:`split` took apart."""
    kinds, structure = tree.flatten(specs)
    parts = {False: iter(tree.leaves(trained)), True: iter(tree.leaves(frozen))}
    return tree.unflatten(structure, [next(parts["frozen" in s.tags]) for s in kinds])


def init_state(recipe: Recipe, device: torch.device, axes: MeshAxes = _ONE_RANK) -> TrainState:
    """The state before the first step: a rank draws its own part, and all parts together are equal
    on every mesh.
    """
    key = random.key(recipe.seed, device=device)
    layout = lay_out(recipe, axes)
    part = (
        tiles(layout.specs, layout.partition, recipe.mesh, coordinate_of(axes))
        if axes.atoms
        else None
    )
    if recipe.lora:
        weights, biases = init_adapted(recipe, layout.specs, random.fold_in(key, 0), part)
    else:
        weights = params.init(
            layout.specs, random.fold_in(key, 0), dtype=recipe.precision.param, tile=part
        )
        biases = model.init_balance(recipe.model, device=device)
    return first_state(recipe, weights, biases, axes)


def saved(state: TrainState, recipe: Recipe, axes: MeshAxes = _ONE_RANK) -> TrainState:
    """What a checkpoint holds of a state: all, but without what is frozen if the run trains
    adapters.
    """
    if not recipe.lora:
        return state
    return dataclasses.replace(state, params=split(state.params, lay_out(recipe, axes).specs)[0])


def completed(
    state: TrainState, recipe: Recipe, device: torch.device, axes: MeshAxes = _ONE_RANK
) -> TrainState:
    """The state that :func:`saved` was given; what it left out comes from the base."""
    if not recipe.lora:
        return state
    specs = lay_out(recipe, axes).specs
    _, frozen = split(init_state(recipe, device, axes).params, specs)
    return dataclasses.replace(state, params=merge(state.params, frozen, specs))


def first_state(
    recipe: Recipe, weights: model.Params[Tensor], biases: balance.State, axes: MeshAxes = _ONE_RANK
) -> TrainState:
    """The state before the first step from given parameters, this rank's part of them, and the
    routers' biases.
    """
    device = biases.bias.device
    return TrainState(
        step=torch.zeros((), dtype=torch.int64, device=device),
        params=weights,
        opt_state=lay_out(recipe, axes).optimizer.init(weights),
        balance=biases,
        key=random.fold_in(random.key(recipe.seed, device=device), 1),
        guard=_guard(recipe, device),
    )


def abstract_state(recipe: Recipe, axes: MeshAxes = _ONE_RANK) -> TrainState:
    """:func:`init_state` in meta tensors. Without ``axes``: the whole state, which is what a
    checkpoint holds.
    """
    layout = lay_out(recipe, axes)
    weights = params.abstract(layout.specs, dtype=recipe.precision.param)
    if axes.atoms:
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
        guard=_guard(recipe, "meta"),
    )


def _guard(recipe: Recipe, device: torch.device | str) -> Any:
    return (
        optim.init_spikes(device=device, dtype=recipe.precision.reduce)
        if recipe.optimizer.spike
        else ()
    )


def held_by(recipe: Recipe) -> dict[str, Holders]:
    """Which ranks hold each tensor of the whole state; by path, without those that all ranks hold
    whole.
    """
    table, weights = make_schedule(recipe, recipe.mesh.pp), {}
    layout, parts = lay_out(recipe, _ONE_RANK), cut(recipe.model, table)
    for path, spec in tree.flatten_with_paths(layout.partition):
        weights[path] = Holders(spec)
    for rank in range(table.num_ranks if table.num_ranks > 1 else 0):
        own = select(layout.partition, [parts[s] for s in table.stages_of(rank)])
        for path, spec in tree.flatten_with_paths(own):
            weights[path] = Holders(spec, (*weights[path].stages, rank))
    found = {}
    for path in tree.paths(abstract_state(recipe)):
        names = path.split(".")
        ends = (
            ".".join(names[i:]) for i in range(1, len(names))
        )  # the optimiser's trees have the parameters' paths
        weight = next((end for end in ends if end in weights), None)
        if weight is not None:
            found[path] = weights[weight]
    return found


def layout_of(recipe: Recipe) -> StateLayout:
    """How what a checkpoint holds lies on the recipe's mesh."""
    return StateLayout(saved(abstract_state(recipe), recipe), held_by(recipe), recipe.mesh)
