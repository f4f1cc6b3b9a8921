"""Parameters of a run that trains adapters (:mod:`k31fn.lora`): the model that is adapted, and what
is saved.

What is frozen is a function of the recipe: of ``lora.base``, a checkpoint in K3's names or a run,
or of the seed. So a checkpoint of the run holds the adapters alone, with a fingerprint of the base
that they are for.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k31fn import balance, lora, model, params, regular_files, tree
from k31fn.checkpoint.checkpointer import Checkpointer
from k31fn.config.recipe import Recipe
from k31fn.hf_format.reader import open_checkpoint
from k31fn.trainer import folder

__all__ = ["check_base", "check_source", "fingerprint", "init_adapted"]

# What the fingerprint reads of a file: so many bytes, at so many places. A base may have terabytes,
# and it is taken at every start; training changes all of a file, so 16 MiB of it tell.
_PIECE = 2**18
_PIECES = 64


def init_adapted(
    recipe: Recipe, specs: Any, key: Tensor, tile: Callable[..., Any] | None
) -> tuple[model.Params[Any], balance.State]:
    """A rank's part of the adapted parameters, and the base's router biases, on the device of
    ``key``.

    Of a base in K3's names a rank reads its own tiles; a run is read whole by every process, on its
    host.

    Args:
        recipe: the run.
        specs: of this rank's parameters.
        key: of initial values.
        tile: see :func:`k31fn.params.init`.

    Raises:
        ValueError: the base is neither kind of folder, or of another model.
    """
    with _open_base(recipe, key) as (read, biases):
        weights = lora.init(specs, key, read, dtype=recipe.precision.param, tile=tile)
    return weights, tree.map(lambda x: x.to(key.device), biases)


def fingerprint(recipe: Recipe) -> str:
    """A hash of the base's files, or its checkpoint's: of each the whole, or of more than 16 MiB
    the size and 64 pieces.
    """
    if isinstance(recipe.lora, tuple) or not recipe.lora.base:
        return ""
    base = _path(recipe.lora.base)
    digest = hashlib.blake2b(digest_size=16)
    if _is_run(base):
        run, step = _newest(base)
        files = sorted(p for p in (run / "checkpoints" / str(step)).rglob("*") if p.is_file())
    else:
        files = sorted(base.glob("*.safetensors"))
    # names and sizes are hashed too: two files that change places are another base
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            # evenly spread, from the first byte to the last; of a small file they overlap
            for i in range(_PIECES):
                opened.seek(max(i * _PIECE, (size - _PIECE) * i // (_PIECES - 1)))
                digest.update(opened.read(_PIECE))
    return digest.hexdigest()


def check_base(recipe: Recipe, saved: str, base: str | None = None) -> None:
    """Compares the fingerprint in a checkpoint with that of the base.

    Args:
        recipe: the run.
        saved: in the checkpoint.
        base: the base's, where it is known; None: computed here.

    Raises:
        ValueError: they differ.
    """
    if saved != (fingerprint(recipe) if base is None else base):
        if isinstance(recipe.lora, tuple):
            raise ValueError(
                "the checkpoint is of adapters, and the run's config.json has none: it is another "
                "run's; put its own back"
            )
        raise ValueError(
            f"lora.base={recipe.lora.base!r} has changed since the checkpoint, whose adapters are "
            "for another; put the old one back, or have the run's config.json name it: "
            "RUN/checkpoints/STEP"
        )


def check_source(recipe: Recipe) -> None:
    """Whether the base is there and of the recipe's model; reads no weights.

    Raises:
        ValueError: it is not.
    """
    if isinstance(recipe.lora, tuple) or not recipe.lora.base:
        return
    if _is_run(_path(recipe.lora.base)):
        _matching_run(_path(recipe.lora.base), recipe)
    else:
        with open_checkpoint(_path(recipe.lora.base), recipe.model):
            pass


@contextlib.contextmanager
def _open_base(recipe: Recipe, key: Tensor) -> Iterator[tuple[lora.Read, balance.State]]:
    assert isinstance(recipe.lora, lora.Config)
    base = recipe.lora.base
    if not base:
        by_path = dict(tree.flatten_with_paths(model.specs(recipe.model)))
        # drawn as params.init would, so that the frozen model follows from the seed alone
        yield (
            lambda path, tile: params.draw(path, by_path[path], key, tile=tile),
            model.init_balance(recipe.model),
        )
    elif _is_run(_path(base)):
        weights, biases = _read_run(_path(base), recipe)
        yield lambda path, tile: weights[path][tile], biases
    else:
        with open_checkpoint(_path(base), recipe.model) as reader:
            yield reader.read, reader.balance()


def _is_run(base: Path) -> bool:
    """Whether it is a run folder, or a folder of runs; a checkpoint has files of weights."""
    if not base.is_dir():
        raise ValueError(
            f"lora.base={str(base)!r} is no folder; give a checkpoint in K3's names, or a run"
        )
    return not any(base.glob("*.safetensors"))


def _newest(base: Path) -> tuple[Path, int]:
    try:
        run, step = folder.resolve_step(base)
    except ValueError as error:
        raise ValueError(f"lora.base={str(base)!r} has no *.safetensors, and {error}") from error
    with Checkpointer(run / "checkpoints", read_only=True) as checkpoints:
        steps = checkpoints.steps()
        step = checkpoints.latest() if step is None else step
    if step not in steps:
        raise ValueError(
            f"lora.base={str(base)!r}: complete checkpoints of {run}: "
            f"{steps or 'none yet; train it first'}"
        )
    return run, step


def _matching_run(base: Path, recipe: Recipe) -> tuple[Path, int, Recipe]:
    """The run, its newest step and its recipe, of the same model."""
    run, step = _newest(base)
    base_recipe = folder.recipe_of(run)
    if base_recipe.lora:
        raise ValueError(
            f"lora.base={str(base)!r} is a run of adapters itself; merge it first: python -m "
            f"k31fn.hf export {run} OUT"
        )
    # by shapes, not by config: what has no weights, such as how many keys are chosen, may differ
    if _shapes(base_recipe) != _shapes(recipe):
        raise ValueError(f"lora.base={str(base)!r} is a run of another model; take its recipe's")
    return run, step, base_recipe


def _read_run(base: Path, recipe: Recipe) -> tuple[dict[str, Tensor], balance.State]:
    run, step, base_recipe = _matching_run(base, recipe)
    wanted = {
        "params": params.abstract(
            model.specs(base_recipe.model), dtype=base_recipe.precision.param
        ),
        "balance": model.init_balance(base_recipe.model, device="meta"),
    }
    with Checkpointer(run / "checkpoints", read_only=True) as checkpoints:
        # on the host: the device need not hold the whole weights beside a rank's parts of them
        read = checkpoints.restore(step, wanted, partial=True, device=torch.device("cpu"))
    return dict(tree.flatten_with_paths(read["params"])), read["balance"]


def _shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    return {path: spec.shape for path, spec in tree.flatten_with_paths(model.specs(recipe.model))}


def _path(base: str) -> Path:
    return regular_files.path(base, "lora.base")
