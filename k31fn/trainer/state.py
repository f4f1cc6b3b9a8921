"""What a training run carries from step to step, and the optimiser that moves it."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import torch
from torch import Tensor

from k31fn import balance, model, optim, params, random, tree
from k31fn.config import Recipe
from k31fn.params import ParamSpec

__all__ = ["TrainState", "abstract_state", "init_state", "make_optimizer", "trained_specs"]


@tree.dataclass
class TrainState:
    """Everything needed to resume, besides the recipe.

    Attributes:
        step: steps done, int64 scalar.
        params: model parameters.
        opt_state: optimiser state.
        balance: the routers' biases; part of the trunk, so they stay when only the indexer is trained.
        key: of the run's random draws.
    """

    step: Tensor
    params: model.Params[Tensor]
    opt_state: Any
    balance: balance.State
    key: Tensor


def trained_specs(recipe: Recipe) -> model.Params[ParamSpec]:
    """The model's specs, with what the recipe does not train tagged ``frozen``."""
    specs = model.specs(recipe.model)
    if recipe.trainable == "all":
        return specs

    def freeze(path: str, spec: ParamSpec) -> ParamSpec:
        kept = re.search(rf"\.{recipe.trainable}\.", path)
        return spec if kept else dataclasses.replace(spec, tags=spec.tags | {"frozen"})

    return tree.map_with_path(freeze, specs)


def split(weights: model.Params[Tensor], specs: model.Params[ParamSpec]) -> tuple[Any, Any]:
    """``(trained, frozen)``: two trees like the parameters, each with ``()`` in place of the other's leaves."""
    kinds, structure = tree.flatten(specs)
    pairs = list(zip(tree.leaves(weights), kinds, strict=True))
    trained, frozen = ([w if ("frozen" in s.tags) == f else () for w, s in pairs] for f in (False, True))
    return tree.unflatten(structure, trained), tree.unflatten(structure, frozen)


def merge(trained: Any, frozen: Any, specs: model.Params[ParamSpec]) -> model.Params[Tensor]:
    """The parameters that :func:`split` took apart."""
    kinds, structure = tree.flatten(specs)
    parts = {False: iter(tree.leaves(trained)), True: iter(tree.leaves(frozen))}
    return tree.unflatten(structure, [next(parts["frozen" in s.tags]) for s in kinds])


def make_optimizer(recipe: Recipe, specs: Any) -> optim.Transform:
    """The recipe's optimiser for parameters declared by ``specs``."""
    o = recipe.optimizer
    adamw = functools.partial(optim.adamw, specs, beta1=o.beta1, beta2=o.beta2, eps=o.eps, weight_decay=o.weight_decay)
    if o.kind == "adamw":
        return adamw()
    others = adamw(where=lambda path, spec: "matrix" not in spec.tags)
    return optim.combine(specs, optim.muon(specs, weight_decay=o.weight_decay), others)


def init_state(recipe: Recipe, device: torch.device) -> TrainState:
    """The state before the first step."""
    key = random.key(recipe.seed, device=device)
    specs = trained_specs(recipe)
    weights = params.init(specs, random.fold_in(key, 0), dtype=recipe.precision.param)
    return TrainState(
        step=torch.zeros((), dtype=torch.int64, device=device),
        params=weights,
        opt_state=make_optimizer(recipe, specs).init(weights),
        balance=model.init_balance(recipe.model, device=device),
        key=random.fold_in(key, 1),
    )


def abstract_state(recipe: Recipe) -> TrainState:
    """:func:`init_state` in meta tensors: what a checkpoint of the recipe holds."""
    specs = trained_specs(recipe)
    weights = params.abstract(specs, dtype=recipe.precision.param)
    return TrainState(
        step=torch.empty((), dtype=torch.int64, device="meta"),
        params=weights,
        opt_state=make_optimizer(recipe, specs).init(weights),
        balance=model.init_balance(recipe.model, device="meta"),
        key=torch.empty(2, dtype=torch.int64, device="meta"),
    )
