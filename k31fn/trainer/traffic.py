"""What a rank holds and what it sends in a step, found by running that rank's step on meta tensors.

A step of a deep model with many micro-batches does the same again and again, so it is run for a model with one layer of
each kind, then with another layer of each, and for one micro-batch and two: what is added each time is added as often
as there are layers and micro-batches. The sums of gradients, which travel many tensors at a time, are those of the
whole model. Routes are taken to be balanced.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from k31fn import data, model, segments, tree
from k31fn.config import Recipe
from k31fn.kernels.shapes import shapes_only
from k31fn.layers import kda, latent_moe
from k31fn.model import stages
from k31fn.parallel import MeshAxes, Record, fsdp, record_collectives
from k31fn.parallel.abstract import abstract_axes
from k31fn.parallel.pipeline import Wire
from k31fn.parallel.pipeline.messages import messages
from k31fn.trainer.layout import Layout, lay_out
from k31fn.trainer.state import abstract_state, split
from k31fn.trainer.step import make_batches, make_step

__all__ = ["Held", "Volume", "held", "run_abstractly", "volumes"]

_META = torch.device("meta")
_Kind = tuple[Any, Any]  # configs of a layer's attention and feed-forward


class Held(NamedTuple):
    """A rank's part of one weight, with what belongs to it; in bytes.

    Attributes:
        path: of the weight.
        shape: of the whole.
        part: of this rank's part.
        axes: of the mesh, by dimension.
        weight: of the part.
        gradient: of its gradient; 0 if it is not trained.
        optimizer: of its part of the optimiser's state.
    """

    path: str
    shape: tuple[int, ...]
    part: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    weight: int
    gradient: int
    optimizer: int


def held(recipe: Recipe, stage_rank: int = 0) -> list[Held]:
    """What a rank holds of each weight; all ranks of a rank of the pipeline hold as much."""
    axes = _axes(recipe, stage_rank)
    layout, state = lay_out(recipe, axes), abstract_state(recipe, axes)
    of_optimizer = Counter[str]()
    weights = dict(tree.flatten_with_paths(state.params))
    for path, x in tree.flatten_with_paths(state.opt_state):
        names = path.split(".")
        ends = (".".join(names[i:]) for i in range(len(names)))
        of_optimizer[next((end for end in ends if end in weights), "")] += x.nbytes
    found = []
    for (path, spec), place in zip(tree.flatten_with_paths(layout.specs), tree.leaves(layout.placements), strict=True):
        x = weights[path]
        wide = torch.promote_types(x.dtype, recipe.precision.reduce)
        gradient = 0 if "frozen" in spec.tags else x.numel() * wide.itemsize
        names = tuple(tuple(a.name for a in dim) for dim in place.dims)
        found.append(Held(path, spec.shape, tuple(x.shape), names, x.nbytes, gradient, of_optimizer[path]))
    return found


class Volume(NamedTuple):
    """What a rank sends in a step, by kind of collective and names of the axes that it goes over.

    Attributes:
        calls: collectives issued.
        nbytes: of the operands that the rank hands in.
    """

    calls: Counter[tuple[str, tuple[str, ...]]]
    nbytes: Counter[tuple[str, tuple[str, ...]]]

    def plus(self, other: Volume, times: int = 1) -> Volume:
        """This and ``times`` the other one."""
        sums = []
        for mine, theirs in zip(self, other, strict=True):
            sums.append(Counter({k: mine[k] + times * theirs[k] for k in {**mine, **theirs}}))
        return Volume(*sums)


def volumes(recipe: Recipe) -> list[Volume]:
    """What a rank sends in a step; for each rank of the pipeline, any of those that work on its stages."""
    with shapes_only():
        if recipe.mesh.pp == 1:
            return [_by_kinds(recipe)]
        return _by_stages(recipe)


def _by_kinds(recipe: Recipe) -> Volume:
    kinds = _kinds(recipe.model)

    def of(layers: Sequence[_Kind]) -> Volume:
        small = dataclasses.replace(recipe, model=_with_layers(recipe.model, layers))
        return _by_micro_batches(small, 0)

    each = list(dict.fromkeys(kinds))
    total = base = of(each)
    for kind in each:
        if (more := kinds.count(kind) - 1) > 0:
            total = total.plus(of([*each, kind]), more).plus(base, -more)
    return total.plus(_sums(recipe, 0))


def _by_stages(recipe: Recipe) -> list[Volume]:
    """Stages of as many layers of each kind do the same, but for what crosses the cuts between them."""
    result, known, kinds = [], {}, _kinds(recipe.model)
    for rank in range(recipe.mesh.pp):
        layout = lay_out(recipe, _axes(recipe, rank))
        alike = tuple((frozenset(Counter(kinds[i] for i in p.layers).items()), p.first, p.last) for p in layout.own)
        if alike not in known:
            known[alike] = _by_micro_batches(recipe, rank)
        inside = Volume(*(Counter({k: n for k, n in c.items() if k[0] not in ("send", "recv")}) for c in known[alike]))
        result.append(inside.plus(_sums(recipe, rank)).plus(_messages(recipe, layout, rank)))
    return result


def _by_micro_batches(recipe: Recipe, stage_rank: int) -> Volume:
    """Without the sums of gradients."""
    unit = recipe.mesh.pp if recipe.pipeline.num_chunks > 1 and recipe.mesh.pp > 1 else 1

    def of(count: int) -> Volume:
        size = recipe.batch_size // recipe.micro_batches * count
        some = dataclasses.replace(recipe, micro_batches=count, batch_size=size)
        return _volume(run_abstractly(some, stage_rank)).plus(_sums(some, stage_rank), -1)

    low, more = of(unit), recipe.micro_batches // unit - 1
    return low.plus(of(2 * unit), more).plus(low, -more) if more else low


def run_abstractly(recipe: Recipe, stage_rank: int = 0) -> Record:
    """The collectives that a rank issues in a step, in order."""
    axes = _axes(recipe, stage_rank)
    tokens = torch.empty(_batch(recipe), dtype=torch.int64, device=_META)
    rows = data.Example(tokens, tokens, segments.Segments(tokens, tokens))
    with record_collectives() as record:
        make_step(recipe, axes)(abstract_state(recipe, axes), make_batches(recipe, rows, _META, axes), 1e-3)
    return record


def _sums(recipe: Recipe, stage_rank: int) -> Volume:
    """Of gradients over the ranks that hold the same parts."""
    axes = _axes(recipe, stage_rank)
    layout = lay_out(recipe, axes)
    grads, _ = split(abstract_state(recipe, axes).params, layout.specs)
    with record_collectives() as record:
        fsdp.sum_gradients(grads, layout.placements)
    return _volume(record)


def _messages(recipe: Recipe, layout: Layout, rank: int) -> Volume:
    """Between the stages, by what the engine would send."""
    rows, tokens = _batch(recipe)[0] // recipe.micro_batches, recipe.length // recipe.mesh.cp
    x = torch.empty(rows, tokens, dtype=torch.int64, device=_META)
    batch = model.Batch(x, x, segments.Segments(x, x), x, x)
    carries = stages.stage_carries(recipe.model, layout.parts, batch, recipe.precision.compute, sh=layout.sh)
    table, wire = layout.schedule, Wire(carries, layout.schedule.num_ranks)
    volume = Volume(Counter(), Counter())
    for message in messages(table):
        tensors = wire.message(message.to if message.kind == "forward" else message.source)
        for kind, stage in (("send", message.source), ("recv", message.to)):
            if table.rank_of(stage) == rank:
                volume.calls[kind, ("pp",)] += len(tensors)
                volume.nbytes[kind, ("pp",)] += sum(t.nbytes for t in tensors)
    return volume


def _volume(record: Record) -> Volume:
    volume = Volume(Counter(), Counter())
    for event in record.events:
        if event.what == "issue":
            volume.calls[event.kind, event.axes] += 1
            volume.nbytes[event.kind, event.axes] += event.nbytes
    return volume


def _axes(recipe: Recipe, stage_rank: int) -> MeshAxes:
    return abstract_axes(recipe.mesh, {**recipe.mesh.coordinate(0), "pp": stage_rank})


def _batch(recipe: Recipe) -> tuple[int, int]:
    """Rows of a rank, and tokens of a row."""
    return recipe.batch_size // (recipe.mesh.dp * recipe.mesh.fsdp), recipe.length


def _kinds(cfg: model.Config) -> list[_Kind]:
    return [(layer.attention, layer.ffn) for layer in model.layer_configs(cfg)]


def _with_layers(cfg: model.Config, kinds: Sequence[_Kind]) -> model.Config:
    """The model with layers of these kinds, dense ones first."""
    dense = [k for k in kinds if not isinstance(k[1], latent_moe.Config)]
    layers = dense + [k for k in kinds if isinstance(k[1], latent_moe.Config)]
    full = tuple(i for i, (attention, _) in enumerate(layers) if not isinstance(attention, kda.Config))
    return dataclasses.replace(cfg, num_layers=len(layers), full_attention_layers=full, num_dense_layers=len(dense))
