"""Loss and gradients of a step, on whatever mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import balance, model, tree
from k31fn.config.recipe import Recipe
from k31fn.layers.linear import use_products
from k31fn.model import stages
from k31fn.parallel import fsdp, pipeline
from k31fn.parallel.collectives import pmax, psum
from k31fn.parallel.mesh import MeshAxes
from k31fn.parallel.pipeline.carry import StageCarry
from k31fn.parallel.pipeline.engine import Stage, StageOutput
from k31fn.trainer.layout import Layout
from k31fn.trainer.qk_clip import reporting
from k31fn.trainer.state import TrainState, merge, split

__all__ = ["Sums", "make_gradient", "make_stages"]


class Sums(NamedTuple):
    """What a step's tokens add up to, over micro-batches and ranks.

    Attributes:
        total: the training loss.
        lm: the tokens' cross-entropy.
        kl: the indexers' KL over all layers.
        load: tokens per expert, of the MoE layers of this rank's stages.
        histogram: required biases of the same layers.
        logits: the largest attention logits, not a sum: of the local heads of each full-attention
            layer of this rank's stages ``[layers H]``; ``()`` unless QK-Clip asks for them.
    """

    total: Tensor
    lm: Tensor
    kl: Tensor
    load: Tensor
    histogram: Tensor
    logits: Any = ()


def make_gradient(
    recipe: Recipe, layout: Layout
) -> Callable[[TrainState, Sequence[model.Batch]], tuple[Sums, model.Params[Tensor]]]:
    """``(state, micro_batches) -> (sums, gradients of this rank's parts)``, both over all ranks.

    Raises:
        ValueError: (at the first call) a schedule that splits the backward, where that would be
            other work.
    """
    inside = fsdp.gather_only(layout.placements)
    checked = not layout.schedule.split

    def gradient(
        state: TrainState, batches: Sequence[model.Batch]
    ) -> tuple[Sums, model.Params[Tensor]]:
        nonlocal checked
        trained, frozen = split(fsdp.enter_step(state.params, layout.placements), layout.specs)
        runs = make_stages(recipe, layout, state.balance, frozen, inside)
        weights = [_of_stage(trained, layout, part) for part in layout.own]
        carries = stages.stage_carries(
            recipe.model, layout.parts, batches[0], recipe.precision.compute, sh=layout.sh
        )
        how: Any = {"axis": layout.axes.pp, "carries": carries}
        if not checked and not batches[0].tokens.is_meta:
            pipeline.check_stages(layout.schedule, runs, weights, batches[0], **how)
        checked = True
        result = pipeline.run(layout.schedule, runs, weights, batches, **how)
        grads = (
            stages.merge(result.grads)
            if layout.schedule.num_chunks > 1
            else next(iter(result.grads))
        )
        sums = _sum(result.loss, result.sums, layout.axes)
        if there := [x for x in result.largest if isinstance(x, Tensor)]:
            sums = sums._replace(logits=pmax(torch.cat(there), layout.axes.data))
        return sums, fsdp.sum_gradients(grads, layout.placements)

    return gradient


def make_stages(
    recipe: Recipe, layout: Layout, biases: balance.State, frozen: Any, placements: Any
) -> list[Stage]:
    """This rank's stages as functions of their trained parameters.

    Args:
        recipe: the run.
        layout: of this rank.
        biases: of the routers.
        frozen: its parameters that are not trained.
        placements: of all its parameters.
    """
    cfg, sh, remat = recipe.model, layout.sh, recipe.remat
    cfg = reporting(cfg) if recipe.clips_logits else cfg

    def whole(params: model.Params[Tensor], carry: StageCarry, batch: model.Batch) -> StageOutput:
        total, parts = model.loss(
            params, batch, cfg, balance=biases, remat=remat, placements=placements, sh=sh
        )
        return StageOutput(carry, total, parts._replace(logits=()), parts.logits)

    def make(part: stages.Part) -> Stage:
        kept, specs = (_of_stage(x, layout, part) for x in (frozen, layout.specs))
        run: Stage = whole
        if layout.schedule.num_stages > 1:
            places = _of_stage(placements, layout, part)
            run = stages.make_stage(
                cfg, part, balance=biases, remat=remat, placements=places, sh=sh
            )

        def stage(trained: Any, carry: StageCarry, batch: model.Batch) -> StageOutput:
            with use_products(recipe.precision.products):
                return run(merge(trained, kept, specs), carry, batch)

        return stage

    return [make(part) for part in layout.own]


def _of_stage(params: model.Params[Any], layout: Layout, part: stages.Part) -> model.Params[Any]:
    """What a stage has of a tree like this rank's parameters."""
    return stages.select(params, [part]) if layout.schedule.num_stages > 1 else params


def _sum(total: Tensor, of_stages: Sequence[model.Losses], axes: MeshAxes) -> Sums:
    """Over the stages of this rank, and over the ranks that have other tokens or other layers."""
    kl = torch.stack([part.kl.sum() for part in of_stages]).sum()
    lm = torch.stack([part.lm for part in of_stages]).sum()
    scalars = psum(
        torch.stack([x.to(total.dtype) for x in (total, lm, kl)]),
        axes.view("pp", "dp", "fsdp", "cp"),
    )
    counts = [
        torch.cat([getattr(part, name) for part in of_stages]) for name in ("load", "histogram")
    ]
    return Sums(*scalars.unbind(), *tree.map(lambda x: psum(x, axes.data), counts))
