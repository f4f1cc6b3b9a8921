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

A shard appears under its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from k31fn.layers.patches import Grid

__all__ = ["INDEX", "VERSION", "Store", "StoredDocument", "open_store", "write_shards"]

INDEX = "index.json"
VERSION = 1  # of the index and the arrays; another one is refused
_ARRAYS = ("tokens", "offsets", "images", "grids", "spans", "patch_offsets", "patches")


class StoredDocument(NamedTuple):
    """A document as it is stored.

    Attributes:
        tokens: its tokens, the end token last; of a conversation its messages alone.
        grids: of its images.
        spans: ``[images, 2]``.
        patches: of each image.
        learnt: whether each token is to be learnt; ``()``: all are.
    """

    tokens: np.ndarray
    grids: Sequence[Grid]
    spans: np.ndarray
    patches: Sequence[np.ndarray]
    learnt: np.ndarray | tuple[()] = ()


class _Shard:
    """A writer of one shard. Documents are written as they come; nothing is kept but their
    lengths.
    """

    def __init__(
        self, folder: Path, *, token_dtype: np.dtype[Any], patch_width: int, answers: bool = False
    ):
        self._offsets = [0]
        self._images = [0]
        self._patch_offsets = [0]
        self._grids: list[Grid] = []
        self._spans: list[np.ndarray] = []
        self._folder = folder
        self._dtype = token_dtype
        self._width = patch_width
        names = ("tokens", "patches", "learnt") if answers else ("tokens", "patches")
        # SIM115: they stay open from document to document; `finish` and `close` close them.
        self._files = {name: open(folder / f"{name}.npy", "wb") for name in names}  # noqa: SIM115
        self._write_headers()

    def add(self, document: StoredDocument) -> None:
        """Appends a document."""
        self._files["tokens"].write(document.tokens.astype(self._dtype).tobytes())
        if "learnt" in self._files:
            self._files["learnt"].write(np.asarray(document.learnt, np.bool_).tobytes())
        self._offsets.append(self._offsets[-1] + len(document.tokens))
        images = zip(document.grids, document.spans, document.patches, strict=True)
        for grid, span, patches in images:
            self._files["patches"].write(patches.tobytes())
            self._patch_offsets.append(self._patch_offsets[-1] + len(patches))
            self._grids.append(grid)
            self._spans.append(span)
        self._images.append(len(self._grids))

    def finish(self) -> dict[str, int]:
        """Writes the arrays of lengths and the headers of the others; gives the totals."""
        small = {
            "offsets": self._offsets,
            "images": self._images,
            "patch_offsets": self._patch_offsets,
        }
        for name, values in small.items():
            np.save(self._folder / f"{name}.npy", np.array(values, np.int64))
        np.save(self._folder / "grids.npy", np.array(self._grids, np.int32).reshape(-1, 3))
        np.save(self._folder / "spans.npy", np.array(self._spans, np.int64).reshape(-1, 2))
        # Over the headers of empty arrays, which were as long.
        for file in self._files.values():
            file.seek(0)
        self._write_headers()
        for file in self._files.values():
            file.close()
        return {
            "documents": len(self._offsets) - 1,
            "tokens": self._offsets[-1],
            "images": len(self._grids),
        }

    def _write_headers(self) -> None:
        """Writes the headers of the large arrays.

        NumPy leaves room for the first dimension to grow, so their length stays.
        """
        num_tokens = self._offsets[-1]
        kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            "tokens": (self._dtype, (num_tokens,)),
            "learnt": (np.dtype(np.bool_), (num_tokens,)),
            "patches": (np.dtype(np.uint8), (self._patch_offsets[-1], self._width)),
        }
        for name, file in self._files.items():
            dtype, shape = kinds[name]
            descr = np.lib.format.dtype_to_descr(dtype)
            header = {"descr": descr, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_2_0(file, header)

    def close(self) -> None:
        """Closes the files of a shard that is not finished."""
        for file in self._files.values():
            file.close()


@contextlib.contextmanager
def write_shards(
    folder: Path,
    splits: Sequence[str],
    *,
    token_dtype: np.dtype[Any],
    patch_width: int,
    answers: bool = False,
) -> Iterator[tuple[Path, dict[str, _Shard]]]:
    """Opens one shard per split, in ``folder/split``; gives the folder that they are made in, too.

    That folder gets its name on leaving; on failure nothing is left.
    """
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        with contextlib.ExitStack() as stack:
            shards: dict[str, _Shard] = {}
            for split in splits:
                (partial / split).mkdir(parents=True)
                shards[split] = _Shard(
                    partial / split,
                    token_dtype=token_dtype,
                    patch_width=patch_width,
                    answers=answers,
                )
                stack.callback(shards[split].close)
            yield partial, shards
        # All splits appear at once: a unit is prepared or it is not.
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@dataclass(frozen=True, eq=False)
class Store:
    """Prepared documents, numbered through all shards. Build it with :func:`open_store`.

    Attributes:
        shards: the arrays of each shard.
        index: what was prepared, and how.
        first: number of the first document of each shard, and the number of all.
    """

    shards: tuple[dict[str, np.ndarray], ...]
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
        """Tokens of each document."""
        lengths = [np.zeros(0, np.int64)]  # numpy refuses to join nothing
        for shard in self.shards:
            lengths.append(np.diff(shard["offsets"]))
        return np.concatenate(lengths)

    def find(self, number: int) -> tuple[dict[str, np.ndarray], int]:
        """The shard of a document, and its number in it."""
        # From the right: of shards that begin at one number, all but the last are empty.
        shard = int(np.searchsorted(self.first, number, side="right")) - 1
        return self.shards[shard], number - int(self.first[shard])

    def images_of(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """``(spans, grids)`` of a document's images."""
        shard, i = self.find(number)
        low, high = shard["images"][i : i + 2]
        return shard["spans"][low:high], shard["grids"][low:high]

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
    """Opens a prepared folder; its arrays are mapped, not read.

    Raises:
        ValueError: it is no finished store, or a shard of it is missing or damaged.
    """
    root = Path(folder)
    if not (root / INDEX).is_file():
        raise ValueError(
            f"{root} has no {INDEX}: it is no prepared data, or preparing it has not finished"
        )
    index = json.loads((root / INDEX).read_text(encoding="utf-8"))
    if index.get("version") != VERSION:
        raise ValueError(
            f"{root / INDEX} is of version {index.get('version')}, not {VERSION}; prepare it again"
        )
    names = (*_ARRAYS, "learnt") if index.get("answers") else _ARRAYS
    shards = tuple(_open_shard(root / entry["name"], entry, names) for entry in index["shards"])
    first = [0]
    for entry in index["shards"]:
        first.append(first[-1] + entry["documents"])
    return Store(shards, index, np.array(first))


def _open_shard(folder: Path, entry: dict[str, Any], names: Sequence[str]) -> dict[str, np.ndarray]:
    try:
        arrays = {name: _mapped(folder / f"{name}.npy") for name in names}
    except (OSError, ValueError) as e:
        raise ValueError(f"shard {folder} is missing or damaged: {e}") from e
    # Lengths are all that is compared: reading terabytes of tokens would take hours.
    sizes = (len(arrays["offsets"]) - 1, len(arrays["tokens"]), len(arrays["grids"]))
    whole = len(arrays.get("learnt", arrays["tokens"])) == len(arrays["tokens"])
    if not whole or sizes != (entry["documents"], entry["tokens"], entry["images"]):
        raise ValueError(
            f"shard {folder} holds {sizes} documents, tokens and images, not what {INDEX} says: "
            f"{entry}"
        )
    return arrays


def _mapped(file: Path) -> np.ndarray:
    # Files may come from anywhere, and a pickle would run what it likes.
    return np.load(file, mmap_mode="r", allow_pickle=False)
