"""Numbers that come out: gradients, training, checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.meshes.here import HALVES, ONE, Here, alone, axes_of, dataset_of, named
from k31fn import checkpoint, config, model, optim, trainer, tree
from k31fn.parallel import AxisRules, Mesh, MeshAxes, each_rank, partition
from k31fn.parallel.backends.processes import exchange_json
from k31fn.parallel.partition import tile
from k31fn.trainer.gradient import make_gradient

__all__ = ["equality", "restoring", "training"]


def gradient(recipe: config.Recipe, here: Here, axes: MeshAxes) -> dict[str, Tensor]:
    """Sums of a step over all ranks, and by path the gradients of this rank's parts."""
    layout = trainer.lay_out(recipe, axes)
    state = trainer.init_state(trainer.lay_out(recipe, axes), here.device)
    state = dataclasses.replace(state, opt_state=())  # twice the parameters
    rows = trainer.rows_at(dataset_of(recipe, here), 0, axes)
    batches = trainer.make_batches(recipe, rows, here.device, axes)
    sums, grads = make_gradient(layout)(state, batches)
    loads = {f"load of layer {i}": row for i, row in zip(layout.moe_layers, sums.load, strict=True)}
    return {
        "loss": sums.total,
        "kl": sums.kl / batches[0].num_queries,
        **loads,
        **dict(tree.flatten_with_paths(grads)),
    }


def distance(
    found: dict[str, Tensor], other: dict[str, Tensor], recipe: config.Recipe, here: Here
) -> dict[str, Any]:
    """Distance of this rank's parts from the whole tensors of one device, or from the same
    parts; over all ranks.

    ``loss`` and ``largest`` are relative: the largest difference in a leaf over the largest entry
    of it, in the worst leaf. ``indexer`` is the same of the indexers' leaves, whose gradients are
    differences of probabilities that are nearly equal; ``largest`` leaves them out. ``norm``: the
    norm of a leaf's differences over that of the leaf, in the worst; ``kl`` is in nats per query;
    ``moved``: tokens that were sent to another expert, at least.
    """
    split = dict(
        tree.flatten_with_paths(partition(model.specs(recipe.model), AxisRules(), recipe.mesh))
    )
    coordinate = recipe.mesh.coordinate(here.rank % recipe.mesh.world_size)
    mine: dict[str, list[float]] = {}
    for path, part in found.items():
        whole = other[path]
        if whole.shape != part.shape:
            whole = whole[tile(split[path], whole.shape, recipe.mesh, coordinate)]
        apart = (part - whole).double()
        like = whole.double()
        sums = (
            apart.abs().max(),
            like.abs().max(),
            apart.square().sum(),
            like.square().sum(),
            apart.abs().sum() / 2,
        )
        mine[path] = torch.stack(sums).tolist()
    rows: dict[str, list[list[float]]] = {}
    for told in exchange_json(mine, here.everyone):
        for path, numbers in told.items():
            rows.setdefault(path, []).append(numbers)
    largest, norm = {}, {}
    for path, numbers in rows.items():
        differ, like, squares, squares_like, _ = zip(*numbers, strict=True)
        largest[path] = max(differ) / (max(like) or 1.0)
        norm[path] = (sum(squares) / (sum(squares_like) or 1.0)) ** 0.5
    leaves = [path for path in rows if path in split]
    of_indexer = [path for path in leaves if ".indexer." in path]
    worst = max(set(leaves) - set(of_indexer), key=lambda path: largest[path])
    return {
        "loss": largest["loss"],
        "kl": max(numbers[0] for numbers in rows["kl"]),
        "largest": largest[worst],
        "worst": worst,
        "indexer": max((largest[path] for path in of_indexer), default=0.0),
        "norm": max(norm[path] for path in leaves),
        "median norm": statistics.median(norm[path] for path in leaves),
        "moved": sum(numbers[0][4] for path, numbers in rows.items() if path.startswith("load")),
    }


def equality(recipe: config.Recipe, here: Here) -> dict[str, Any]:
    """Distances of each mesh: how far from one GPU, from the mesh's threads on one GPU, and
    these from the one.
    """
    found: dict[str, Any] = {}
    one = gradient(recipe, here, Mesh().axes())
    what = f"equality of {recipe.name} in {recipe.compute} on"
    two = dataclasses.replace(recipe, micro_batches=2)
    apart = functools.partial(distance, here=here)
    found[HALVES] = here.attempt(
        f"{what} {HALVES}", lambda: {ONE: apart(gradient(two, here, axes_of(two)), one, two)}
    )
    for name, made in here.meshes(recipe):

        def compare(made: config.Recipe = made) -> dict[str, Any]:
            part = gradient(made, here, axes_of(made))
            distances = {ONE: apart(part, one, made)}
            if recipe.compute == "bfloat16":
                on_threads = each_rank(
                    lambda axes: gradient(made, here, axes), made.mesh, lambda _: (), timeout=300
                )
                same = on_threads[here.rank]
                distances |= {
                    "threads": apart(part, same, made),
                    "threads from one GPU": apart(same, one, made),
                }
            return distances

        found[name] = here.attempt(f"{what} {name}", compare)
    return found


