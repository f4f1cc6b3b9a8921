"""The folder of a run's checkpoints: names, manifests, and which steps stay. Imports neither torch
nor orbax.

Each rank writes what it owns in a folder of its own; when all are through, the first adds the
manifest and renames::

    30/manifest.json          dtype and shape of each tensor, who wrote which part of it, a SHA-256
                              of each block, the caller's metadata, and a SHA-256 of all that
    30/0/state/               what rank 0 wrote: an ordinary orbax checkpoint of
                              {"TENSOR.BLOCK": array}
    30/1/state/               what rank 1 wrote
    40.a1b2c3d4.unfinished/   being written by one run of training, or left by a killed one;
                              the next removes it
    10.removed/               being deleted by retention; the next writer removes what is left
    20.damaged/               set aside by ``Checkpointer.latest(on_damage=...)``; never touched
                              again

A step's name exists only when it is complete. The number in an unfinished name is drawn by each run
of training: a rank that outlives its run writes where no other does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from k31fn import strict_json
from k31fn.checkpoint.manifests import check_content

__all__ = [
    "BLOCK_BYTES",
    "DamagedError",
    "Retention",
    "all_parts",
    "commit",
    "complete_steps",
    "finish_part",
    "flush_tree",
    "read_manifest",
    "remove_leftovers",
    "retire",
    "unfinished",
]

MANIFEST = "manifest.json"
SHARDS = "shards.json"  # of one rank, until the manifest has it
# Bytes of a manifest: each block of a checkpoint of terabytes has some hundred.
_MOST = 4 << 30
BLOCK_BYTES = 16 << 20  # larger parts are written, checked and read in pieces of at most this size

Json = dict[str, Any]


class DamagedError(Exception):
    """What was read is not what was written."""


class Retention(NamedTuple):
    """Which complete steps stay.

    Attributes:
        last: so many of the newest.
        every: each multiple of this number; 0: none.
        best: so many of those whose score is lowest; a step without a score is not among them.
    """

    last: int
    every: int = 0
    best: int = 0


def unfinished(directory: Path, step: int, token: str) -> Path:
    """The folder in which a step is written."""
    return directory / f"{step}.{token}.unfinished"


def complete_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending. Reads no file.

    A folder with anything in it counts: one without a manifest is a damaged checkpoint.
    """
    steps = []
    for name in os.listdir(directory) if directory.is_dir() else []:
        # "007" and other digits than ours are no names that a step gets.
        is_step = name.isdecimal() and str(int(name)) == name
        if is_step and _has_entries(directory / name):
            steps.append(int(name))
    return sorted(steps)


