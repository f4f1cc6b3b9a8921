"""The held-out loss, forward only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from k31fn import data, model, segments, tree
from k31fn.config.recipe import Recipe
from k31fn.layers import losses
from k31fn.layers.patches import Images, from_grids
from k31fn.model import stages
from k31fn.parallel.axis import Axis
from k31fn.parallel.collectives import axis_size, own_index, psum
from k31fn.parallel.mesh import MeshAxes
from k31fn.parallel.pipeline.carry import StageCarry, WireFormat
from k31fn.parallel.point_to_point import recv, send
from k31fn.trainer.layout import Layout, lay_out
from k31fn.trainer.state import TrainState
from k31fn.trainer.step import slice_tokens

__all__ = ["heldout_loss"]

_ONE_RANK = MeshAxes()


@torch.no_grad()
def heldout_loss(
    recipe: Recipe,
    state: TrainState,
    scored: data.HeldOut,
    axes: MeshAxes = _ONE_RANK,
    *,
    progress: Callable[[int], object] = lambda rows: None,
) -> float:
    """Nats per byte of the held-out rows, which the ranks share out as they do a micro-batch's.

    Args:
        recipe: the run.
        state: its state.
        scored: the rows and the number of their bytes.
        axes: of the mesh, bound to this rank.
        progress: called with the number of rows that were just scored; what it raises ends the
            scoring.
    """
    layout, share = lay_out(recipe, axes), axes.view("dp", "fsdp")
    ranks, index = axis_size(share), own_index(share)
    at_once, totals = recipe.batch_size // recipe.micro_batches, []
    for first in range(0, len(scored.rows.tokens), at_once):
        rows = tree.map(lambda x: x[first : first + at_once], scored.rows)  # noqa: B023
        count = len(rows.tokens)
        each = -(-count // ranks)
        own = tree.map(lambda x: x[index * each : (index + 1) * each], _pad(rows, each * ranks))  # noqa: B023
        totals.append(_token_losses(recipe, layout, state, slice_tokens(own, axes)))
        progress(count)
    own_sum = torch.stack(totals).to("cpu", torch.float64).sum()
    return float(psum(own_sum, axes.view("pp", "dp", "fsdp", "cp"))) / scored.num_bytes


def _pad(rows: data.Example, count: int) -> data.Example:
    """Rows of nothing but padding, up to ``count`` rows."""
    missing = count - len(rows.tokens)

    def pad(x: Tensor, value: int) -> Tensor:
        return torch.cat([x, x.new_full((missing, *x.shape[1:]), value)]) if missing else x

    packing = segments.Segments(pad(rows.segments.ids, 0), pad(rows.segments.position, 0))
    images = rows.images
    if not isinstance(images, tuple):
        empty = from_grids([[]], images.pixels.shape[1])
        empty = tree.map(
            lambda x, e: torch.cat([x, e.expand(missing, *e.shape[1:])]), images.patches, empty
        )
        images = Images(pad(images.pixels, 0), empty, pad(images.slots, -1))
    return data.Example(pad(rows.tokens, 0), pad(rows.labels, losses.IGNORED), packing, images)


def _token_losses(recipe: Recipe, layout: Layout, state: TrainState, rows: data.Example) -> Tensor:
    """The sum over a rank's tokens; on stages before the last, 0."""
    rows = tree.map(lambda x: x.to(state.step.device), rows)
    cfg, places, sh = recipe.model, layout.placements, layout.sh
    if layout.schedule.num_stages == 1:
        out = model.apply(
            state.params,
            rows.tokens,
            cfg,
            balance=state.balance,
            segments=rows.segments,
            images=rows.images,
            placements=places,
            sh=sh,
        )
        return model.lm_loss(state.params, out.hidden, rows.labels, placements=places, sh=sh)
    one = torch.ones((), dtype=torch.int64, device=rows.tokens.device)
    batch = model.Batch(
        rows.tokens, rows.labels, rows.segments, num_labels=one, num_queries=one, images=rows.images
    )
    return _through_stages(recipe, layout, state, batch)


def _through_stages(
    recipe: Recipe, layout: Layout, state: TrainState, batch: model.Batch
) -> Tensor:
    """Stage after stage, each rank performing its own."""
    axis, table = layout.axes.pp, layout.schedule
    carries = stages.stage_carries(
        recipe.model, layout.parts, batch, recipe.precision.compute, sh=layout.sh
    )
    wire, blocks, sums, sent = WireFormat(carries, table.num_ranks), [], [], []
    for s, part in zip(table.stages_of(own_index(axis)), layout.own, strict=True):
        stream, fresh = wire.parts(s, _receive(wire.message(s), axis, table.rank_of(s - 1), batch))
        run = stages.make_stage(
            recipe.model,
            part,
            balance=state.balance,
            placements=stages.select(layout.placements, [part]),
            sh=layout.sh,
        )
        out = run(stages.select(state.params, [part]), StageCarry(stream, (*blocks, *fresh)), batch)
        blocks, message = out.carry.blocks, []
        sums.append(out.sums.lm)
        if not part.last:
            message = [*tree.leaves(out.carry.stream), *(blocks[i] for i in wire.fresh(s + 1))]
        sent += [send(x, axis, table.rank_of(s + 1)) for x in message]
    for wait in sent:
        wait()
    return torch.stack(sums).sum()


def _receive(
    likes: Sequence[Tensor], axis: tuple[Axis, ...], source: int, batch: model.Batch
) -> list[Tensor]:
    device = batch.tokens.device
    return [
        wait()
        for wait in [recv(x.shape, axis, source, dtype=x.dtype, device=device) for x in likes]
    ]
