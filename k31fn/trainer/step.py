"""One optimisation step, a pure function of state and batch that every rank of a mesh runs.

Nothing in a step waits for the device: metrics are tensors, a bad step is selected away on the
device. Every sum over tokens is taken over all ranks, so metrics, norms and decisions have the same
bits on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import balance, data, model, optim, scopes, segments, tree
from k31fn.config.recipe import Recipe
from k31fn.layers import losses
from k31fn.parallel.collectives import axis_size, own_index, pmax, psum
from k31fn.parallel.mesh import MeshAxes
from k31fn.trainer.gradient import Sums, make_gradient
from k31fn.trainer.layout import RankLayout
from k31fn.trainer.part_metrics import make_measure
from k31fn.trainer.qk_clip import clip_logits
from k31fn.trainer.state import TrainState

__all__ = [
    "Metrics",
    "Step",
    "make_batches",
    "make_step",
    "next_biases",
    "rows_at",
    "slice_tokens",
]

_ONE_RANK = MeshAxes()


class Metrics(NamedTuple):
    """Numbers of a step: on the device, of one dtype; all but the last are scalars.

    Attributes:
        loss: cross-entropy per label, nats; 0 in a step without labels.
        indexer_kl: the indexers' KL per query, averaged over the full-attention layers, nats.
        grad_norm: of all gradients, before clipping.
        load_max_over_mean: the busiest expert's tokens over the mean, the worst layer's.
        non_finite: 1 if a gradient or the loss was infinite or NaN, else 0.
        skipped: 1 if nothing was changed, since the step was not finite, had no label, was a spike
            or had a violation, else 0.
        spike: 1 if the loss or the norm stood out (:func:`k31fn.optim.is_spike`), else 0; 0 unless
            that is asked for.
        max_logit: the largest attention logit; 0 unless QK-Clip asks for it.
        violation: 0; or, where a plan of MoonEP breaks its laws, 1 + layer x ranks + rank of the
            last such layer and rank.
        replicas: experts that the rank with most of them holds besides its own in a layer, MoonEP's
            mean over micro-batches.
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
    violation: Tensor
    replicas: Tensor
    detail: Tensor | tuple[()] = ()

    def flat(self) -> Tensor:
        """All of them in one tensor, in order, so that one copy takes them to the host."""
        scalars = torch.stack([x for x in self if isinstance(x, Tensor) and not x.ndim])
        return torch.cat([scalars, self.detail]) if isinstance(self.detail, Tensor) else scalars


Step = Callable[[TrainState, Sequence[model.Batch], float | Tensor], tuple[TrainState, Metrics]]
"""``step(state, micro_batches, lr) -> (state, metrics)``; gives up (writes into) the state that it
is passed.
"""


def rows_at(dataset: data.Rows, step: int, axes: MeshAxes = _ONE_RANK) -> data.Example:
    """The whole rows of a step that this rank works on, if need be together with others of its
    context and stage.

    They are a slice of one order, which no mesh changes.
    """
    # not "cp" and "tp": their ranks need whole rows, of whose tokens each takes a slice later
    rows = axes.view("dp", "fsdp")
    return dataset.batch_at(step, rank=own_index(rows), num_ranks=axis_size(rows))


def make_batches(
    recipe: Recipe, rows: data.Example, device: torch.device, axes: MeshAxes = _ONE_RANK
) -> list[model.Batch]:
    """A rank's rows as micro-batches with the denominators of the whole step; its slice of the
    tokens of each row.
    """
    # counted before the tokens are sliced, so only ranks with other rows are added
    num_labels = (rows.labels != losses.IGNORED).sum()
    num_queries = segments.valid(rows.segments).sum()
    counts = torch.stack([num_labels, num_queries])
    rows, counts = tree.map(
        lambda x: x.to(device, non_blocking=True), (slice_tokens(rows, axes), counts)
    )
    num_labels, num_queries = psum(counts, axes.view("dp", "fsdp"))
    size = len(rows.tokens) // recipe.micro_batches
    batches = []
    for i in range(recipe.micro_batches):
        part = _rows_between(rows, i * size, (i + 1) * size)
        batches.append(
            model.Batch(
                tokens=part.tokens,
                labels=part.labels,
                segments=part.segments,
                num_labels=num_labels,
                num_queries=num_queries,
                images=part.images,
            )
        )
    return batches


