"""Run folders: ``runs/<name>/<time>/``, by the time in UTC at which they began.

A run writes ``config.json``, ``metrics.jsonl``, ``loss.png``, ``checkpoints/``, ``events/``
(TensorBoard) and, where asked for, ``trace/`` there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from k31fn import metrics
from k31fn.config.codec import to_dict
from k31fn.config.files import load_recipe
from k31fn.config.recipe import Recipe
from k31fn.layers import kinds

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
# No number of a run depends on them, but for rounding, so a run may go on with others.
_MAY_CHANGE = ("mesh", "pipeline", "trackers")


def new(root: Path, recipe: Recipe) -> Path:
    """A new folder for a run of ``recipe``, with its ``config.json``.

    Raises:
        ValueError: it cannot be made or written; nothing of it is left then.
    """
    text = json.dumps(to_dict(recipe), indent=2) + "\n"  # what cannot be written leaves no folder
    folder = parent = root / recipe.name
    absent: list[Path] = []
    try:
        absent = [outer for outer in (parent, *parent.parents) if not outer.exists()]
        parent.mkdir(parents=True, exist_ok=True)
        folder = _make_new(parent)
        write(folder / CONFIG, text)
    except OSError as error:
        if folder != parent:  # else none was made, and the parent has the other runs
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another run may have begun in one
            for outer in absent:
                outer.rmdir()
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
    # a damaged checkpoint may be all that is left of days of work, so any folder there counts
    has_saved = checkpoints.is_dir() and any(p.is_dir() for p in checkpoints.iterdir())
    has_records = records.exists() and records.stat().st_size > 0
    if not (has_saved or has_records or (folder / "failure").exists()):
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
    written = _fixed_fields(recipe_of(folder))
    given = _fixed_fields(recipe)
    # lora.base may be a run, whose newest checkpoint was another one when this run began
    if written["lora"] and given["lora"]:
        base = written["lora"]["base"]
        if _is_inside(base, given["lora"]["base"]):
            given["lora"]["base"] = base
    if written != given:
        fields = _differences("", written, given)
        # without it the config.json would be refused next, for a kind that it cannot name
        added = kinds.added((*recipe.model.sublayers.values(), recipe.model.residual))
        registers = " --recipe RECIPE.py" if added else ""
        raise ValueError(
            f"{folder} belongs to another config: "
            f"{'; '.join(fields[:6])}{' ...' if len(fields) > 6 else ''}; "
            f"{folder / CONFIG}{registers} alone goes on with it, a config file without "
            "--resume starts a new run"
        )
    return folder


def _fixed_fields(recipe: Recipe) -> dict[str, Any]:
    """Fields that a run keeps all its life, as ``config.json`` has them."""
    return {name: value for name, value in to_dict(recipe).items() if name not in _MAY_CHANGE}


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


def _make_new(parent: Path) -> Path:
    """Makes a folder that stands behind all runs which are there."""
    # Not by local time: the zone may differ between two starts, and clocks go back each autumn.
    stem = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    first = 0
    runs = _runs(parent)
    if runs and metrics.oldest_first((parent / stem, runs[-1]))[-1] == runs[-1]:
        # One began in this second, or by a clock that is ahead: the next number behind its name.
        numbered = re.fullmatch(r"(\d{8}-\d{6})-(\d+)", runs[-1].name)
        stem, first = (numbered[1], int(numbered[2])) if numbered else (runs[-1].name, 0)
        first += 1
    for number in itertools.count(first):
        candidate = parent / (f"{stem}-{number}" if number else stem)
        # making it is the test: another run may take a name between a look and a mkdir
        try:
            candidate.mkdir()
        except FileExistsError:
            continue
        return candidate
    raise AssertionError("numbers do not end")


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
    # a reader, or a run that is killed here, finds the old file or the new one, whole
    temporary = file.with_name(file.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)


def _runs(folder: Path) -> list[Path]:
    """The run folders in a folder, oldest first."""
    return metrics.oldest_first(p.parent for p in folder.glob(f"*/{CONFIG}"))


def _differences(at: str, written: Any, given: Any) -> list[str]:
    """A line for each field of two recipes' data that differs; ``at``: the path so far."""
    if not isinstance(written, dict) or not isinstance(given, dict):
        return [] if written == given else [f"{at} is {written!r} there, {given!r} here"]
    lines = []
    for name in {**written, **given}:  # in their order, which a set would lose
        path = f"{at}.{name}" if at else name
        lines += _differences(path, written.get(name), given.get(name))
    return lines
