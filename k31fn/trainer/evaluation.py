"""The held-out loss, forward only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from k31fn import data, model, segments, tree
from k31fn.layers import losses
from k31fn.layers.patches import Images, from_grids
from k31fn.model import stages
from k31fn.parallel.axis import Axis
from k31fn.parallel.collectives import axis_size, own_index, psum
from k31fn.parallel.pipeline.carry import StageCarry, WireFormat
from k31fn.parallel.point_to_point import recv, send
from k31fn.trainer.layout import RankLayout
from k31fn.trainer.state import TrainState
from k31fn.trainer.step import slice_tokens

__all__ = ["heldout_loss"]


@torch.no_grad()
def heldout_loss(
    layout: RankLayout,
    state: TrainState,
    scored: data.HeldOut,
    *,
    progress: Callable[[int], object] = lambda rows: None,
) -> float:
    """Nats per byte of the held-out rows, which the ranks share out as they do a micro-batch's.

    Args:
        layout: of this rank.
        state: of the run.
        scored: the rows and the number of their bytes.
        progress: called with the number of rows that were just scored; what it raises ends the
            scoring.
    """
    recipe, axes = layout.recipe, layout.axes
    at_once = recipe.batch_size // recipe.micro_batches
    totals = []
    for first in range(0, len(scored.rows.tokens), at_once):
        rows = _rows_between(scored.rows, first, first + at_once)
        own = slice_tokens(_share(rows, layout), axes)
        totals.append(_token_losses(layout, state, own))
        progress(len(rows.tokens))
    # Added up in float64 on the host: how many rows are scored at once must not show in the sum.
    local = torch.stack(totals).to("cpu", torch.float64).sum()
    return float(psum(local, axes.view("pp", "dp", "fsdp", "cp"))) / scored.num_bytes


def _rows_between(rows: data.Example, first: int, end: int) -> data.Example:
    return tree.map(lambda x: x[first:end], rows)


def _share(rows: data.Example, layout: RankLayout) -> data.Example:
    """As many rows for every rank that has rows of its own: the last ones may be padding."""
    axes = layout.axes.view("dp", "fsdp")
    ranks = axis_size(axes)
    index = own_index(axes)
    each = -(-len(rows.tokens) // ranks)
    return _rows_between(_pad(rows, each * ranks), index * each, (index + 1) * each)


def _pad(rows: data.Example, count: int) -> data.Example:
    """Rows of nothing but padding, up to ``count`` rows."""
    missing = count - len(rows.tokens)

    def pad(x: Tensor, value: int) -> Tensor:
        return torch.cat([x, x.new_full((missing, *x.shape[1:]), value)]) if missing else x

    # document 0 is padding (k31fn.segments), and has no label
    ids = pad(rows.segments.ids, 0)
    packing = segments.Segments(ids, pad(rows.segments.position, 0))
    images = rows.images
    if not isinstance(images, tuple):
        # where there is no image, positions have values of their own, which from_grids knows
        empty = from_grids([[]], images.pixels.shape[1])
        patches = tree.map(
            lambda x, e: torch.cat([x, e.expand(missing, *e.shape[1:])]), images.patches, empty
        )
        images = Images(pad(images.pixels, 0), patches, pad(images.slots, -1))
    return data.Example(pad(rows.tokens, 0), pad(rows.labels, losses.IGNORED), packing, images)


def _token_losses(layout: RankLayout, state: TrainState, rows: data.Example) -> Tensor:
    """The sum over a rank's tokens; on stages before the last, 0."""
    rows = tree.map(lambda x: x.to(state.step.device), rows)
    placements, sh = layout.placements, layout.sh
    if layout.schedule.num_stages > 1:
        # a stage takes a batch, whose denominators only its loss uses, which is not asked for
        one = torch.ones((), dtype=torch.int64, device=rows.tokens.device)
        batch = model.Batch(rows.tokens, rows.labels, rows.segments, one, one, rows.images)
        return _through_stages(layout, state, batch)
    # exact products and no remat, whatever the run trains with: losses of runs compare
    out = model.apply(
        state.params,
        rows.tokens,
        layout.recipe.model,
        balance=state.balance,
        segments=rows.segments,
        images=rows.images,
        placements=placements,
        sh=sh,
    )
    return model.lm_loss(state.params, out.hidden, rows.labels, placements=placements, sh=sh)


def _through_stages(layout: RankLayout, state: TrainState, batch: model.Batch) -> Tensor:
    """Stage after stage, each rank performing its own."""
    recipe, axis, table = layout.recipe, layout.axes.pp, layout.schedule
    carries = stages.stage_carries(
        recipe.model, layout.parts, batch, recipe.precision.compute, sh=layout.sh
    )
    wire = WireFormat(carries, table.num_ranks)
    blocks: tuple[Tensor, ...] = ()
    sums, sent = [], []
    for s, part in zip(table.stages_of(own_index(axis)), layout.own, strict=True):
        received = _receive(wire.message(s), axis, table.rank_of(s - 1), batch)
        stream, fresh = wire.parts(s, received)
        run = stages.make_stage(
            recipe.model,
            part,
            balance=state.balance,
            placements=stages.select(layout.placements, [part]),
            sh=layout.sh,
        )
        out = run(stages.select(state.params, [part]), StageCarry(stream, (*blocks, *fresh)), batch)
        blocks = out.carry.blocks
        sums.append(out.sums.lm)
        if not part.last:
            message = [*tree.leaves(out.carry.stream), *(blocks[i] for i in wire.fresh(s + 1))]
            sent += [send(x, axis, table.rank_of(s + 1)) for x in message]
    # What was sent may still be on its way, from memory that must live until it has arrived.
    for wait in sent:
        wait()
    return torch.stack(sums).sum()


def _receive(
    likes: Sequence[Tensor], axis: tuple[Axis, ...], source: int, batch: model.Batch
) -> list[Tensor]:
    # all are asked for before any is waited for, so they travel together
    waits = []
    for x in likes:
        waits.append(recv(x.shape, axis, source, dtype=x.dtype, device=batch.tokens.device))
    return [wait() for wait in waits]
