"""Arrays of a shard, mapped into memory, of which each part is checked when it is first read.

The bytes of an array, without its header, are cut into blocks of :data:`BLOCK`. What is known of a
block is its CRC-32, from when it was written, and a rule for its values, such as that tokens are of
the vocabulary. A block is looked at once per process, before anything of it is given away: a bit
that flipped on the disk stops a run before the step that would learn from it. A store of terabytes
is never read as a whole for that.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from k31fn import regular_files

__all__ = ["BLOCK", "CheckedArray", "Rule", "sums"]

BLOCK = 1 << 20
"""Bytes that have one checksum; a multiple of the size of each dtype."""

Rule = Callable[[np.ndarray], str]
"""What is wrong with some values that follow each other; "": nothing."""


def sums(data: np.ndarray) -> list[int]:
    """The CRC-32 of each block of an array."""
    flat = data.reshape(-1).view(np.uint8)
    return [zlib.crc32(flat[at : at + BLOCK].data) for at in range(0, len(flat), BLOCK)]


class CheckedArray:
    """An array in a ``.npy`` file. A slice of it is a view of the file."""

    def __init__(
        self,
        file: Path,
        dtypes: Sequence[str],
        columns: int | tuple[()],
        rule: Rule = lambda values: "",
        *,
        known: Callable[[], Sequence[int] | None] = lambda: None,
    ):
        """Maps a file.

        Args:
            file: written by NumPy.
            dtypes: what its values may be, such as ``<u2``.
            columns: of an array of rows; ``()``: its elements are numbers.
            rule: for values, of one dimension; a block is given with the last value before it.
            known: the checksums of its blocks, asked for when the first one is read; None: there
                are none.

        Raises:
            ValueError: it is no such file, or is shorter or longer than its header says.
        """
        self.file = file
        self._rule = rule
        self._known = known
        self._values = _mapped(file, dtypes, columns)
        self._row_bytes = self._values.itemsize * (columns or 1)
        blocks = -(-self._values.nbytes // BLOCK)
        self._left = bytearray(b"\1") * blocks  # 1 for each block that has not been looked at

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(len(self._values))
        if start < stop:
            first = start * self._row_bytes // BLOCK
            last = (stop * self._row_bytes - 1) // BLOCK
            # One comparison for what has been looked at, as most has been after a while.
            if self._left.find(1, first, last + 1) >= 0:
                self.check(first, last + 1)
        return self._values[rows]

    @property
    def num_bytes(self) -> int:
        """Of all of it."""
        return self._values.nbytes

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self._left)

    def check(self, first: int, stop: int) -> None:
        """Looks at those of some blocks that have not been looked at.

        Raises:
            ValueError: one is not what was written, or its values break the rule; names the file
                and the place.
        """
        known = self._known()
        if known is not None and len(known) != self.blocks:
            raise ValueError(f"{self.file} has {self.blocks} blocks, its checksums {len(known)}")
        flat = self._values.reshape(-1)
        size = BLOCK // flat.itemsize
        for block in range(first, stop):
            if not self._left[block]:
                continue
            values = flat[block * size : (block + 1) * size]
            wrong = ""
            if known is not None and zlib.crc32(values.view(np.uint8).data) != known[block]:
                wrong = "its checksum is not that of what was written"
            # With the value before: what is asked of neighbours holds across blocks too.
            wrong = wrong or self._rule(flat[max(0, block * size - 1) : (block + 1) * size])
            if wrong:
                place = f"bytes {block * BLOCK:,} to {block * BLOCK + values.nbytes:,} of its array"
                raise ValueError(
                    f"{self.file} is damaged, {place}: {wrong}; prepare the data again, or restore "
                    "the file"
                )
            self._left[block] = 0


def _mapped(file: Path, dtypes: Sequence[str], columns: int | tuple[()]) -> np.ndarray:
    with regular_files.open_file(file) as data:
        size = regular_files.check(file)
        try:
            version = np.lib.format.read_magic(data)
            # Read as a literal, never as code; a pickle is not read at all.
            read: Any = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                read = np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(data)
        except Exception as e:  # a damaged literal also fails as a token, a type or a syntax
            raise ValueError(f"{file} is not an array of NumPy: {' '.join(str(e).split())}") from e
        rows = (columns,) if columns else ()
        if dtype.str not in dtypes or fortran or len(shape) < 1 or shape[1:] != rows:
            raise ValueError(
                f"{file} holds {dtype} of shape {list(shape)}, not {' or '.join(dtypes)} of shape "
                f"{['N', *rows]}"
            )
        begin = data.tell()
        bytes_of_array = shape[0] * dtype.itemsize * (columns or 1)
        # Before it is mapped: behind the end of a file there is no memory, only a signal.
        if shape[0] < 0 or size != begin + bytes_of_array:
            raise ValueError(
                f"{file} has {size:,} bytes; its header says {begin + bytes_of_array:,}"
            )
        mapped = np.memmap(data, dtype, "r", begin, shape)
    # As a plain array, which is cut faster; it keeps the file mapped.
    return mapped.view(np.ndarray)