def _rows_between(rows: data.Example, first: int, end: int) -> data.Example:
    return tree.map(lambda x: x[first:end], rows)


def slice_tokens(rows: data.Example, axes: MeshAxes) -> data.Example:
    """This rank's slice of rows along tokens and patches.

    Labels and slots were made from whole rows.
    """
    ranks = axis_size(axes.cp)
    index = own_index(axes.cp)

    def part(x: Tensor) -> Tensor:
        length = x.shape[1]
        return x[:, index * length // ranks : (index + 1) * length // ranks]

    return tree.map(part, rows)


def make_step(layout: RankLayout) -> Step:
    """The step of a run, or of one phase of it, on ``layout``."""
    recipe = layout.recipe
    gradient = make_gradient(layout)
    measure = make_measure(layout)

    def step(
        state: TrainState, batches: Sequence[model.Batch], lr: float | Tensor
    ) -> tuple[TrainState, Metrics]:
        with scopes.scope("gradient"):
            sums, grads = gradient(state, batches)
        # each gradient is read once, for all norms that are made of them
        norms = optim.leaf_norms(grads)
        p = float(recipe.optimizer.norm)
        norm = optim.global_norm(
            grads,
            placements=layout.placements,
            stages=layout.axes.pp,
            p=p,
            norms=norms if p == 2 else (),
            empty=torch.zeros_like(sums.total),  # of a stage in which nothing is trained
        )
        verdict, guard = _judge(layout, state, batches[0], sums, norm)
        # The optimiser clips as it reads: no second tree of gradients. It writes into its state, so
        # it selects by itself; a skipped step leaves all of it as it was, without the host knowing.
        scale = optim.clip_factor(norm, recipe.optimizer.max_norm)
        with scopes.scope("optimiser"):
            weights, opt_state = layout.optimizer.update(
                grads,
                state.opt_state,
                state.params,
                lr=lr,
                scale=scale,
                skip=verdict.skip,
                donate=True,
            )
        if isinstance(sums.logits, Tensor):
            clip_logits(layout, weights, opt_state, sums.logits, verdict.skip)
        biases = state.balance
        if recipe.trains_trunk:  # they are part of it
            biases = next_biases(biases, sums.histogram, sums.load, layout)
        new = TrainState(
            step=state.step + 1,
            params=weights,
            opt_state=opt_state,
            balance=optim.select(verdict.skip, state.balance, biases),
            key=state.key,
            guard=guard,
        )
        metrics = _metrics(layout, batches[0], sums, norm, verdict)
        # of the gradients before clipping, so that the parts' norms add up to the whole one
        return new, metrics._replace(detail=measure(norms, sums.load, norm))

    return step


class _Verdict(NamedTuple):
    """Whether a step counts; each a boolean on the device, equal on all ranks.

    Attributes:
        bad: a gradient or the loss is infinite or NaN.
        spike: the loss or the norm stands out.
        skip: nothing is changed: bad, a spike, a violation, or no label.
        plans: the numbers ``violation`` and ``replicas`` of :class:`Metrics`.
    """

    bad: Tensor
    spike: Tensor
    skip: Tensor
    plans: Tensor


def _judge(
    layout: RankLayout, state: TrainState, batch: model.Batch, sums: Sums, norm: Tensor
) -> tuple[_Verdict, Any]:
    """The verdict on a step, and what spikes are told by from now on."""
    bad = optim.non_finite((sums.total, norm))
    plans = _plans(layout, sums, norm)
    skip = bad | (batch.num_labels == 0) | (plans[0] > 0)
    deviations = layout.recipe.optimizer.spike
    if not deviations:
        return _Verdict(bad, torch.zeros_like(bad), skip, plans), state.guard
    loss = losses.mean(sums.lm, batch.num_labels)
    # a step that is skipped anyway is no spike: its loss says nothing
    spike = optim.is_spike(state.guard, loss, norm, deviations) & ~skip
    skip = skip | spike
    guard = optim.update_spikes(state.guard, loss, norm, spike, skip)
    return _Verdict(bad, spike, skip, plans), guard


def _plans(layout: RankLayout, sums: Sums, like: Tensor) -> Tensor:
    """The layer and the rank of a plan that breaks its laws, as one number, and the most replicas;
    on all ranks.
    """
    if not isinstance(sums.placement, Tensor):
        return torch.zeros_like(like).expand(2)
    ranks = layout.recipe.mesh.world_size
    rank = own_index(layout.axes.atoms)
    # a stage without experts takes part in the maximum too
    found = torch.zeros_like(like)
    for layer, plan in zip(layout.moe_layers, sums.placement, strict=True):
        name = 1 + layer * ranks + rank
        found = torch.where(plan[0] > 0, name, found)
    most = torch.zeros_like(like)
    if len(sums.placement):
        most = sums.placement[:, 1].amax().to(like.dtype) / layout.recipe.micro_batches
    return pmax(torch.stack([found, most]), layout.axes.atoms)


def next_biases(
    state: balance.State, histogram: Tensor, load: Tensor, layout: RankLayout
) -> balance.State:
    """The biases of all layers on every rank; a stage makes those of its own layers."""
    if not state.layers:
        return state
    rows = [state.layers.index(layer) for layer in layout.moe_layers]
    # stacked, not indexed by the list, which would be uploaded to the device in every step
    local_bias = torch.stack([state.bias[row] for row in rows]) if rows else state.bias[:0]
    local = balance.State(local_bias, layout.moe_layers)
    experts = model.experts(layout.recipe.model)
    if experts.bias_step:
        new = balance.update_by_sign(local, load, step=experts.bias_step).bias
    else:
        new = balance.update(local, histogram, top_k=experts.top_k).bias
    if not layout.axes.pp:
        return balance.State(new, state.layers)
    # each layer is one stage's: zeros elsewhere, and the sum is its stage's row
    zero = torch.zeros_like(state.bias[0])
    spread = [new[rows.index(i)] if i in rows else zero for i in range(len(state.layers))]
    return balance.State(psum(torch.stack(spread), layout.axes.pp), state.layers)


def _metrics(
    layout: RankLayout, batch: model.Batch, sums: Sums, norm: Tensor, verdict: _Verdict
) -> Metrics:
    recipe = layout.recipe
    load = sums.load.to(norm.dtype)
    worst = torch.ones_like(norm)
    if len(load):
        worst = (load.amax(1) / load.mean(1).clamp(min=1)).amax()
    return Metrics(
        loss=losses.mean(sums.lm, batch.num_labels),
        indexer_kl=losses.mean(sums.kl, batch.num_queries) / max(1, model.kl_layers(recipe.model)),
        grad_norm=norm,
        load_max_over_mean=pmax(worst, layout.axes.pp),
        non_finite=verdict.bad.to(norm.dtype),
        skipped=verdict.skip.to(norm.dtype),
        spike=verdict.spike.to(norm.dtype),
        max_logit=_max_logit(layout, sums, norm),
        violation=verdict.plans[0],
        replicas=verdict.plans[1],
    )


def _max_logit(layout: RankLayout, sums: Sums, like: Tensor) -> Tensor:
    """The largest over all layers and heads; 0 where none is reported."""
    if not layout.recipe.clips_logits:
        return torch.zeros_like(like)
    # a stage without full attention takes part in the maximum too
    local = torch.full_like(like, -torch.inf)
    if isinstance(sums.logits, Tensor):
        local = sums.logits.amax().to(like.dtype)
    return pmax(local, layout.axes.view("pp", "tp"))
