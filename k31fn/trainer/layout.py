"""How a recipe's model lies on its mesh, seen from one rank."""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Any

import torch

from k31fn import lora, model, optim, tree
from k31fn.config.recipe import Recipe
from k31fn.model.stages import Part, select, stage_moe_layers, stages
from k31fn.parallel import fsdp
from k31fn.parallel.collectives import axis_size, own_index
from k31fn.parallel.mesh import MeshAxes
from k31fn.parallel.partition import AxisRules, partition, tiles
from k31fn.parallel.pipeline.actions import Schedule
from k31fn.parallel.pipeline.cuts import stage_ranges
from k31fn.parallel.pipeline.schedules import schedule
from k31fn.parallel.sharding import Sharding
from k31fn.params import ParamSpec
from k31fn.trainer.ranks.agreement import coordinate_of

__all__ = ["RankLayout", "cut", "lay_out", "make_optimizer", "make_schedule", "trained_specs"]

_ONE_RANK = MeshAxes()


@dataclass(frozen=True, eq=False)
class RankLayout:
    """What one rank holds of a run and how it works with the others; made once by :func:`lay_out`.

    Attributes:
        recipe: the run, or one phase of it.
        axes: of the mesh, bound to this rank.
        schedule: of the pipeline; one stage on one rank without one.
        parts: what each of its stages has of the model.
        own: what those of this rank have, by chunk.
        specs: of the parameters that this rank has, of which it holds parts; what is not trained is
            tagged ``frozen``.
        partition: how each is split.
        placements: what becomes of each part where the model uses it.
        optimizer: of these parts.
        moe_layers: global numbers of its MoE layers.
    """

    recipe: Recipe
    axes: MeshAxes
    schedule: Schedule
    parts: tuple[Part, ...]
    own: tuple[Part, ...]
    specs: model.Params[ParamSpec]
    partition: Any
    placements: Any
    optimizer: optim.Transform
    moe_layers: tuple[int, ...]

    @property
    def sh(self) -> Sharding:
        """What layers take."""
        return Sharding.on(self.axes)

    @property
    def tiles(self) -> Any:
        """Where this rank's part lies in each whole parameter; None: it holds all of them."""
        return _tiles(self.recipe, self.axes, self.specs, self.partition)


def lay_out(recipe: Recipe, axes: MeshAxes = _ONE_RANK) -> RankLayout:
    """The layout of ``recipe`` on ``axes``: those of its mesh, or none, for the whole model.

    Raises:
        ValueError: a weight that its ranks do not divide; names it.
    """
    # as many stages as the axes have: none for the whole model, whatever recipe.mesh.pp is
    table = make_schedule(recipe, axis_size(axes.pp))
    parts = cut(recipe.model, table)
    own = tuple(parts[s] for s in table.stages_of(own_index(axes.pp)))
    specs = trained_specs(recipe)
    moe_layers = model.moe_layers(recipe.model)
    if table.num_stages > 1:
        specs = select(specs, own)
        moe_layers = stage_moe_layers(recipe.model, own)
    # by the mesh's sizes, not the axes: also the whole state is described by its parts
    split = partition(specs, AxisRules(), recipe.mesh)
    precision = recipe.precision
    placements = fsdp.placements(
        specs,
        split,
        axes,
        compute=precision.compute,
        reduce=precision.reduce,
        adds=recipe.micro_batches > 1,
    )
    optimizer = make_optimizer(recipe, specs, placements)
    if precision.param == torch.bfloat16:
        # Without float32 copies a small update would be lost by rounding to nearest. The rounding's
        # random numbers follow from a weight's place in the whole, so no mesh changes them.
        tile = _tiles(recipe, axes, specs, split)
        optimizer = optim.rounded(optimizer, specs, recipe.seed, tile=tile)
    return RankLayout(
        recipe=recipe,
        axes=axes,
        schedule=table,
        parts=parts,
        own=own,
        specs=specs,
        partition=split,
        placements=placements,
        optimizer=optimizer,
        moe_layers=moe_layers,
    )


def _tiles(recipe: Recipe, axes: MeshAxes, specs: Any, split: Any) -> Any:
    return tiles(specs, split, recipe.mesh, coordinate_of(axes)) if axes.atoms else None


def make_schedule(recipe: Recipe, num_ranks: int) -> Schedule:
    """The table of a step on a pipeline of so many ranks."""
    if num_ranks == 1:
        # also for a recipe with a pipeline, whose whole state is laid out without its mesh
        return schedule("1f1b", 1, recipe.micro_batches)
    p = recipe.pipeline
    return schedule(p.schedule, num_ranks, recipe.micro_batches, num_chunks=p.num_chunks)


def cut(cfg: model.Config, table: Schedule) -> tuple[Part, ...]:
    """What each stage has of the model."""
    if table.num_stages == 1:
        return (Part(range(cfg.num_layers), first=True, last=True),)
    return stages(cfg, stage_ranges(cfg.num_layers, table.num_stages))


def trained_specs(recipe: Recipe) -> model.Params[ParamSpec]:
    """The model's specs, with what the recipe does not train tagged ``frozen``; of a run of
    adapters, with these.
    """
    specs = model.specs(recipe.model)
    adapters = recipe.lora
    if not isinstance(adapters, tuple):
        return lora.apply(
            specs,
            pattern=adapters.pattern,
            rank=adapters.rank,
            alpha=adapters.alpha,
            held=adapters.held,
            held_pattern=adapters.held_pattern,
        )
    if recipe.trainable == "all":
        return specs

    # a tag, not another tree: what is frozen is initialised, sharded and saved like all else
    def freeze(path: str, spec: ParamSpec) -> ParamSpec:
        if re.search(rf"\.{recipe.trainable}\.", path):
            return spec
        return dataclasses.replace(spec, tags=spec.tags | {"frozen"})

    return tree.map_with_path(freeze, specs)


def make_optimizer(recipe: Recipe, specs: Any, placements: Any = ()) -> optim.Transform:
    """The recipe's optimiser for parameters declared by ``specs``, of which ``placements`` says
    what a rank holds.
    """
    o = recipe.optimizer
    storage = optim.Storage(getattr(torch, o.state_dtype), o.offload)
    shared = {"weight_decay": o.weight_decay, "storage": storage}
    adamw = functools.partial(optim.adamw, specs, beta1=o.beta1, beta2=o.beta2, eps=o.eps, **shared)
    if o.kind == "adamw":
        return adamw()
    # Muon steps matrices; norms, biases, the embedding and the head are AdamW's
    others = adamw(where=lambda path, spec: "matrix" not in spec.tags)
    ns_dtype = None if o.ns_dtype == "auto" else getattr(torch, o.ns_dtype)
    muon = optim.muon(specs, ns_dtype=ns_dtype, placements=placements, **shared)
    return optim.combine(specs, muon, others)
