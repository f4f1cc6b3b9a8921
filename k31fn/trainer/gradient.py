"""Loss and gradients of a step: by ``value_and_grad``, or by the schedule of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import balance, model, tree
from k31fn.autodiff.gradients import value_and_grad
from k31fn.layers.linear import use_products
from k31fn.model import stages
from k31fn.parallel import fsdp, pipeline
from k31fn.parallel.collectives import pmax, psum
from k31fn.parallel.mesh import MeshAxes
from k31fn.parallel.pipeline.carry import StageCarry
from k31fn.parallel.pipeline.engine import Stage, StageOutput
from k31fn.trainer.layout import RankLayout
from k31fn.trainer.qk_clip import reporting
from k31fn.trainer.state import TrainState, merge, split

__all__ = ["Gradient", "Sums", "make_gradient", "make_loss"]


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
        placement: of MoonEP's plans, not summed over ranks: violations and replicas of this rank
            in each MoE layer of its stages ``[M 2]``; ``()`` with another placement.
    """

    total: Tensor
    lm: Tensor
    kl: Tensor
    load: Tensor
    histogram: Tensor
    logits: Any = ()
    placement: Any = ()


Gradient = Callable[[TrainState, Sequence[model.Batch]], tuple[Sums, model.Params[Tensor]]]
"""``gradient(state, micro_batches) -> (sums, gradients of this rank's parts)``, over all ranks."""


class _Local(NamedTuple):
    """What this rank's tokens and layers give, before ranks add up theirs.

    Attributes:
        total: the training loss; over micro-batches.
        losses: of each stage of this rank, over micro-batches.
        grads: of the trained parameters that this rank uses, gathered over the data axes.
    """

    total: Tensor
    losses: Sequence[model.Losses]
    grads: Any


def make_gradient(layout: RankLayout) -> Gradient:
    """The gradient of a step on ``layout``.

    Raises:
        ValueError: (at the first call) a schedule that splits the backward, where that would be
            other work.
    """
    compute = _of_pipeline(layout) if layout.schedule.num_stages > 1 else _of_one_stage(layout)

    def gradient(
        state: TrainState, batches: Sequence[model.Batch]
    ) -> tuple[Sums, model.Params[Tensor]]:
        # Cast and made varying before they are differentiated: gradients of micro-batches add up
        # in the reduce dtype, and those of ranks only below.
        weights = fsdp.enter_step(state.params, layout.placements)
        trained, frozen = split(weights, layout.specs)
        local = compute(trained, frozen, state.balance, batches)
        sums = _sum_over_ranks(local, layout.axes)
        # one sum of the step's gradients, not one for each micro-batch
        return sums, fsdp.sum_gradients(local.grads, layout.placements)

    return gradient


_Compute = Callable[[Any, Any, balance.State, Sequence[model.Batch]], _Local]
"""``(trained, frozen, routers' biases, micro-batches)``."""


def make_loss(
    layout: RankLayout, frozen: Any, biases: balance.State
) -> Callable[[Any, model.Batch], tuple[Tensor, model.Losses]]:
    """``loss(trained, micro_batch) -> (training loss, its parts)`` of the whole model.

    Args:
        layout: of this rank, without a pipeline.
        frozen: its parameters that are not trained.
        biases: of the routers.
    """
    recipe = layout.recipe
    cfg = _reporting_config(layout)
    placements = fsdp.gather_only(layout.placements)

    def loss(trained: Any, batch: model.Batch) -> tuple[Tensor, model.Losses]:
        weights = merge(trained, frozen, layout.specs)
        with use_products(recipe.precision.products):
            return model.loss(
                weights,
                batch,
                cfg,
                balance=biases,
                remat=recipe.remat,
                placements=placements,
                sh=layout.sh,
            )

    return loss


def _of_one_stage(layout: RankLayout) -> _Compute:
    def compute(
        trained: Any, frozen: Any, biases: balance.State, batches: Sequence[model.Batch]
    ) -> _Local:
        loss_and_grads = value_and_grad(make_loss(layout, frozen, biases), has_aux=True)
        (total, losses), grads = loss_and_grads(trained, batches[0])
        grad_leaves, structure = tree.flatten(grads)
        del grads  # the list alone holds them: a leaf is freed when its sum takes its place
        for batch in batches[1:]:
            (more, more_losses), more_grads = loss_and_grads(trained, batch)
            total = total + more
            losses = _add_losses(losses, more_losses)
            _add_leaves(grad_leaves, tree.leaves(more_grads))
            del more_grads  # else they would live beside those of the next micro-batch
        return _Local(total, [losses], tree.unflatten(structure, grad_leaves))

    return compute


