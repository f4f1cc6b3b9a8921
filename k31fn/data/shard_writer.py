"""Writes shards of a store (:mod:`k31fn.data.store`): one per split, all at once or none."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from k31fn.data.checked_array import sums
from k31fn.layers.patches import Grid

__all__ = ["SUMS", "StoredDocument", "write_shards"]

SUMS = "checksums.json"
"""The file of a shard that has the checksums of its blocks."""


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
            "checksums": self._write_sums(),
        }

    def _write_sums(self) -> int:
        """Writes the checksums of the blocks; gives that of the list."""
        known = {}
        for file in sorted(self._folder.glob("*.npy")):
            known[file.stem] = sums(np.load(file, mmap_mode="r", allow_pickle=False))
        text = json.dumps(known).encode()
        (self._folder / SUMS).write_bytes(text)
        return zlib.crc32(text)

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
