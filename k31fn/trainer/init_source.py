"""Parameters to start from: those of another run.

A source is a run folder (its newest complete checkpoint), one of its checkpoints,
``RUN/checkpoints/STEP``, or a folder of runs (the newest of them). It may be of another mesh, and
of a model with Gated MLA where this one has Gated DSA: the indexers then keep their initial values.
The base of adapters, ``lora.base``, may be such a source too; a run writes down which checkpoint
that was when it began, and goes on with it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from k31fn import lora, tree
from k31fn.checkpoint.checkpointer import Checkpointer
from k31fn.checkpoint.state_layout import StateLayout
from k31fn.config.recipe import Recipe
from k31fn.trainer import folder
from k31fn.trainer.adapter_base import check_source
from k31fn.trainer.ranks.agreement import Ranks
from k31fn.trainer.state import TrainState, abstract_state, first_state, held_by

__all__ = [
    "Source",
    "check_start",
    "find_source",
    "load_parameters",
    "settled_base",
    "start_from",
    "with_base",
]


class Source(NamedTuple):
    """A complete checkpoint of a run."""

    run: Path
    step: int


def find_source(path: str | Path) -> Source:
    """The checkpoint that a path means (see the module).

    Raises:
        ValueError: there is none; says what is there.
    """
    try:
        run, step = folder.resolve_step(Path(path))
    except ValueError as error:
        raise ValueError(f"init={str(path)!r}: {error}") from error
    with Checkpointer(run / "checkpoints", read_only=True) as checkpoints:
        steps = checkpoints.steps()
    if not steps or (step is not None and step not in steps):
        raise ValueError(
            f"init={str(path)!r}: complete checkpoints of {run}: {steps or 'none yet'}"
        )
    return Source(run, steps[-1] if step is None else step)


def check_start(recipe: Recipe) -> None:
    """Whether what a run starts from, ``init`` or ``lora.base``, is there and of its model; reads
    no weights.

    Raises:
        ValueError: it is not, or no matrix of the model is adapted.
    """
    wanted = dict(tree.flatten_with_paths(abstract_state(recipe)))
    if recipe.init:
        parts = {name: x for name, x in wanted.items() if name.startswith(("params.", "balance."))}
        names = _matching(recipe.init, parts)[2]
        _check_missing(
            recipe.init, (n for n in parts if n.startswith("params.") and n not in names)
        )
    check_source(recipe)


def settled_base(recipe: Recipe, run: Path | None = None) -> str:
    """``lora.base`` for ``config.json``: of a run, or a folder of runs, the checkpoint that it
    means now.

    So a run that goes on has the adapters' own base, whatever was trained since. "": no base.

    Args:
        recipe: checked by :func:`check_start`, if it begins.
        run: that goes on, with what it wrote down; None: it begins.

    Raises:
        ValueError: the base of ``run`` is gone.
    """
    if isinstance(recipe.lora, tuple) or not recipe.lora.base:
        return ""
    if run is not None:
        there = folder.recipe_of(run).lora
        assert isinstance(there, lora.Config)
        if not Path(there.base).is_dir():
            raise ValueError(
                f"lora.base={there.base!r} is gone, whose adapters {run} trains; put it back (a "
                "run that goes on "
                "removes its old checkpoints, but for those of --keep-every)"
            )
        return there.base
    if any(Path(recipe.lora.base).glob("*.safetensors")):
        return recipe.lora.base
    source = find_source(recipe.lora.base)
    return str(source.run / "checkpoints" / str(source.step))


def with_base(recipe: Recipe, base: str) -> Recipe:
    """The recipe with ``lora.base=base``; without adapters as it is."""
    if isinstance(recipe.lora, tuple):
        return recipe
    return dataclasses.replace(recipe, lora=dataclasses.replace(recipe.lora, base=base))


def load_parameters(
    path: str | Path,
    recipe: Recipe,
    wanted: Mapping[str, Tensor],
    ranks: Ranks,
    device: torch.device,
) -> dict[str, Tensor]:
    """This rank's parts of those ``wanted`` tensors that the source has. Every rank must call it.

    Args:
        path: the source, which every rank's host must see.
        recipe: of the run that starts; its mesh is that of ``ranks``.
        wanted: whole meta tensors by path in the state, such as ``params.head``; all of
            ``recipe``'s state.
        ranks: of the run.
        device: where to put them.

    Raises:
        ValueError: there is no such source, or a tensor has another shape or dtype there.
    """
    run, step, names = ranks.on_first(lambda: _matching(path, wanted))
    mine = dict(tree.flatten_with_paths(abstract_state(recipe, ranks.axes)))
    held, theirs = (
        held_by(recipe),
        dict(tree.flatten_with_paths(abstract_state(folder.recipe_of(Path(run))))),
    )
    whole = {there: theirs[there] for there in names.values()}
    layout = StateLayout(
        whole, {there: held[name] for name, there in names.items() if name in held}, recipe.mesh
    )
    like = {t: mine[name].to(theirs[t].dtype) for name, t in names.items() if name in mine}
    with ranks.alike(
        lambda: Checkpointer(Path(run) / "checkpoints", read_only=True, axes=ranks.axes)
    ) as checkpoints:
        restore = functools.partial(
            checkpoints.restore, step, like, partial=True, device=device, layout=layout
        )
        found = ranks.alike(restore)
    return {name: found[t].to(wanted[name].dtype) for name, t in names.items() if name in mine}


def _matching(path: str | Path, wanted: Mapping[str, Tensor]) -> tuple[str, int, dict[str, str]]:
    """The run and step that a path means, and the names there of those ``wanted`` tensors that it
    has.
    """
    source = find_source(path)
    there = folder.recipe_of(source.run)
    if there.lora:
        raise ValueError(
            f"init={str(path)!r} is a run of adapters, whose checkpoints have no whole model; "
            "merge it first: "
            f"python -m k31fn.hf export {source.run} OUT, python -m k31fn.hf import OUT CONFIG"
        )
    held = dict(tree.flatten_with_paths(abstract_state(there)))
    names = {name: there for name in wanted if (there := _name(name, held))}
    if wrong := [n for n, there in names.items() if held[there].shape != wanted[n].shape]:
        shapes = f"{list(held[names[wrong[0]]].shape)}, here {list(wanted[wrong[0]].shape)}"
        raise ValueError(f"init={str(path)!r} is of another model: {wrong[0]} has shape {shapes}")
    return str(source.run), source.step, names


def _name(name: str, held: Mapping[str, Tensor]) -> str:
    """The name there: of Gated MLA in a model whose attention is not inside a Gated DSA; "": it has
    none.
    """
    return next((n for n in (name, name.replace(".attn.attn.", ".attn.")) if n in held), "")


def start_from(
    path: str | Path, recipe: Recipe, state: TrainState, ranks: Ranks, device: torch.device
) -> TrainState:
    """``state``, the one before the first step, with the parameters and the routers' biases of the
    source.

    Raises:
        ValueError: as :func:`load_parameters`, or the source lacks a parameter that is not an
            indexer's.
    """
    parts = {f"{part}.{n}": x for part in ("params", "balance") for n, x in _whole(recipe, part)}
    found = load_parameters(path, recipe, parts, ranks, device)
    held = {f"params.{n}" for n in tree.paths(state.params)}
    _check_missing(path, held - found.keys())
    weights = tree.map_with_path(lambda name, x: found.get(f"params.{name}", x), state.params)
    biases = tree.map_with_path(lambda name, x: found.get(f"balance.{name}", x), state.balance)
    return first_state(recipe, weights, biases, ranks.axes)


def _check_missing(path: str | Path, names: Iterable[str]) -> None:
    if missing := sorted(name for name in names if ".indexer." not in name):
        raise ValueError(
            f"init={str(path)!r} has no {missing[0]} ({len(missing)} missing): it is a run of "
            "another model"
        )


def _whole(recipe: Recipe, part: str) -> list[tuple[str, Tensor]]:
    return tree.flatten_with_paths(getattr(abstract_state(recipe), part))
