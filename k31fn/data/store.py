"""Prepared data: tokens and patches of documents in files that are mapped into memory, with an
index.

A store is a folder with ``index.json`` and shards. A shard is a folder of arrays (``.npy``, mapped
when read):

- ``tokens``: all documents one after the other, each with its end token (a conversation with
  none); uint16 or uint32.
- ``offsets``: int64; document i is ``tokens[offsets[i]:offsets[i + 1]]``.
- ``images``: int64; the images of document i are ``images[i]`` to ``images[i + 1]``.
- ``grids``: ``[images, 3]``, frames, height and width in patches.
- ``spans``: ``[images, 2]``, where an image's tokens are in its document.
- ``patch_offsets``: int64; the patches of image j.
- ``patches``: uint8 ``[N, 3 p p]``, in cell order.
- ``learnt``: of conversations only; bool, whether each token is part of an answer: only those are
  labels.

A shard appears under its name only when it is complete. Its ``checksums.json`` has the CRC-32 of
each megabyte of each array, and the index the CRC-32 of that file: a block is compared with its own
when it is first read (:mod:`k31fn.data.checked_array`). Stores of earlier versions have none.
"""

from __future__ import annotations

import functools
import itertools
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k31fn import regular_files, strict_json
from k31fn.data.checked_array import CheckedArray, Rule
from k31fn.data.shard_writer import SUMS, StoredDocument

__all__ = ["INDEX", "VERSION", "Store", "StoredDocument", "open_store"]

INDEX = "index.json"
VERSION = 1  # of the index and the arrays; another one is refused
_MOST = 4 << 30  # bytes of an index: a shard has some hundred
_ARRAYS = ("tokens", "offsets", "images", "grids", "spans", "patch_offsets", "patches")
_NO_SPANS = np.zeros((0, 2), np.int64)
_NO_GRIDS = np.zeros((0, 3), np.int32)
Arrays = dict[str, Any]  # by name: CheckedArray, or arrays in memory


