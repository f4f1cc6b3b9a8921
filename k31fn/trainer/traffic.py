"""What a rank holds and what it sends in a step, found by running that rank's step on meta tensors.

A step of a deep model with many micro-batches does the same again and again, so it is run for a
model with one layer of each kind, then with another layer of each, and for one micro-batch and two:
what is added each time is added as often as there are layers and micro-batches. Sums of gradients,
which travel many tensors at a time, matrices that the optimiser deals out, and messages between the
stages of a pipeline, which hold blocks of earlier ones, are those of the whole model. Routes are
taken to be balanced.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from k31fn import data, model, segments, tree
from k31fn.autodiff import vjp
from k31fn.config import Recipe
from k31fn.kernels.shapes import shapes_only
from k31fn.layers import kda, latent_moe
from k31fn.layers.patches import Images, Patches
from k31fn.layers.router import NUM_BINS
from k31fn.model import stages
from k31fn.parallel import MeshAxes, Record, fsdp, record_collectives
from k31fn.parallel.abstract import abstract_axes
from k31fn.parallel.pipeline import Carry, Wire
from k31fn.parallel.pipeline.messages import messages
from k31fn.trainer.gradient import make_gradient, make_stages
from k31fn.trainer.layout import Layout, cut, lay_out, make_schedule
from k31fn.trainer.remembered import Remembered
from k31fn.trainer.state import TrainState, abstract_state, split
from k31fn.trainer.step import make_batches, make_step, next_biases

__all__ = [
    "Held",
    "OfRank",
    "Volume",
    "gradient_abstractly",
    "held",
    "layer_kinds",
    "loss_abstractly",
    "of_rank",
    "run_abstractly",
    "volumes",
    "with_layers",
]

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


class OfRank(NamedTuple):
    """A rank of a recipe's mesh without the others, and its state of meta tensors."""

    axes: MeshAxes
    layout: Layout
    state: TrainState


@functools.lru_cache(maxsize=2)
def of_rank(recipe: Recipe, stage_rank: int) -> OfRank:
    """The first rank of a rank of the pipeline."""
    axes = abstract_axes(recipe.mesh, {**recipe.mesh.coordinate(0), "pp": stage_rank})
    return OfRank(axes, lay_out(recipe, axes), abstract_state(recipe, axes))


