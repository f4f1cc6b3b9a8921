"""One optimisation step, and the evaluation: pure functions of state and batch.

Nothing in a step waits for the device: metrics are tensors, a bad step is selected away on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import balance, data, model, optim, params, segments, tree
from k31fn.autodiff import value_and_grad
from k31fn.config import Recipe
from k31fn.layers import losses
from k31fn.trainer.state import TrainState, make_optimizer, merge, split, trained_specs

__all__ = ["Metrics", "heldout_loss", "make_batches", "make_step"]


class Metrics(NamedTuple):
    """Numbers of a step: scalars on the device, of one dtype.

    Attributes:
        loss: cross-entropy per label, nats; 0 in a step without labels.
        indexer_kl: the indexers' KL per query, averaged over the full-attention layers, nats.
        grad_norm: of all gradients, before clipping.
        load_max_over_mean: the busiest expert's tokens over the mean, the worst layer's.
        non_finite: 1 if a gradient or the loss was infinite or NaN, else 0.
        skipped: 1 if nothing was changed, since the step was not finite or had no label, else 0.
    """

    loss: Tensor
    indexer_kl: Tensor
    grad_norm: Tensor
    load_max_over_mean: Tensor
    non_finite: Tensor
    skipped: Tensor


def make_batches(recipe: Recipe, rows: data.Example, device: torch.device) -> list[model.Batch]:
    """A step's rows as micro-batches with the denominators of the whole step."""
    counts = (rows.labels != losses.IGNORED).sum(), segments.valid(rows.segments).sum()
    rows, counts = tree.map(lambda x: x.to(device, non_blocking=True), (rows, counts))
    size = recipe.batch_size // recipe.micro_batches

    def micro(i: int) -> model.Batch:
        part = tree.map(lambda x: x[i * size : (i + 1) * size], rows)
        return model.Batch(part.tokens, part.labels, part.segments, *counts)

    return [micro(i) for i in range(recipe.micro_batches)]


def make_step(recipe: Recipe) -> Callable[[TrainState, Sequence[model.Batch], float], tuple[TrainState, Metrics]]:
    """``step(state, micro_batches, lr) -> (state, metrics)``; gives up (writes into) the state that it is passed."""
    specs = trained_specs(recipe)
    optimizer = make_optimizer(recipe, specs)
    trains_all = recipe.trainable == "all"

    def loss(trained: Any, frozen: Any, batch: model.Batch, state: balance.State) -> tuple[Tensor, model.Losses]:
        narrow = params.cast(merge(trained, frozen, specs), specs, recipe.precision.compute)
        return model.loss(narrow, batch, recipe.model, balance=state, remat=recipe.remat)

    gradient = value_and_grad(loss, has_aux=True)

    def step(state: TrainState, batches: Sequence[model.Batch], lr: float) -> tuple[TrainState, Metrics]:
        trained, frozen = split(state.params, specs)
        sums = gradient(trained, frozen, batches[0], state.balance)
        for batch in batches[1:]:
            sums = tree.map(torch.add, sums, gradient(trained, frozen, batch, state.balance))
        (total, parts), grads = sums
        clipped, norm = optim.clip_by_global_norm(grads, recipe.optimizer.max_norm)
        bad = optim.non_finite((total, norm))
        skip = bad | (batches[0].num_labels == 0)
        weights, opt_state = optimizer.update(clipped, state.opt_state, state.params, lr=lr, skip=skip)
        biases = state.balance
        if trains_all:  # they are part of the trunk
            biases = balance.update(biases, parts.histogram, top_k=recipe.model.moe.top_k)
        new = TrainState(
            step=state.step + 1,
            params=weights,
            opt_state=opt_state,
            balance=optim.select(skip, state.balance, biases),
            key=state.key,
        )
        return new, _metrics(batches[0], parts, norm, bad, skip)

    return step


def _metrics(batch: model.Batch, parts: model.Losses, norm: Tensor, bad: Tensor, skip: Tensor) -> Metrics:
    load = parts.load.to(norm.dtype)
    worst = (load.amax(1) / load.mean(1).clamp(min=1)).amax() if len(load) else torch.ones_like(norm)
    return Metrics(
        loss=losses.mean(parts.lm, batch.num_labels),
        indexer_kl=losses.mean(parts.kl.sum(), batch.num_queries) / max(1, len(parts.kl)),
        grad_norm=norm,
        load_max_over_mean=worst,
        non_finite=bad.to(norm.dtype),
        skipped=skip.to(norm.dtype),
    )


@torch.no_grad()
def heldout_loss(
    recipe: Recipe, state: TrainState, scored: data.HeldOut, *, progress: Callable[[int], object] = lambda rows: None
) -> float:
    """Nats per byte of the held-out rows.

    Args:
        recipe: the run.
        state: its state.
        scored: the rows and the number of their bytes.
        progress: called with the number of rows that were just scored; what it raises ends the scoring.
    """
    device = state.step.device
    weights = params.cast(state.params, trained_specs(recipe), recipe.precision.compute)
    totals = []
    for first in range(0, len(scored.rows.tokens), recipe.batch_size):
        rows = tree.map(lambda x: x[first : first + recipe.batch_size].to(device), scored.rows)  # noqa: B023
        out = model.apply(weights, rows.tokens, recipe.model, balance=state.balance, segments=rows.segments)
        totals.append(losses.linear_cross_entropy(out.hidden, weights.head, rows.labels).total)
        progress(len(rows.tokens))
    return float(torch.stack(totals).to("cpu", torch.float64).sum()) / scored.num_bytes