@dataclass(frozen=True, eq=False)
class Store:
    """Prepared documents, numbered through all shards. Build it with :func:`open_store`.

    Attributes:
        shards: the arrays of each shard.
        index: what was prepared, and how.
        first: number of the first document of each shard, and the number of all.
    """

    shards: tuple[Arrays, ...]
    index: dict[str, Any]
    first: np.ndarray

    @property
    def num_documents(self) -> int:
        """How many documents."""
        return int(self.first[-1])

    @property
    def media_token(self) -> int:
        """The token that stands for an image's features; -1 if the tokenizer had none."""
        return self.index["media_token"]

    @property
    def end_token(self) -> int:
        """The last token of each document."""
        return self.index["end_token"]

    @property
    def patch_width(self) -> int:
        """Bytes of a patch."""
        return self.index["patch_width"]

    @property
    def answers(self) -> bool:
        """Whether documents are conversations, of which only answers are learnt."""
        return self.index.get("answers", False)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document.

        Raises:
            ValueError: a shard's documents are not all of its tokens.
        """
        lengths = [np.zeros(0, np.int64)]  # numpy refuses to join nothing
        for shard in self.shards:
            offsets = shard["offsets"][:]
            if offsets[0] != 0 or offsets[-1] != len(shard["tokens"]):
                raise ValueError(
                    f"{shard['offsets'].file} is damaged: documents go from {offsets[0]} to "
                    f"{offsets[-1]} of {len(shard['tokens'])} tokens; prepare the data again"
                )
            lengths.append(np.diff(offsets))
        return np.concatenate(lengths)

    @functools.cached_property
    def _has_images(self) -> np.ndarray:
        """Whether each document has one."""
        found = [np.zeros(0, np.bool_)]
        for shard in self.shards:
            found.append(np.diff(shard["images"][:]) > 0)
        return np.concatenate(found)

    @property
    def unchecked(self) -> int:
        """How many shards are of an earlier version, which wrote no checksums."""
        return sum("checksums" not in entry for entry in self.index["shards"])

    def find(self, number: int) -> tuple[Arrays, int]:
        """The shard of a document, and its number in it."""
        # From the right: of shards that begin at one number, all but the last are empty.
        shard = int(np.searchsorted(self.first, number, side="right")) - 1
        return self.shards[shard], number - int(self.first[shard])

    def images_of(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """``(spans, grids)`` of a document's images.

        Raises:
            ValueError: they are not in the document, or not of its patches.
        """
        # Rows are made of every document once, and most have none.
        if not self._has_images[number]:
            return _NO_SPANS, _NO_GRIDS
        shard, i = self.find(number)
        low, high = shard["images"][i : i + 2]
        spans, grids = shard["spans"][low:high], shard["grids"][low:high]
        ends = spans.ravel()
        sizes = np.diff(shard["patch_offsets"][low : high + 1])
        in_order = ends[0] >= 0 and ends[-1] <= self.lengths[number]
        in_order = in_order and bool((np.diff(ends) >= 0).all())
        if not in_order or (grids.prod(1, dtype=np.int64) != sizes).any():
            raise ValueError(
                f"{shard['spans'].file.parent} is damaged: the images of its document {i} have "
                f"places {spans.tolist()} in {self.lengths[number]} tokens, sizes "
                f"{grids.tolist()} and {sizes.tolist()} patches; prepare the data again"
            )
        return spans, grids

    def read(self, number: int) -> StoredDocument:
        """A document; its arrays are views of the files."""
        shard, i = self.find(number)
        start, stop = shard["offsets"][i : i + 2]
        low, high = shard["images"][i : i + 2]
        bounds = shard["patch_offsets"][low : high + 1]
        patches = [shard["patches"][a:b] for a, b in itertools.pairwise(bounds)]
        grids = [(int(t), int(h), int(w)) for t, h, w in shard["grids"][low:high]]
        learnt = shard["learnt"][start:stop] if self.answers else ()
        return StoredDocument(
            shard["tokens"][start:stop], grids, shard["spans"][low:high], patches, learnt
        )


def open_store(folder: str | Path) -> Store:
    """Opens a prepared folder; its arrays are mapped, and checked as they are read.

    Raises:
        ValueError: it is no finished store, its index is not one, or a shard of it is missing,
            outside of the prepared folder, or of another size.
    """
    root = regular_files.path(folder, "store")
    if not (root / INDEX).is_file():
        raise ValueError(
            f"{root} has no {INDEX}: it is no prepared data, or preparing it has not finished"
        )
    index = strict_json.load_object(root / INDEX, most=_MOST)
    if index.get("version") != VERSION:
        raise ValueError(
            f"{root / INDEX} is of version {index.get('version')}, not {VERSION}; prepare it again"
        )
    _check_index(index, root / INDEX)
    shards = tuple(_open_shard(root, entry, index) for entry in index["shards"])
    first = [0]
    for entry in index["shards"]:
        first.append(first[-1] + entry["documents"])
    return Store(shards, index, np.array(first))


def _check_index(index: dict[str, Any], file: Path) -> None:
    """Refuses an index of other fields than ours: what it says decides what is read."""
    vocab_size = _number(index, "vocab_size", file, 1)
    _number(index, "end_token", file, 0, vocab_size - 1)
    _number(index, "media_token", file, -1, vocab_size - 1)
    _number(index, "patch_width", file, 1)
    for name, kind in (("shards", list), ("prepared", dict), ("answers", bool)):
        if not isinstance(index.get(name, False if kind is bool else None), kind):
            raise ValueError(
                f"{file}: {name}={str(index.get(name))[:60]!r} must be a {kind.__name__}"
            )
    for number, entry in enumerate(index["shards"]):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ValueError(f"{file}: shards[{number}] must be an object with a name")
        for name in ("documents", "tokens", "images", *(n for n in ("checksums",) if n in entry)):
            _number(entry, name, file, 0, at=f"shards[{number}].")


def _number(
    data: dict[str, Any], name: str, file: Path, least: int, most: int = 1 << 62, at: str = ""
) -> int:
    value = data.get(name)
    # type, not isinstance: true is an int to Python
    if type(value) is not int or not least <= value <= most:
        raise ValueError(
            f"{file}: {at}{name}={value!r} must be a whole number from {least} to {most}"
        )
    return value


def _open_shard(root: Path, entry: dict[str, Any], index: dict[str, Any]) -> Arrays:
    # Split and shards lie side by side in what one call prepared; a store may be behind a link.
    prepared = Path(os.path.realpath(root)).parent
    try:
        folder = regular_files.contained(os.path.realpath(root), entry["name"], within=prepared)
    except ValueError as e:
        raise ValueError(f"{root / INDEX}: shard {e}") from e
    names = (*_ARRAYS, "learnt") if index.get("answers") else _ARRAYS
    known = _Sums(folder, entry, names)
    arrays: Arrays = {}
    layouts = _layouts(index, arrays)
    try:
        for name in names:
            file = folder / f"{name}.npy"
            of_array = functools.partial(known.of, name)
            arrays[name] = CheckedArray(file, *layouts[name], known=of_array)
    except ValueError as e:
        raise ValueError(f"shard {folder} is missing or damaged: {e}") from e
    # Lengths are all that is compared now: reading terabytes of tokens would take hours.
    found = (len(arrays["offsets"]) - 1, len(arrays["tokens"]), len(arrays["grids"]))
    images = (len(arrays["images"]) - 1, len(arrays["patch_offsets"]) - 1, len(arrays["spans"]))
    whole = len(arrays.get("learnt", arrays["tokens"])) == len(arrays["tokens"])
    right = (entry["documents"], entry["tokens"], entry["images"])
    if not whole or found != right or images != (right[0], right[2], right[2]):
        raise ValueError(
            f"shard {folder} holds {found} documents, tokens and images, not what {INDEX} says: "
            f"{entry}"
        )
    return arrays


def _layouts(
    index: dict[str, Any], arrays: Arrays
) -> dict[str, tuple[Sequence[str], int | tuple[()], Rule]]:
    """Dtypes, columns and rule of each array; ``arrays`` holds all of them when a rule is used."""
    return {
        "tokens": (("<u2", "<u4"), (), functools.partial(_in_vocabulary, index["vocab_size"])),
        "learnt": (("|b1",), (), _anything),
        "offsets": (("<i8",), (), functools.partial(_ascends, arrays, "tokens")),
        "images": (("<i8",), (), functools.partial(_ascends, arrays, "grids")),
        "patch_offsets": (("<i8",), (), functools.partial(_ascends, arrays, "patches")),
        "grids": (("<i4",), 3, functools.partial(_at_least, 1)),
        "spans": (("<i8",), 2, functools.partial(_at_least, 0)),
        "patches": (("|u1",), index["patch_width"], _anything),
    }


def _anything(values: np.ndarray) -> str:
    del values
    return ""


def _in_vocabulary(vocab_size: int, values: np.ndarray) -> str:
    most = int(values.max())
    return f"token {most} is past the vocabulary of {vocab_size}" if most >= vocab_size else ""


def _ascends(arrays: Arrays, name: str, values: np.ndarray) -> str:
    last = len(arrays[name])
    right = values[0] >= 0 and values[-1] <= last and bool((np.diff(values) >= 0).all())
    return "" if right else f"its values do not ascend from 0 to {last}, the {name}"


def _at_least(least: int, values: np.ndarray) -> str:
    return f"a value is below {least}" if int(values.min()) < least else ""


class _Sums:
    """The checksums of a shard's blocks, read when they are first asked for."""

    def __init__(self, folder: Path, entry: dict[str, Any], names: Sequence[str]):
        self._file = folder / SUMS
        self._entry = entry
        self._names = names

    def of(self, name: str) -> list[int] | None:
        """Of an array; None: the shard is of an earlier version, which wrote none."""
        return self._by_name[name] if "checksums" in self._entry else None

    @functools.cached_property
    def _by_name(self) -> dict[str, list[int]]:
        data = regular_files.read(self._file, most=_MOST)
        if zlib.crc32(data) != self._entry["checksums"]:
            raise ValueError(
                f"{self._file} is damaged: its checksum is not that of {INDEX}; prepare the data "
                "again"
            )
        known = strict_json.parse(data, str(self._file))
        missing = not isinstance(known, dict) or not known.keys() >= set(self._names)
        if missing or any(type(known[name]) is not list for name in self._names):
            raise ValueError(
                f"{self._file} has no list of checksums for each of {list(self._names)}"
            )
        return known
