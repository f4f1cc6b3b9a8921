"""What a prepared folder was made from: settings, tokenizer, files, each with its stamp.

Shards that are there are kept by a later call, so a folder must never hold some of one source and
some of another. A file that was changed, replaced or touched since is refused by its name; so is an
image that a record names.

A stamp is size, time of the last change, time of the last change of the inode, and a checksum of
some of the content. A file may get its earlier time back (``touch -r``, ``tar``, ``rsync -t``), but
not that of its inode, which new rights or a new place change as well: where only that differs, the
content decides. A file of more than a megabyte is sampled, so bytes between the samples can change
unseen, if size and time are as before.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from k31fn import regular_files, strict_json
from k31fn.data.records import Unit
from k31fn.data.tokenizer import Tokenizer, fingerprint

__all__ = ["IMAGES", "check_unchanged", "keep_plan", "stamps", "write_json"]

IMAGES = "images.json"
"""The file of a shard that has the stamps of images that its records name."""

Stamps = dict[str, list[int]]
"""Size, two times in nanoseconds and a checksum, of files by their path."""

_PLAN = "plan.json"
_PART = 1 << 14  # bytes that are read at each place of a file
_PARTS = 64
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
    file = root / _PLAN
    before = strict_json.load_object(file, most=_MOST) if file.exists() else {}
    files = stamps(_files(work), before.get("files"))
    plan = {
        "config": dataclasses.asdict(cfg),
        "units": work,
        "tokenizer": fingerprint(tokenizer),
        "files": files,
    }
    # Through JSON, which turns tuples into lists, so that it compares with what was read.
    plan = strict_json.parse(json.dumps(plan), "the plan")
    if not file.exists():
        if any(root.iterdir()):
            raise ValueError(f"{root} is not empty and no prepared data; use another folder")
        write_json(file, plan)
        return files
    # Earlier versions noted less, which is all that can be compared then.
    if before != {name: plan.get(name) for name in before}:
        if any(root.glob("shard-*")):
            raise ValueError(
                f"{root} was prepared {_difference(before, plan)}; use another folder, or remove it"
            )
        write_json(file, plan)  # of a call that failed before it made a shard nothing is kept
    for shard in root.glob(f"shard-*/{IMAGES}"):
        seen = strict_json.load_object(shard, most=_MOST)
        check_unchanged(seen, f"{root} was prepared")
    for partial in root.glob(".*.partial"):  # of processes that were killed
        shutil.rmtree(partial)
    return files


def check_unchanged(before: Mapping[str, Any], what: str) -> None:
    """Raises ValueError, which begins with ``what``, if a file is not as its stamp says."""
    now = stamps(before, before)
    if dict(before) != now:
        raise ValueError(
            f"{what} from other files: {_changed(before, now)}; use another folder, or remove it"
        )


def stamps(files: Iterable[str], known: Any = None) -> Stamps:
    """The stamps of files; ``[]`` of one that is not there.

    Args:
        files: paths.
        known: earlier stamps; of a file that has not changed since it is the earlier one.

    Raises:
        ValueError: a file cannot be read.
    """
    earlier = known if isinstance(known, Mapping) else {}
    return {file: _stamp(file, earlier.get(file)) for file in files}


def _stamp(file: str, known: Any) -> list[int]:
    try:
        status = os.stat(file)
    except OSError:
        return []
    stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    seems_same = isinstance(known, list) and known[:2] == stamp[:2]
    # Earlier versions noted no more than size and time.
    if seems_same and (len(known) == 2 or known[2] == stamp[2]):
        return known
    stamp.append(_sampled(file, status.st_size))
    return known if seems_same and known[3:] == stamp[3:] else stamp


def _sampled(file: str, size: int) -> int:
    """The CRC-32 of a file, if it is longer than a megabyte of parts of it."""
    with regular_files.open_file(file) as data:
        if size <= _PART * _PARTS:
            return zlib.crc32(data.read(_PART * _PARTS))
        checksum = 0
        for part in range(_PARTS):
            # The first part is the beginning of the file, the last one its end.
            data.seek(part * (size - _PART) // (_PARTS - 1))
            checksum = zlib.crc32(data.read(_PART), checksum)
        return checksum


def write_json(file: Path, data: Any) -> None:
    """Writes a file of its own name at once: a reader finds the old one or the new one, whole."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(data, indent=1), encoding="utf-8")
    except OSError as e:
        temporary.unlink(missing_ok=True)
        raise OSError(e.errno, e.strerror, str(file)) from e
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