def held(recipe: Recipe, stage_rank: int = 0) -> list[Held]:
    """What a rank holds of each weight; all ranks of a rank of the pipeline hold as much."""
    _, layout, state = of_rank(recipe, stage_rank)
    of_optimizer = Counter[str]()
    weights = dict(tree.flatten_with_paths(state.params))
    for path, x in tree.flatten_with_paths(state.opt_state):
        names = path.split(".")
        ends = (".".join(names[i:]) for i in range(len(names)))
        of_optimizer[next((end for end in ends if end in weights), "")] += x.nbytes
    found = []
    for (path, spec), place in zip(
        tree.flatten_with_paths(layout.specs), tree.leaves(layout.placements), strict=True
    ):
        x = weights[path]
        wide = torch.promote_types(x.dtype, recipe.precision.reduce)
        gradient = 0 if "frozen" in spec.tags else x.numel() * wide.itemsize
        names = tuple(tuple(a.name for a in dim) for dim in place.dims)
        found.append(
            Held(path, spec.shape, tuple(x.shape), names, x.nbytes, gradient, of_optimizer[path])
        )
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

    def divided(self, by: int) -> Volume:
        """An equal part of this."""
        return Volume(*(Counter({k: n // by for k, n in counter.items()}) for counter in self))

    def without(self, *kinds: str) -> Volume:
        """The other kinds of collectives."""
        return Volume(
            *(Counter({k: n for k, n in counter.items() if k[0] not in kinds}) for counter in self)
        )


def volumes(recipe: Recipe) -> list[Volume]:
    """What a rank sends in a step; for each rank of the pipeline, any of those that work on its
    stages.
    """
    with shapes_only(), Remembered():
        if recipe.mesh.pp == 1:
            return [_by_kinds(recipe)]
        return _by_stages(recipe)


def _by_kinds(recipe: Recipe) -> Volume:
    kinds = layer_kinds(recipe.model)

    def of(layers: Sequence[_Kind]) -> Volume:
        return _by_micro_batches(with_layers(recipe, layers), 0)

    each = list(dict.fromkeys(kinds))
    total = base = of(each)
    for kind in each:
        if (more := kinds.count(kind) - 1) > 0:
            total = total.plus(of([*each, kind]), more).plus(base, -more)
    return total.plus(_at_once(recipe, 0))


def _by_stages(recipe: Recipe) -> list[Volume]:
    """From a pipeline each of whose stages has a layer of each kind that it has, and what more
    layers of a kind add.
    """
    kinds, table = layer_kinds(recipe.model), make_schedule(recipe, recipe.mesh.pp)
    whole = [[kinds[i] for i in part.layers] for part in cut(recipe.model, table)]
    length = max(len(set(stage)) for stage in whole)
    short = [[*dict.fromkeys(stage), *[stage[-1]] * (length - len(set(stage)))] for stage in whole]
    small, known, each = with_layers(recipe, [k for stage in short for k in stage]), {}, {}
    for kind in dict.fromkeys(kinds):
        one, two = (
            _by_micro_batches(with_layers(recipe, [kind] * (n * table.num_stages)), 0)
            for n in (1, 2)
        )
        each[kind] = two.plus(one, -1).divided(table.num_chunks)
    result = []
    for rank in range(table.num_ranks):
        mine = table.stages_of(rank)
        alike = tuple((*short[s], s == 0, s == table.num_stages - 1) for s in mine)
        if alike not in known:
            known[alike] = _by_micro_batches(small, rank)
        total, more = known[alike], Counter(k for s in mine for k in whole[s])
        more.subtract(k for s in mine for k in short[s])
        for kind, count in more.items():
            total = total.plus(each[kind], count)
        at_once = _at_once(recipe, rank).plus(_messages(recipe, of_rank(recipe, rank).layout, rank))
        result.append(total.without("send", "recv").plus(at_once))
    return result


def _by_micro_batches(recipe: Recipe, stage_rank: int) -> Volume:
    """Without what is done for all layers at once."""
    unit = recipe.mesh.pp if recipe.pipeline.num_chunks > 1 and recipe.mesh.pp > 1 else 1

    def of(count: int) -> Volume:
        size = recipe.batch_size // recipe.micro_batches * count
        some = dataclasses.replace(recipe, micro_batches=count, batch_size=size)
        return _volume(run_abstractly(some, stage_rank)).plus(_at_once(some, stage_rank), -1)

    low, more = of(unit), recipe.micro_batches // unit - 1
    return low.plus(of(2 * unit), more).plus(low, -more) if more else low


def run_abstractly(recipe: Recipe, stage_rank: int = 0) -> Record:
    """The collectives that a rank issues in a step, in order."""
    axes, _, state = of_rank(recipe, stage_rank)
    with record_collectives() as record:
        make_step(recipe, axes)(state, _micro_batches(recipe, axes), 1e-3)
    return record


def gradient_abstractly(recipe: Recipe, stage_rank: int = 0) -> None:
    """Runs the loss of a rank's step and its gradient, without the update: for those who watch what
    it calls.
    """
    axes, layout, state = of_rank(recipe, stage_rank)
    make_gradient(recipe, layout)(state, _micro_batches(recipe, axes))


def loss_abstractly(recipe: Recipe) -> Any:
    """Runs the loss of a micro-batch.

    What its gradient needs lives as long as what is returned, the pullback in it.
    """
    axes, layout, state = of_rank(recipe, 0)
    trained, frozen = split(fsdp.enter_step(state.params, layout.placements), layout.specs)
    (stage,) = make_stages(recipe, layout, state.balance, frozen, fsdp.gathers(layout.placements))
    batch = _micro_batches(recipe, axes)[0]

    def loss(trained: Any) -> Any:
        out = stage(trained, Carry(), batch)
        return out.loss, (out.sums, out.largest)

    return vjp(loss, trained, has_aux=True)


def _micro_batches(recipe: Recipe, axes: MeshAxes) -> list[model.Batch]:
    tokens = torch.empty(_batch(recipe), dtype=torch.int64, device=_META)
    rows = data.Example(tokens, tokens, segments.Segments(tokens, tokens), _images(recipe, tokens))
    return make_batches(recipe, rows, _META, axes)


def _images(recipe: Recipe, tokens: torch.Tensor) -> Any:
    """Of so many patches as the recipe's rows have; ``()`` for text."""
    tower = recipe.model.vision
    if not recipe.patches or isinstance(tower, tuple):
        return ()
    x = torch.empty(len(tokens), recipe.patches, dtype=torch.int64, device=_META)
    pixels = torch.empty(*x.shape, tower.pixels_per_patch, device=_META)
    return Images(pixels, Patches(x, x, x, x, x, x, x, cells=()), tokens)


def _at_once(recipe: Recipe, stage_rank: int) -> Volume:
    """What a step sends for all layers of the model together: gradients to sum, matrices to step,
    and new biases.
    """
    _, layout, state = of_rank(recipe, stage_rank)
    grads, _ = split(state.params, layout.specs)
    shape = len(layout.moe_layers), recipe.model.moe.num_experts, NUM_BINS
    histogram = torch.empty(shape, dtype=torch.int64, device=_META)
    with record_collectives() as record:
        summed = fsdp.sum_gradients(grads, layout.placements)
        layout.optimizer.update(summed, state.opt_state, state.params, lr=1e-3)
        if recipe.trains_trunk:
            next_biases(state.balance, histogram, layout, recipe.model.moe.top_k)
    return _volume(record)


def _messages(recipe: Recipe, layout: Layout, rank: int) -> Volume:
    """Between the stages, by what the engine would send."""
    rows, tokens = _batch(recipe)[0] // recipe.micro_batches, recipe.length // recipe.mesh.cp
    x, count = (
        torch.empty(shape, dtype=torch.int64, device=_META) for shape in ((rows, tokens), ())
    )
    batch = model.Batch(x, x, segments.Segments(x, x), count, count)
    carries = stages.stage_carries(
        recipe.model, layout.parts, batch, recipe.precision.compute, sh=layout.sh
    )
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


def _batch(recipe: Recipe) -> tuple[int, int]:
    """Rows of a rank, and tokens of a row."""
    return recipe.batch_size // (recipe.mesh.dp * recipe.mesh.fsdp), recipe.length


def layer_kinds(cfg: model.Config) -> list[_Kind]:
    """What each layer is: the configs of its attention and its feed-forward."""
    return [(layer.attention, layer.ffn) for layer in model.layer_configs(cfg)]


def with_layers(recipe: Recipe, kinds: Sequence[_Kind]) -> Recipe:
    """The recipe with a model of layers of these kinds; dense ones come first."""
    dense = [k for k in kinds if not isinstance(k[1], latent_moe.Config)]
    layers = dense + [k for k in kinds if isinstance(k[1], latent_moe.Config)]
    full = tuple(
        i for i, (attention, _) in enumerate(layers) if not isinstance(attention, kda.Config)
    )
    cfg = dataclasses.replace(
        recipe.model,
        num_layers=len(layers),
        full_attention_layers=full,
        num_dense_layers=len(dense),
    )
    return dataclasses.replace(recipe, model=cfg)
