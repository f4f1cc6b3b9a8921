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

from k31fn import checkpoint, lora, regular_files, tree
from k31fn.checkpoint.checkpointer import Checkpointer
from k31fn.config.recipe import Recipe
from k31fn.trainer import folder
from k31fn.trainer.adapter_base import check_source
from k31fn.trainer.layout import RankLayout, lay_out
from k31fn.trainer.ranks.agreement import Ranks
from k31fn.trainer.state import TrainState, abstract_state, first_state, held_by

__all__ = [
    "check_start",
    "settled_base",
    "start_from",
    "with_base",
]


class _Source(NamedTuple):
    """A complete checkpoint of a run."""

    run: Path
    step: int


def _find_source(path: str | Path) -> _Source:
    """The checkpoint that a path means (see the module).

    Raises:
        ValueError: there is none; says what is there.
    """
    try:
        run, step = folder.resolve_step(regular_files.path(path, "init"))
    except ValueError as error:
        raise ValueError(f"init={str(path)!r}: {error}") from error
    with Checkpointer(run / "checkpoints", read_only=True) as checkpoints:
        steps = checkpoints.steps()
    if not steps or (step is not None and step not in steps):
        raise ValueError(
            f"init={str(path)!r}: complete checkpoints of {run}: {steps or 'none yet'}"
        )
    return _Source(run, steps[-1] if step is None else step)


def check_start(recipe: Recipe) -> None:
    """Whether what a run starts from, ``init`` or ``lora.base``, is there and of its model; reads
    no weights.

    Raises:
        ValueError: it is not, or no matrix of the model is adapted.
    """
    # also without a source: laying the model out refuses a lora.pattern that matches nothing
    state = _by_path(recipe)
    if recipe.init:
        parts = {name: x for name, x in state.items() if name.startswith(("params.", "balance."))}
        names = _match(recipe.init, parts).names
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
        written = folder.recipe_of(run).lora
        assert isinstance(written, lora.Config)
        if not Path(written.base).is_dir():
            raise ValueError(
                f"lora.base={written.base!r} is gone, whose adapters {run} trains; put it back (a "
                "run that goes on removes its old checkpoints, but for those of --keep-every)"
            )
        return written.base
    if any(regular_files.path(recipe.lora.base, "lora.base").glob("*.safetensors")):
        return recipe.lora.base
    source = _find_source(recipe.lora.base)
    return str(source.run / "checkpoints" / str(source.step))


def with_base(recipe: Recipe, base: str) -> Recipe:
    """The recipe with ``lora.base=base``; without adapters as it is."""
    if isinstance(recipe.lora, tuple):
        return recipe
    return dataclasses.replace(recipe, lora=dataclasses.replace(recipe.lora, base=base))


def start_from(
    path: str | Path, layout: RankLayout, state: TrainState, ranks: Ranks, device: torch.device
) -> TrainState:
    """``state``, the one before the first step, with the parameters and the routers' biases of the
    source.

    Raises:
        ValueError: as :func:`_load_parameters`, or the source lacks a parameter that is not an
            indexer's.
    """
    whole = abstract_state(lay_out(layout.recipe))
    wanted: dict[str, Tensor] = {}
    for name, x in tree.flatten_with_paths(whole.params):
        wanted[f"params.{name}"] = x
    for name, x in tree.flatten_with_paths(whole.balance):
        wanted[f"balance.{name}"] = x
    loaded = _load_parameters(path, layout, wanted, ranks, device)
    own = {f"params.{n}" for n in tree.paths(state.params)}
    _check_missing(path, own - loaded.keys())
    weights = tree.map_with_path(lambda name, x: loaded.get(f"params.{name}", x), state.params)
    biases = tree.map_with_path(lambda name, x: loaded.get(f"balance.{name}", x), state.balance)
    # the optimiser's state begins anew: its float32 masters are copies of these weights
    return first_state(layout, weights, biases)