def training(recipe: config.Recipe, here: Here) -> dict[str, Any]:
    """The numbers of each step, on one GPU, there in two micro-batches, and on each mesh."""
    found: dict[str, Any] = {}
    halves = dataclasses.replace(recipe, micro_batches=2)
    for name, made in {ONE: recipe, HALVES: halves, **dict(here.meshes(recipe))}.items():

        def steps(made: config.Recipe = made) -> dict[str, Any]:
            axes = axes_of(made)
            state = trainer.init_state(trainer.lay_out(made, axes), here.device)
            step = trainer.make_step(trainer.lay_out(made, axes))
            o = made.optimizer
            rows = dataset_of(made, here)
            numbers = []
            for i in range(made.steps):
                warmup = min(o.warmup_steps, made.steps)
                lr = optim.warmup_cosine(
                    i, peak=o.peak_lr, num_steps=made.steps, warmup_steps=warmup
                )
                batches = trainer.make_batches(
                    made, trainer.rows_at(rows, i, axes), here.device, axes
                )
                state, metrics = step(state, batches, lr)
                numbers.append(torch.stack(metrics[:-1]))
            return {"steps": torch.stack(numbers).tolist(), "names": trainer.Metrics._fields[:-1]}

        found[name] = here.attempt(f"training of {recipe.name} on {name}", steps)
    return found


def restoring(recipe: config.Recipe, here: Here) -> dict[str, Any]:
    """Saved on each mesh after two steps; read by one GPU, and by processes on the CPU in another
    mesh, bit by bit.
    """
    found: dict[str, Any] = {}
    for name, made in here.meshes(recipe):
        go = functools.partial(
            _restore, made, dataclasses.replace(recipe, mesh=Mesh(tp=here.size)), here
        )
        found[name] = here.attempt(f"checkpoint of {recipe.name} on {name}", go)
    return found


def _restore(made: config.Recipe, other: config.Recipe, here: Here) -> dict[str, Any]:
    axes = axes_of(made)
    state = trainer.init_state(trainer.lay_out(made, axes), here.device)
    step = trainer.make_step(trainer.lay_out(made, axes))
    for i in range(2):
        rows = trainer.rows_at(dataset_of(made, here), i, axes)
        state, _ = step(state, trainer.make_batches(made, rows, here.device, axes), 1e-3)
    folder = Path(exchange_json(tempfile.mkdtemp() if here.rank == 0 else "", here.everyone)[0])
    with checkpoint.Checkpointer(folder, axes=axes) as saving:
        saving.save(2, state, layout=trainer.checkpoint_layout(made))
    with checkpoint.Checkpointer(folder, read_only=True) as reading:
        on_one = reading.restore(
            2, trainer.abstract_state(trainer.lay_out(made)), device=here.device
        )

    cpu = torch.device("cpu")
    others = axes_of(other)
    with checkpoint.Checkpointer(folder, read_only=True, axes=others) as reading:
        on_cpu = reading.restore(
            2,
            trainer.abstract_state(trainer.lay_out(other, others)),
            layout=trainer.checkpoint_layout(other),
        )
    equal = [*_same_bits(state, on_one, made, here), *_same_bits(on_cpu, on_one, other, here)]
    losses = {
        "same mesh": _next_loss(made, state, axes, here.device, here),
        ONE: _next_loss(alone(made), on_one, Mesh().axes(), here.device, here),
        f"CPU, {named(other.mesh)}": _next_loss(other, on_cpu, others, cpu, here),
    }
    return {
        "tensors": len(equal),
        "bit-equal": all(all(e) for e in exchange_json(equal, here.everyone)),
        **losses,
    }


def _same_bits(
    state: trainer.TrainState, whole: trainer.TrainState, made: config.Recipe, here: Here
) -> list[bool]:
    """Whether each tensor that this rank holds is its part of the whole one."""
    held = trainer.held_by(made)
    complete = dict(tree.flatten_with_paths(whole))
    coordinate = made.mesh.coordinate(here.rank)
    equal = []
    for path, part in tree.flatten_with_paths(state):
        own = complete[path]
        if path in held:
            own = own[tile(held[path].spec, own.shape, made.mesh, coordinate)]
        equal.append(torch.equal(part, own.to(part.device)))
    return equal


def _next_loss(
    made: config.Recipe, state: Any, axes: MeshAxes, device: torch.device, here: Here
) -> float:
    """Numbers of the third step."""
    rows = trainer.rows_at(dataset_of(made, here), 2, axes)
    return float(
        trainer.make_step(trainer.lay_out(made, axes))(
            state, trainer.make_batches(made, rows, device, axes), 1e-3
        )[1].loss
    )
