"""What a prepared folder was made from: settings, tokenizer, files, each with its size and time.

Shards that are there are kept by a later call, so a folder must never hold some of one source and
some of another. A file that was changed, replaced or touched since is refused by its name; so is an
image that a record names.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from k31fn import strict_json
from k31fn.data.records import Unit
from k31fn.data.tokenizer import Tokenizer, fingerprint

__all__ = ["IMAGES", "check_unchanged", "keep_plan", "stamps", "write_json"]

IMAGES = "images.json"
"""The file of a shard that has the stamps of images that its records name."""

Stamps = dict[str, list[int]]
"""Size and time of the last change, in nanoseconds, of files by their path."""

_PLAN = "plan.json"
_MOST = 4 << 30  # bytes of a plan: it names each text file


def keep_plan(root: Path, cfg: Any, work: list[Unit], tokenizer: Tokenizer) -> Stamps:
    """Notes what is prepared, or compares it with what an earlier call has noted; gives the stamps
    of the files.

    Raises:
        ValueError: the folder cannot be made, holds something else, or was prepared with other
            settings or from other files; says which.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(
            f"folder {str(root)!r} cannot be made: {e.strerror}; give one that can be"
        ) from e
    files = stamps(_files(work))
    plan = {
        "config": dataclasses.asdict(cfg),
        "units": work,
        "tokenizer": fingerprint(tokenizer),
        "files": files,
    }
    # Through JSON, which turns tuples into lists, so that it compares with what was read.
    plan = strict_json.parse(json.dumps(plan), "the plan")
    file = root / _PLAN
    if not file.exists():
        if any(root.iterdir()):
            raise ValueError(f"{root} is not empty and no prepared data; use another folder")
        write_json(file, plan)
        return files
    before = strict_json.load_object(file, most=_MOST)
    # Earlier versions noted less, which is all that can be compared then.
    if before != {name: plan.get(name) for name in before}:
        raise ValueError(
            f"{root} was prepared {_difference(before, plan)}; use another folder, or remove it"
        )
    for shard in root.glob(f"shard-*/{IMAGES}"):
        seen = strict_json.load_object(shard, most=_MOST)
        check_unchanged(seen, f"{root} was prepared")
    for partial in root.glob(".*.partial"):  # of processes that were killed
        shutil.rmtree(partial)
    return files


def check_unchanged(before: Mapping[str, Any], what: str) -> None:
    """Raises ValueError, which begins with ``what``, if a file is not as its stamp says."""
    now = stamps(before)
    if dict(before) != now:
        raise ValueError(
            f"{what} from other files: {_changed(before, now)}; use another folder, or remove it"
        )


def stamps(files: Iterable[str]) -> Stamps:
    """The stamps of files; ``[]`` of one that is not there."""
    found: Stamps = {}
    for file in files:
        try:
            status = os.stat(file)
        except OSError:
            found[file] = []
            continue
        # The time too: a file of the same size may hold something else.
        found[file] = [status.st_size, status.st_mtime_ns]
    return found


def write_json(file: Path, data: Any) -> None:
    """Writes a file of its own name at once: a reader finds the old one or the new one, whole."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(data, indent=1), encoding="utf-8")
    os.replace(temporary, file)


def _files(work: list[Unit]) -> list[str]:
    """The paths of the files that units are parts of, each once."""
    paths: dict[str, None] = {}
    for unit in work:
        for name in unit.files or ("",):
            paths[os.path.join(unit.path, name) if name else unit.path] = None
    return list(paths)


def _difference(before: dict[str, Any], plan: dict[str, Any]) -> str:
    settings = before.get("config")
    known = settings if isinstance(settings, dict) else {}
    changed = [name for name, value in plan["config"].items() if known.get(name) != value]
    if changed:
        return f"with other settings: {', '.join(changed)}"
    if before.get("tokenizer", plan["tokenizer"]) != plan["tokenizer"]:
        return "with another tokenizer of that name"
    files = before.get("files")
    if isinstance(files, dict) and files != plan["files"]:
        return f"from other files: {_changed(files, plan['files'])}"
    return "from other files, or files of other sizes"


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(map(repr, names[:3]))}{more} changed since, came or went"