def _load_parameters(
    path: str | Path,
    layout: RankLayout,
    wanted: Mapping[str, Tensor],
    ranks: Ranks,
    device: torch.device,
) -> dict[str, Tensor]:
    """This rank's parts of those ``wanted`` tensors that the source has. Every rank must call it.

    Args:
        path: the source, which every rank's host must see.
        layout: of the run that starts, on this rank.
        wanted: whole meta tensors by path in the state, such as ``params.head``; all of the
            recipe's state.
        ranks: of the run.
        device: where to put them.

    Raises:
        ValueError: there is no such source, or a tensor has another shape or dtype there.
    """
    # rank 0 looks: a folder of runs may get a newer one while the others do
    match = _Match(*ranks.on_first(lambda: _match(path, wanted)))
    own = dict(tree.flatten_with_paths(abstract_state(layout)))
    held = held_by(layout.recipe)
    source = _by_path(folder.recipe_of(Path(match.run)))
    whole, holders, like = {}, {}, {}
    for name, source_name in match.names.items():
        whole[source_name] = source[source_name]
        if name in held:
            holders[source_name] = held[name]
        if name in own:
            # read as it was written, and cast afterwards
            like[source_name] = own[name].to(source[source_name].dtype)
    on_disk = checkpoint.StateLayout(whole, holders, layout.recipe.mesh)
    with ranks.alike(
        lambda: Checkpointer(Path(match.run) / "checkpoints", read_only=True, axes=ranks.axes)
    ) as checkpoints:
        restore = functools.partial(
            checkpoints.restore, match.step, like, partial=True, device=device, layout=on_disk
        )
        loaded = ranks.alike(restore)
    return {
        name: loaded[source_name].to(wanted[name].dtype)
        for name, source_name in match.names.items()
        if name in own
    }


class _Match(NamedTuple):
    """What a source has of a state.

    Attributes:
        run: its folder.
        step: of the checkpoint.
        names: the path there of each tensor that it has, by the path here.
    """

    run: str
    step: int
    names: dict[str, str]


def _match(path: str | Path, wanted: Mapping[str, Tensor]) -> _Match:
    """What the source that ``path`` means has of those ``wanted`` tensors."""
    source = _find_source(path)
    recipe = folder.recipe_of(source.run)
    if recipe.lora:
        raise ValueError(
            f"init={str(path)!r} is a run of adapters, whose checkpoints have no whole model; "
            f"merge it first: python -m k31fn.hf export {source.run} OUT, python -m k31fn.hf "
            "import OUT CONFIG"
        )
    tensors = _by_path(recipe)
    names: dict[str, str] = {}
    for name, x in wanted.items():
        source_name = _name_in(tensors, name)
        if source_name is None:
            continue
        if tensors[source_name].shape != x.shape:
            raise ValueError(
                f"init={str(path)!r} is of another model: {name} has shape "
                f"{list(tensors[source_name].shape)}, here {list(x.shape)}"
            )
        names[name] = source_name
    return _Match(str(source.run), source.step, names)


def _name_in(tensors: Mapping[str, Tensor], name: str) -> str | None:
    """The path in a source: of Gated MLA in a model whose attention is not inside a Gated DSA."""
    for candidate in (name, name.replace(".attn.attn.", ".attn.")):
        if candidate in tensors:
            return candidate
    return None


def _check_missing(path: str | Path, names: Iterable[str]) -> None:
    # an indexer may be new: a trained model without one becomes sparse
    missing = sorted(name for name in names if ".indexer." not in name)
    if missing:
        raise ValueError(
            f"init={str(path)!r} has no {missing[0]} ({len(missing)} missing): it is a run of "
            "another model"
        )


def _by_path(recipe: Recipe) -> dict[str, Tensor]:
    """The whole state of a recipe in meta tensors."""
    return dict(tree.flatten_with_paths(abstract_state(lay_out(recipe))))
