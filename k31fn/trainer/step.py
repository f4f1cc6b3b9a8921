"""One optimisation step, a pure function of state and batch that every rank of a mesh runs.

Nothing in a step waits for the device: metrics are tensors, a bad step is selected away on the
device. Every sum over tokens is taken over all ranks, so metrics, norms and decisions have the same
bits on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from k31fn import balance, data, model, optim, scopes, segments, tree
from k31fn.config.recipe import Recipe
from k31fn.layers import losses
from k31fn.parallel.collectives import axis_size, own_index, pmax, psum
from k31fn.parallel.mesh import MeshAxes
from k31fn.trainer.gradient import Sums, make_gradient
from k31fn.trainer.layout import Layout, lay_out
from k31fn.trainer.part_metrics import make_measure
from k31fn.trainer.qk_clip import clip_logits
from k31fn.trainer.state import TrainState

__all__ = ["Metrics", "make_batches", "make_step", "next_biases", "rows_at", "slice_tokens"]

_ONE_RANK = MeshAxes()


class Metrics(NamedTuple):
    """Numbers of a step: on the device, of one dtype; all but the last are scalars.

    Attributes:
        loss: cross-entropy per label, nats; 0 in a step without labels.
        indexer_kl: the indexers' KL per query, averaged over the full-attention layers, nats.
        grad_norm: of all gradients, before clipping.
        load_max_over_mean: the busiest expert's tokens over the mean, the worst layer's.
        non_finite: 1 if a gradient or the loss was infinite or NaN, else 0.
        skipped: 1 if nothing was changed, since the step was not finite, had no label or was a
            spike, else 0.
        spike: 1 if the loss or the norm stood out (:func:`k31fn.optim.is_spike`), else 0; 0 unless
            that is asked for.
        max_logit: the largest attention logit; 0 unless QK-Clip asks for it.
        detail: what :func:`k31fn.trainer.part_metrics.label` names; empty if nobody measured it.
    """

    loss: Tensor
    indexer_kl: Tensor
    grad_norm: Tensor
    load_max_over_mean: Tensor
    non_finite: Tensor
    skipped: Tensor
    spike: Tensor
    max_logit: Tensor
    detail: Tensor | tuple[()] = ()

    def flat(self) -> Tensor:
        """All of them in one tensor, in order."""
        scalars = torch.stack([x for x in self if isinstance(x, Tensor) and not x.ndim])
        return torch.cat([scalars, self.detail]) if isinstance(self.detail, Tensor) else scalars


def rows_at(dataset: data.Rows, step: int, axes: MeshAxes = _ONE_RANK) -> data.Example:
    """The whole rows of a step that this rank works on, if need be together with others of its
    context and stage.

    They are a slice of one order, which no mesh changes.
    """
    rows = axes.view("dp", "fsdp")
    return dataset.batch_at(step, rank=own_index(rows), num_ranks=axis_size(rows))


def make_batches(
    recipe: Recipe, rows: data.Example, device: torch.device, axes: MeshAxes = _ONE_RANK
) -> list[model.Batch]:
    """A rank's rows as micro-batches with the denominators of the whole step; its slice of the
    tokens of each row.
    """
    counts = torch.stack(
        [(rows.labels != losses.IGNORED).sum(), segments.valid(rows.segments).sum()]
    )
    rows, counts = tree.map(
        lambda x: x.to(device, non_blocking=True), (slice_tokens(rows, axes), counts)
    )
    num_labels, num_queries = psum(counts, axes.view("dp", "fsdp"))
    size = len(rows.tokens) // recipe.micro_batches

    def micro(i: int) -> model.Batch:
        part = tree.map(lambda x: x[i * size : (i + 1) * size], rows)
        return model.Batch(
            part.tokens, part.labels, part.segments, num_labels, num_queries, part.images
        )

    return [micro(i) for i in range(recipe.micro_batches)]


def slice_tokens(rows: data.Example, axes: MeshAxes) -> data.Example:
    """This rank's slice of rows along tokens and patches.

    Labels and slots were made from whole rows.
    """
    ranks, index = axis_size(axes.cp), own_index(axes.cp)
    return tree.map(
        lambda x: x[:, index * x.shape[1] // ranks : (index + 1) * x.shape[1] // ranks], rows
    )


def make_step(
    recipe: Recipe, axes: MeshAxes = _ONE_RANK
) -> Callable[[TrainState, Sequence[model.Batch], float], tuple[TrainState, Metrics]]:
    """``step(state, micro_batches, lr) -> (state, metrics)``; gives up (writes into) the state that
    it is passed.

    Args:
        recipe: the run.
        axes: of its mesh, bound to this rank.
    """
    layout = lay_out(recipe, axes)
    gradient, measure = make_gradient(recipe, layout), make_measure(recipe, layout)

    def step(
        state: TrainState, batches: Sequence[model.Batch], lr: float
    ) -> tuple[TrainState, Metrics]:
        with scopes.scope("gradient"):
            sums, grads = gradient(state, batches)
        clipped, norm = optim.clip_by_global_norm(
            grads,
            recipe.optimizer.max_norm,
            placements=layout.placements,
            stages=axes.pp,
            p=float(recipe.optimizer.norm),
            empty=torch.zeros_like(sums.total),
        )
        bad = optim.non_finite((sums.total, norm))
        loss = losses.mean(sums.lm, batches[0].num_labels)
        skip, spike, guard = bad | (batches[0].num_labels == 0), torch.zeros_like(bad), state.guard
        if recipe.optimizer.spike:
            spike = optim.is_spike(guard, loss, norm, recipe.optimizer.spike) & ~skip
            skip = skip | spike
            guard = optim.remember(guard, loss, norm, spike, skip)
        with scopes.scope("optimiser"):
            weights, opt_state = layout.optimizer.update(
                clipped, state.opt_state, state.params, lr=lr, skip=skip
            )
        if isinstance(sums.logits, Tensor):
            clip_logits(recipe, layout, weights, opt_state, sums.logits, skip)
        biases = state.balance
        if recipe.trains_trunk:  # they are part of it
            biases = next_biases(biases, sums.histogram, layout, model.experts(recipe.model).top_k)
        new = TrainState(
            step=state.step + 1,
            params=weights,
            opt_state=opt_state,
            balance=optim.select(skip, state.balance, biases),
            key=state.key,
            guard=guard,
        )
        numbers = _metrics(recipe, batches[0], sums, norm, (bad, skip, spike), axes)
        return new, numbers._replace(detail=measure(grads, sums.load, norm))

    return step


def next_biases(
    state: balance.State, histogram: Tensor, layout: Layout, top_k: int
) -> balance.State:
    """The biases of all layers on every rank; a stage makes those of its own layers."""
    if not state.layers:
        return state
    rows = [state.layers.index(layer) for layer in layout.moe_layers]
    bias = (
        torch.stack([state.bias[row] for row in rows]) if rows else state.bias[:0]
    )  # a list index would be uploaded
    own = balance.update(balance.State(bias, layout.moe_layers), histogram, top_k=top_k).bias
    if not layout.axes.pp:
        return balance.State(own, state.layers)
    none = torch.zeros_like(state.bias[0])
    spread = [own[rows.index(i)] if i in rows else none for i in range(len(state.layers))]
    return balance.State(psum(torch.stack(spread), layout.axes.pp), state.layers)


def _metrics(
    recipe: Recipe,
    batch: model.Batch,
    sums: Sums,
    norm: Tensor,
    judged: tuple[Tensor, ...],
    axes: MeshAxes,
) -> Metrics:
    bad, skip, spike = (x.to(norm.dtype) for x in judged)
    load = sums.load.to(norm.dtype)
    worst = (
        (load.amax(1) / load.mean(1).clamp(min=1)).amax() if len(load) else torch.ones_like(norm)
    )
    return Metrics(
        loss=losses.mean(sums.lm, batch.num_labels),
        indexer_kl=losses.mean(sums.kl, batch.num_queries) / max(1, model.kl_layers(recipe.model)),
        grad_norm=norm,
        load_max_over_mean=pmax(worst, axes.pp),
        non_finite=bad,
        skipped=skip,
        spike=spike,
        max_logit=_max_logit(recipe, sums, norm, axes),
    )


def _max_logit(recipe: Recipe, sums: Sums, like: Tensor, axes: MeshAxes) -> Tensor:
    """Over all layers and heads; 0 where none is reported."""
    if not recipe.clips_logits:
        return torch.zeros_like(like)
    own = (
        sums.logits.amax().to(like.dtype)
        if isinstance(sums.logits, Tensor)
        else torch.full_like(like, -torch.inf)
    )
    return pmax(own, axes.view("pp", "tp"))
