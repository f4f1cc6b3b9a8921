"""Training on meshes, as functions that threads and spawned processes run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k31fn import config, trainer, tree
from k31fn.checkpoint import Holders
from k31fn.parallel import Mesh, MeshAxes, all_gather, axes_of_process, each_rank
from k31fn.parallel.partition import tile
from tests import small
from tests.trainer import runs

CPU = torch.device("cpu")


def recipe(text: Path | str, **changes: Any) -> config.Recipe:
    """Sizes that 2 and 4 ranks divide; the dense layer is a KDA one, that with experts a DSA
    one.
    """
    base = runs.recipe(text)
    moe = dataclasses.replace(base.model.sublayers["moe"], num_experts=8)
    return dataclasses.replace(
        base, model=small.replace(base.model, vocab_size=260, moe=moe), **changes
    )


def steps(
    axes: MeshAxes, made: config.Recipe, count: int, device: torch.device = CPU
) -> tuple[Tensor, trainer.TrainState]:
    """The metrics of the first steps, and this rank's state after them."""
    state, step = (
        trainer.init_state(trainer.lay_out(made, axes), device),
        trainer.make_step(trainer.lay_out(made, axes)),
    )
    dataset, metrics = trainer.load_corpus(made).dataset, []
    for i in range(count):
        batches = trainer.make_batches(made, trainer.rows_at(dataset, i, axes), device, axes)
        state, numbers = step(state, batches, 0.02)
        metrics.append(numbers.flat())
    return torch.stack(metrics), state


def whole_state(axes: MeshAxes, made: config.Recipe, state: trainer.TrainState) -> Any:
    """On every rank, from the parts of those that come first."""
    held, mine = trainer.held_by(made), dict(tree.flatten_with_paths(state))

    def put_together(path: str, like: Tensor) -> Tensor:
        h = held.get(path, Holders())
        parts = [tile(h.spec, like.shape, made.mesh, c) for c in made.mesh.coordinates()]
        own = mine.get(path)
        if own is None:
            own = torch.zeros([s.stop - s.start for s in parts[0]], dtype=like.dtype)
        pieces = all_gather(own[None].to("cpu"), axes.atoms) if axes.atoms else own[None]
        whole = torch.empty(like.shape, dtype=like.dtype)
        for part, piece, c in reversed(
            list(zip(parts, pieces, made.mesh.coordinates(), strict=True))
        ):
            if not h.stages or c["pp"] in h.stages:
                whole[part] = piece
        return whole

    return tree.map_with_path(put_together, trainer.abstract_state(trainer.lay_out(made)))


def on_one_device(
    made: config.Recipe, count: int, device: torch.device = CPU
) -> tuple[Tensor, trainer.TrainState]:
    return steps(Mesh().axes(), dataclasses.replace(made, mesh=Mesh()), count, device)


def on_threads(
    made: config.Recipe, count: int
) -> tuple[list[Tensor], list[trainer.TrainState], trainer.TrainState]:
    """Each rank's metrics and state, and the whole state."""

    def go(axes: MeshAxes) -> tuple[Tensor, trainer.TrainState, Any]:
        metrics, state = steps(axes, made, count)
        return metrics, state, whole_state(axes, made, state)

    ranks = each_rank(go, made.mesh, lambda _: ())
    return [r[0] for r in ranks], [r[1] for r in ranks], ranks[0][2]


def on_process(
    made: config.Recipe, count: int, device: str = "cpu"
) -> tuple[list[Tensor], dict[str, Any]]:
    """Of a spawned rank: its metrics, and the leaves of the whole parameters."""
    axes, _ = axes_of_process(made.mesh)
    metrics, state = steps(axes, made, count, torch.device(device))
    whole = whole_state(axes, made, state)
    return [metrics, *tree.leaves(whole.params)], {}


def with_loads(
    axes: MeshAxes, made: config.Recipe, count: int
) -> tuple[Tensor, Tensor, trainer.TrainState]:
    """Metrics, tokens of each expert of this rank's layers in each step, and the state; one call at
    a time.
    """
    original, loads = trainer.step._metrics, []

    def noting(recipe: Any, batch: Any, sums: Any, *rest: Any) -> Any:
        loads.append(sums.load)
        return original(recipe, batch, sums, *rest)

    trainer.step._metrics = noting
    try:
        metrics, state = steps(axes, made, count)
    finally:
        trainer.step._metrics = original
    return metrics, torch.stack(loads), state


def on_process_with_loads(made: config.Recipe, count: int) -> tuple[list[Tensor], dict[str, Any]]:
    """:func:`on_process`, with the loads after the metrics."""
    axes, _ = axes_of_process(made.mesh)
    metrics, loads, state = with_loads(axes, made, count)
    whole = whole_state(axes, made, state)
    return [metrics, loads, *tree.leaves(whole.params)], {}


def replicas(
    made: config.Recipe, states: list[trainer.TrainState]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each leaf of the state with that of every later rank that holds the same part of it."""
    held = trainer.held_by(made)
    split = {
        path: [a.name for dim in h.spec.dims for view in dim for a in made.mesh.axes().view(view)]
        for path, h in held.items()
    }
    seen: dict[Any, Tensor] = {}
    for coordinate, state in zip(made.mesh.coordinates(), states, strict=True):
        for path, x in tree.flatten_with_paths(state):
            part = (path, *(coordinate[name] for name in split.get(path, [])))
            if part in seen:
                yield path, seen[part], x
            seen.setdefault(part, x)
