"""Run folders: ``runs/<name>/<time>/``.

A run writes ``config.json``, ``metrics.jsonl``, ``loss.png``, ``checkpoints/``, ``events/``
(TensorBoard) and, where asked for, ``trace/`` there.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from k31fn.config.codec import to_dict
from k31fn.config.files import load_recipe
from k31fn.config.recipe import Recipe

__all__ = [
    "CONFIG",
    "drop_if_unused",
    "new",
    "newest",
    "open_existing",
    "recipe_of",
    "resolve",
    "resolve_step",
    "write",
]

CONFIG = "config.json"
_MAY_CHANGE = (
    "mesh",
    "pipeline",
    "trackers",
)  # no number of a run depends on them, but for rounding


def new(root: Path, recipe: Recipe) -> Path:
    """A new folder for a run of ``recipe``, with its ``config.json``.

    Raises:
        ValueError: it cannot be made or written; nothing of it is left then.
    """
    folder = parent = root / recipe.name
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([stamp], (f"{stamp}-{n}" for n in itertools.count(1)))
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = next(parent / name for name in names if _made(parent / name))
        write(folder / CONFIG, json.dumps(to_dict(recipe), indent=2) + "\n")
    except OSError as error:
        if folder != parent:
            shutil.rmtree(folder, ignore_errors=True)
        raise ValueError(
            f"run folder {folder} cannot be made: {error.strerror}; give runs another place than "
            f"{str(root)!r}"
        ) from error
    return folder


def drop_if_unused(folder: Path) -> None:
    """Removes a run that did not begin: no step, no checkpoint, whole or damaged, and no record of
    a failure.
    """
    records, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
    saved = any(p.is_dir() for p in checkpoints.iterdir()) if checkpoints.is_dir() else False
    if not (
        saved or (folder / "failure").exists() or (records.exists() and records.stat().st_size)
    ):
        shutil.rmtree(folder, ignore_errors=True)


def newest(root: Path, recipe: Recipe) -> Path | None:
    """The newest run of the recipe's name, or None.

    Raises:
        ValueError: it belongs to another recipe; names the fields.
    """
    runs = _runs(root / recipe.name)
    return open_existing(runs[-1], recipe) if runs else None


def open_existing(folder: Path, recipe: Recipe) -> Path:
    """``folder`` if it is a run of ``recipe``, on whatever mesh it was.

    It may have written down as the base of its adapters one of the checkpoints that ``lora.base``
    can mean.

    Raises:
        ValueError: it is no run folder, or belongs to another recipe; names the fields.
    """
    there, here = (
        {k: v for k, v in to_dict(r).items() if k not in _MAY_CHANGE}
        for r in (recipe_of(folder), recipe)
    )
    if there["lora"] and here["lora"] and _is_inside(there["lora"]["base"], here["lora"]["base"]):
        here["lora"]["base"] = there["lora"]["base"]
    if there != here:
        fields = _differences("", there, here)
        raise ValueError(
            f"{folder} belongs to another config: "
            f"{'; '.join(fields[:6])}{' ...' if len(fields) > 6 else ''}; "
            f"{folder / CONFIG} alone goes on with it, a config file without --resume starts a "
            "new run"
        )
    return folder


def _is_inside(path: str, folder: str) -> bool:
    return bool(path and folder) and Path(path).absolute().is_relative_to(Path(folder).absolute())


def recipe_of(folder: Path) -> Recipe:
    """The recipe that a run wrote down.

    Raises:
        ValueError: ``folder`` is no run folder, or its ``config.json`` does not load.
    """
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is not a run folder: it has no {CONFIG}")
    return load_recipe(folder / CONFIG)


def _made(folder: Path) -> bool:
    """Whether the folder is new: another run may take a name at the same moment."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def resolve(path: Path) -> Path:
    """``path`` if it is a run folder; if it is a folder of runs, the newest of them.

    Raises:
        ValueError: it is neither.
    """
    if (path / CONFIG).is_file():
        return path
    runs = _runs(path)
    if not runs:
        raise ValueError(
            f"{path} is neither a run folder nor a folder of runs: there is no {CONFIG}"
        )
    return runs[-1]


def resolve_step(path: Path) -> tuple[Path, int | None]:
    """The run and the step of ``RUN/checkpoints/STEP``; of a path as for :func:`resolve` the newest
    one, None.

    Raises:
        ValueError: it is neither.
    """
    if path.name.isdecimal() and path.parent.name == "checkpoints":
        return resolve(path.parents[1]), int(path.name)
    return resolve(path), None


def write(file: Path, text: str) -> None:
    """Writes ``text`` to a temporary file and renames it to ``file``."""
    temporary = file.with_name(file.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)


def _runs(folder: Path) -> list[Path]:
    """The run folders in a folder, oldest first."""
    found = [p.parent for p in folder.glob(f"*/{CONFIG}")]
    return sorted(
        found, key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)]
    )  # 10 comes after 9


def _differences(at: str, there: Any, here: Any) -> list[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        names = [*there, *(n for n in here if n not in there)]
        return [
            d
            for n in names
            for d in _differences(f"{at}.{n}" if at else n, there.get(n), here.get(n))
        ]
    return [] if there == here else [f"{at} is {there!r} there, {here!r} here"]
