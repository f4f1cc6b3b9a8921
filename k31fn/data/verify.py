"""Reads all of a prepared folder and says what of it is damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from k31fn import regular_files
from k31fn.data.checked_array import CheckedArray
from k31fn.data.store import INDEX, Store, open_store

__all__ = ["Verification", "verify"]


class Verification(NamedTuple):
    """What was read, and what is wrong with it.

    Attributes:
        num_bytes: of the arrays.
        unchecked: shards of an earlier version, which have no checksums.
        problems: a line for each block or document that is not as it was written.
    """

    num_bytes: int
    unchecked: int
    problems: list[str]


def verify(folder: str | Path, *, workers: int = 0) -> Verification:
    """Compares each block of each array with its checksum, and arrays with each other.

    Args:
        folder: what one call prepared, or one store of it.
        workers: threads; 0: one per core. Reading and checksums hold no lock.

    Raises:
        ValueError: there is no store.
    """
    root = regular_files.path(folder, "folder")
    stores = [root]
    if not (root / INDEX).is_file():
        stores = sorted(file.parent for file in root.glob(f"*/{INDEX}"))
    if not stores:
        raise ValueError(
            f"{root} has no {INDEX} and no store in it: it is no prepared data, or preparing it "
            "has not finished"
        )
    num_bytes = unchecked = 0
    problems: list[str] = []
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        for path in stores:
            try:
                store = open_store(path)
            except ValueError as e:
                problems.append(str(e))
                continue
            unchecked += store.unchecked
            arrays: list[CheckedArray] = []
            for shard in store.shards:
                arrays += shard.values()
            num_bytes += sum(array.num_bytes for array in arrays)
            found = list(pool.map(_damage, arrays))
            for of_array in found:
                problems += of_array
            # Where blocks are damaged, documents are too, and it would be said twice.
            if not any(found):
                problems += _misfits(store)
    return Verification(num_bytes, unchecked, problems)


def _damage(array: CheckedArray) -> list[str]:
    problems = []
    for block in range(array.blocks):
        try:
            array.check(block, block + 1)
        except ValueError as e:
            problems.append(str(e))
    return problems


def _misfits(store: Store) -> Iterator[str]:
    """What does not fit among arrays that are whole: they may be of two shards."""
    try:
        _ = store.lengths
    except ValueError as e:
        yield str(e)
        return
    for shard, first in zip(store.shards, store.first[:-1].tolist(), strict=True):
        # Only documents with images have more to say than their length.
        for number in np.flatnonzero(np.diff(shard["images"][:])).tolist():
            try:
                store.images_of(first + number)
            except ValueError as e:
                yield str(e)