def _has_entries(folder: Path) -> bool:
    """Whether it is a folder that is not empty: an empty one a commit takes the place of."""
    try:
        with os.scandir(folder) as entries:
            return any(True for _ in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_manifest(directory: Path, step: int) -> Json:
    """The manifest of a complete step.

    Raises:
        DamagedError: it is missing, unreadable, or not what was written.
    """
    path = directory / str(step) / MANIFEST
    try:
        # NaN and infinities were allowed in the metadata of earlier ones.
        manifest = strict_json.load_object(path, most=_MOST, not_finite=True)
        recorded = manifest.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedError(
            f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"
        ) from error
    if recorded != _digest(manifest) or manifest.get("step") != step:
        raise DamagedError(f"{MANIFEST} is not what was written at this step: its checksum differs")
    try:
        check_content(manifest)
    except ValueError as error:
        raise DamagedError(f"{MANIFEST} has its checksum, but no state: {error}") from error
    return manifest


def finish_part(folder: Path, shards: Json) -> None:
    """Makes what a rank has written in its ``folder`` complete: flushed to disk, and then with the
    list of it.
    """
    new = folder / f"{SHARDS}.new"
    new.write_text(json.dumps(shards))
    # Data first, then the name that says it is there, then the folder that has the name: in any
    # other order a power failure could leave the name without the data.
    flush_tree(folder)
    os.rename(new, folder / SHARDS)
    _flush(folder)


def all_parts(folder: Path, ranks: int) -> bool:
    """Whether each rank's part of an unfinished step is complete."""
    return all((folder / str(rank) / SHARDS).exists() for rank in range(ranks))


def commit(
    directory: Path, step: int, token: str, ranks: int, tensors: Json, metadata: Any
) -> None:
    """Makes what ``ranks`` ranks have written the complete step.

    Args:
        directory: of the checkpoints.
        step: whose folder lies there unfinished.
        token: in its name.
        ranks: how many have written.
        tensors: dtype and shape of each.
        metadata: the caller's.

    Raises:
        OSError: something is missing or cannot be written.
        DamagedError: the parts do not make up the tensors.
    """
    folder = unfinished(directory, step, token)
    entries = {name: {**tensor, "shards": []} for name, tensor in tensors.items()}
    for rank in range(ranks):
        file = folder / str(rank) / SHARDS
        for name, shard in strict_json.load_object(file, most=_MOST).items():
            entries[name]["shards"].append({"rank": rank, **shard})
        file.unlink()
    for name, entry in entries.items():
        sizes = {tuple(shard["start"]): math.prod(shard["shape"]) for shard in entry["shards"]}
        # Parts are tiles of one grid, so equal starts are the only way in which two can overlap.
        overlap = len(sizes) != len(entry["shards"])
        if overlap or sum(sizes.values()) != math.prod(entry["shape"]):
            raise DamagedError(f"the parts that the ranks have written do not make up {name!r}")
    manifest = {"step": step, "metadata": metadata, "block_bytes": BLOCK_BYTES, "tensors": entries}
    (folder / MANIFEST).write_bytes(_dump({**manifest, "sha256": _digest(manifest)}))
    # The rename makes the step complete, so all that it names is on disk before it. The parent
    # comes last: only then does the step survive a power failure.
    _flush(folder / MANIFEST)
    _flush(folder)
    os.rename(folder, directory / str(step))
    _flush(directory)


def _kept_steps(steps: Sequence[int], scores: Mapping[int, float], keep: Retention) -> set[int]:
    """Which of ``steps``, ascending, stay."""
    stay = set(steps[-keep.last :])
    scored: list[int] = []
    for step in steps:
        if keep.every and step % keep.every == 0:
            stay.add(step)
        # NaN, as of a run that diverged, is less than nothing and would sort anywhere.
        if not math.isnan(scores.get(step, math.nan)):
            scored.append(step)
    # Of equal scores the newer step.
    stay.update(sorted(scored, key=lambda step: (scores[step], -step))[: keep.best])
    return stay


def retire(directory: Path, saved: int, scores: Mapping[int, float], keep: Retention) -> None:
    """Deletes what does not stay; never ``saved``, though an older step may have a better score."""
    steps = complete_steps(directory)
    for old in sorted(set(steps) - _kept_steps(steps, scores, keep) - {saved}):
        # Renamed first: a step that is half deleted must not look complete.
        removed = directory / f"{old}.removed"
        os.rename(directory / str(old), removed)
        shutil.rmtree(removed)


def remove_leftovers(directory: Path, token: str) -> None:
    """Deletes what killed writers left.

    The lock on the folder says that no other run of training is at work there.
    """
    for name in os.listdir(directory):
        if re.fullmatch(r"\d+\.(removed|(\w+\.)?unfinished)", name) and f".{token}." not in name:
            # Errors are ignored since a rank of a killed run may still add to it.
            shutil.rmtree(directory / name, ignore_errors=True)


def flush_tree(folder: Path) -> None:
    """Files to disk, then the folders that name them: orbax flushes its data files only."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            _flush(Path(parent, name))
        _flush(Path(parent))


def _flush(path: Path) -> None:
    """One file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        os.fsync(descriptor)


def _dump(value: Json) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1).encode()


def _digest(value: Json) -> str:
    return hashlib.sha256(_dump(value)).hexdigest()