def _add_leaves(sums: list[Tensor], more: list[Tensor]) -> None:
    for i, x in enumerate(more):
        sums[i] = sums[i] + x  # not in place: a backward may give one tensor for two leaves


def _add_losses(a: model.Losses, b: model.Losses) -> model.Losses:
    """Sums of two micro-batches; of logits the larger ones."""
    logits = torch.maximum(a.logits, b.logits) if isinstance(a.logits, Tensor) else ()
    sums = tree.map(torch.add, a._replace(logits=()), b._replace(logits=()))
    return sums._replace(logits=logits)


def _of_pipeline(layout: RankLayout) -> _Compute:
    recipe = layout.recipe
    # Whether a split backward does the same work is seen by running a stage: once, in the first
    # step that has values.
    checked = not layout.schedule.split

    def compute(
        trained: Any, frozen: Any, biases: balance.State, batches: Sequence[model.Batch]
    ) -> _Local:
        nonlocal checked
        runs = _make_stages(layout, frozen, biases)
        weights = [stages.select(trained, [part]) for part in layout.own]
        carries = stages.stage_carries(
            recipe.model, layout.parts, batches[0], recipe.precision.compute, sh=layout.sh
        )
        how: Any = {"axis": layout.axes.pp, "carries": carries}
        if not checked and not batches[0].tokens.is_meta:
            pipeline.check_stages(layout.schedule, runs, weights, batches[0], **how)
        checked = True
        result = pipeline.run(layout.schedule, runs, weights, batches, **how)
        losses = [
            sums._replace(logits=logits)
            for sums, logits in zip(result.sums, result.largest, strict=True)
        ]
        chunks = result.grads
        grads = stages.merge(chunks) if layout.schedule.num_chunks > 1 else chunks[0]
        return _Local(result.loss, losses, grads)

    return compute


def _make_stages(layout: RankLayout, frozen: Any, biases: balance.State) -> list[Stage]:
    """This rank's stages as functions of their trained parameters."""
    recipe = layout.recipe
    cfg = _reporting_config(layout)
    placements = fsdp.gather_only(layout.placements)

    def make(part: stages.Part) -> Stage:
        stage_frozen = stages.select(frozen, [part])
        stage_specs = stages.select(layout.specs, [part])
        run = stages.make_stage(
            cfg,
            part,
            balance=biases,
            remat=recipe.remat,
            placements=stages.select(placements, [part]),
            sh=layout.sh,
        )

        def stage(trained: Any, carry: StageCarry, batch: model.Batch) -> StageOutput:
            with use_products(recipe.precision.products):
                return run(merge(trained, stage_frozen, stage_specs), carry, batch)

        return stage

    return [make(part) for part in layout.own]


def _reporting_config(layout: RankLayout) -> model.Config:
    recipe = layout.recipe
    return reporting(recipe.model) if recipe.clips_logits else recipe.model


def _sum_over_ranks(local: _Local, axes: MeshAxes) -> Sums:
    """Sums over this rank's stages, and over the ranks that have other tokens or other layers."""
    lm = torch.stack([stage.lm for stage in local.losses]).sum()
    kl = torch.stack([stage.kl.sum() for stage in local.losses]).sum()
    # the scalars travel as one tensor, so as one collective
    scalars = torch.stack([x.to(local.total.dtype) for x in (local.total, lm, kl)])
    total, lm, kl = psum(scalars, axes.view("pp", "dp", "fsdp", "cp")).unbind()
    load = torch.cat([stage.load for stage in local.losses])
    histogram = torch.cat([stage.histogram for stage in local.losses])
    logits = [stage.logits for stage in local.losses if isinstance(stage.logits, Tensor)]
    plans = [stage.placement for stage in local.losses if isinstance(stage.placement, Tensor)]
    return Sums(
        total=total,
        lm=lm,
        kl=kl,
        load=psum(load, axes.data),
        histogram=psum(histogram, axes.data),
        logits=pmax(torch.cat(logits), axes.data) if logits else (),
        placement=torch.cat(plans) if plans else (),
    )
