"""What a rank sends in a step, found by running that rank's step on meta tensors.

A step of a deep model with many micro-batches does the same again and again, so it is run for a
model with one layer of each kind, then with another layer of each, and for one micro-batch and two:
what is added each time is added as often as there are layers and micro-batches. Sums of gradients,
which travel many tensors at a time, matrices that the optimiser deals out, and messages between the
stages of a pipeline, which hold blocks of earlier ones, are those of the whole model. Routes are
taken to be balanced.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from k31fn import model, segments
from k31fn.config.recipe import Recipe
from k31fn.kernels.shapes import shapes_only
from k31fn.layers.router import NUM_BINS
from k31fn.model import stages
from k31fn.parallel import fsdp
from k31fn.parallel.collective_record import CollectiveRecord, record_collectives
from k31fn.parallel.pipeline.carry import WireFormat
from k31fn.parallel.pipeline.messages import messages
from k31fn.trainer.forecast.abstract_rank import META, abstract_rank, local_rows, run_step
from k31fn.trainer.forecast.few_layers import LayerKind, layer_kinds, with_layers
from k31fn.trainer.forecast.shape_cache import ShapeCache
from k31fn.trainer.layout import RankLayout, cut, make_schedule
from k31fn.trainer.state import split
from k31fn.trainer.step import next_biases

__all__ = ["Volume", "volumes"]

_Key = tuple[str, tuple[str, ...]]  # kind of collective, names of its axes


class Volume(NamedTuple):
    """What a rank sends in a step, by kind of collective and names of the axes that it goes over.

    Attributes:
        calls: collectives issued.
        nbytes: of the operands that the rank hands in.
    """

    calls: Counter[_Key]
    nbytes: Counter[_Key]

    def plus(self, other: Volume, times: int = 1) -> Volume:
        """This and ``times`` the other one."""
        return Volume(_add(self.calls, other.calls, times), _add(self.nbytes, other.nbytes, times))

    def divided(self, by: int) -> Volume:
        """An equal part of this; it divides evenly."""
        calls = Counter({key: n // by for key, n in self.calls.items()})
        nbytes = Counter({key: n // by for key, n in self.nbytes.items()})
        return Volume(calls, nbytes)

    def without(self, *kinds: str) -> Volume:
        """The other kinds of collectives."""
        calls = Counter({key: n for key, n in self.calls.items() if key[0] not in kinds})
        nbytes = Counter({key: n for key, n in self.nbytes.items() if key[0] not in kinds})
        return Volume(calls, nbytes)


def _add(a: Counter[_Key], b: Counter[_Key], times: int) -> Counter[_Key]:
    # not Counter's own +, which drops what is not positive: differences of volumes are added too
    return Counter({key: a[key] + times * b[key] for key in {**a, **b}})


def volumes(recipe: Recipe) -> list[Volume]:
    """What a rank sends in a step; for each rank of the pipeline, any of those that work on its
    stages.
    """
    with shapes_only(), ShapeCache():
        if recipe.mesh.pp == 1:
            return [_by_kinds(recipe)]
        return _by_stages(recipe)


def _by_kinds(recipe: Recipe) -> Volume:
    """Without a pipeline: a layer of each kind, and what each further one of a kind adds."""
    kinds = layer_kinds(recipe.model)
    each = list(dict.fromkeys(kinds))  # in the order in which they come, which a set would lose
    base = _by_micro_batches(with_layers(recipe, each), 0)
    total = base
    for kind in each:
        more = kinds.count(kind) - 1
        if more > 0:
            longer = _by_micro_batches(with_layers(recipe, [*each, kind]), 0)
            total = total.plus(longer, more).plus(base, -more)
    return total.plus(_at_once(recipe, 0))


def _by_stages(recipe: Recipe) -> list[Volume]:
    """From a pipeline each of whose stages has a layer of each kind that it has, and what more
    layers of a kind add.
    """
    kinds = layer_kinds(recipe.model)
    table = make_schedule(recipe, recipe.mesh.pp)
    whole = [[kinds[i] for i in part.layers] for part in cut(recipe.model, table)]
    short = _shortened(whole)
    few_layers = with_layers(recipe, list(itertools.chain.from_iterable(short)))
    by_kind = {kind: _layer_of_each_stage(recipe, kind) for kind in dict.fromkeys(kinds)}
    by_stages: dict[tuple[object, ...], Volume] = {}
    result = []
    for rank in range(table.num_ranks):
        own = table.stages_of(rank)
        # Ranks whose stages have the same layers send the same, but for the first and the last
        # stage, which have the embedding and the head.
        alike = tuple((*short[s], s == 0, s == table.num_stages - 1) for s in own)
        if alike not in by_stages:
            by_stages[alike] = _by_micro_batches(few_layers, rank)
        total = by_stages[alike]
        missing = Counter[LayerKind]()
        for s in own:
            missing.update(whole[s])
            missing.subtract(short[s])  # below 0 for a layer that only made a stage long enough
        for kind, count in missing.items():
            total = total.plus(by_kind[kind], count)
        # Messages hold the blocks of all earlier layers, so they are counted for the whole model.
        at_once = _at_once(recipe, rank).plus(_messages(recipe, rank))
        result.append(total.without("send", "recv").plus(at_once))
    return result


def _shortened(stages_of_kinds: Sequence[Sequence[LayerKind]]) -> list[list[LayerKind]]:
    """Each stage with one layer of each of its kinds; the last is repeated to make all as long.

    A pipeline cuts a model into stages of as many layers, and the short one is cut like any.
    """
    each = [list(dict.fromkeys(stage)) for stage in stages_of_kinds]
    length = max(len(kinds) for kinds in each)
    short = []
    for kinds, stage in zip(each, stages_of_kinds, strict=True):
        short.append(kinds + [stage[-1]] * (length - len(kinds)))
    return short


def _layer_of_each_stage(recipe: Recipe, kind: LayerKind) -> Volume:
    """What one more layer of a kind adds to a stage."""
    table = make_schedule(recipe, recipe.mesh.pp)
    # every stage has the same layers, so the first rank's difference is any rank's
    one = _by_micro_batches(with_layers(recipe, [kind] * table.num_stages), 0)
    two = _by_micro_batches(with_layers(recipe, [kind] * (2 * table.num_stages)), 0)
    return two.plus(one, -1).divided(table.num_chunks)


def _by_micro_batches(recipe: Recipe, stage_rank: int) -> Volume:
    """A step without what is done for all layers at once."""
    # an interleaved pipeline takes micro-batches in groups of as many as it has ranks
    unit = recipe.mesh.pp if recipe.pipeline.num_chunks > 1 and recipe.mesh.pp > 1 else 1
    more = recipe.micro_batches // unit - 1
    one = _with_micro_batches(recipe, stage_rank, unit)
    if not more:
        return one
    two = _with_micro_batches(recipe, stage_rank, 2 * unit)
    return one.plus(two, more).plus(one, -more)


def _with_micro_batches(recipe: Recipe, stage_rank: int, count: int) -> Volume:
    size = recipe.batch_size // recipe.micro_batches * count
    # what is done once a step is taken off here, and added for the whole model by the callers
    some = dataclasses.replace(recipe, micro_batches=count, batch_size=size)
    return _volume(run_step(some, stage_rank)).plus(_at_once(some, stage_rank), -1)


def _at_once(recipe: Recipe, stage_rank: int) -> Volume:
    """What a step sends for all layers of the model together: gradients to sum, matrices to step,
    and new biases.
    """
    layout, state = abstract_rank(recipe, stage_rank)
    grads, _ = split(state.params, layout.specs)
    shape = len(layout.moe_layers), model.experts(recipe.model).num_experts, NUM_BINS
    histogram = torch.empty(shape, dtype=torch.int64, device=META)
    with record_collectives() as record:
        summed = fsdp.sum_gradients(grads, layout.placements)
        layout.optimizer.update(summed, state.opt_state, state.params, lr=1e-3, donate=True)
        if recipe.trains_trunk:
            next_biases(state.balance, histogram, histogram[..., 0], layout)
    return _volume(record)


def _messages(recipe: Recipe, rank: int) -> Volume:
    """Messages between the stages, by what the engine would send."""
    layout = abstract_rank(recipe, rank).layout
    table = layout.schedule
    wire = _wire(recipe, layout)
    volume = Volume(Counter(), Counter())
    for message in messages(table):
        tensors = wire.message(message.to if message.kind == "forward" else message.source)
        for kind, stage in (("send", message.source), ("recv", message.to)):
            if table.rank_of(stage) == rank:
                volume.calls[kind, ("pp",)] += len(tensors)
                volume.nbytes[kind, ("pp",)] += sum(t.nbytes for t in tensors)
    return volume


def _wire(recipe: Recipe, layout: RankLayout) -> WireFormat:
    """What passes between stages for one micro-batch."""
    rows = local_rows(recipe) // recipe.micro_batches
    tokens = torch.empty(rows, recipe.length // recipe.mesh.cp, dtype=torch.int64, device=META)
    count = torch.empty((), dtype=torch.int64, device=META)
    batch = model.Batch(tokens, tokens, segments.Segments(tokens, tokens), count, count)
    carries = stages.stage_carries(
        recipe.model, layout.parts, batch, recipe.precision.compute, sh=layout.sh
    )
    return WireFormat(carries, layout.schedule.num_ranks)


def _volume(record: CollectiveRecord) -> Volume:
    volume = Volume(Counter(), Counter())
    for event in record.events:
        # the wait for a collective is an event too
        if event.what == "issue":
            volume.calls[event.kind, event.axes] += 1
            volume.nbytes[event.kind, event.axes] += event.nbytes
    return volume
