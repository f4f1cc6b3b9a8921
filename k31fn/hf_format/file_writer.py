"""Writing safetensors files in parts: the layout is fixed first, then any rank writes any tile of
any tensor.

All files are made at their full length with their headers; a tile goes straight to its bytes. So no
tensor is ever gathered, and ranks that see the same folder write one checkpoint together.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from k31fn.hf_format.files import CODES, INDEX, SINGLE
from k31fn.hf_format.transforms import Tile
from k31fn.typing import Tensor

__all__ = [
    "FileLayout",
    "TensorPlace",
    "TensorWriter",
    "create",
    "lay_out",
    "open_writer",
    "write_json",
]


class TensorPlace(NamedTuple):
    """Where a tensor lies: its file and the first byte in it."""

    file: str
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class FileLayout(NamedTuple):
    """Files that hold some tensors.

    Attributes:
        places: of each tensor.
        headers: the bytes before the tensors, by file.
        lengths: of whole files.
        listing: the index of the shards; None if all fits in one file.
    """

    places: dict[str, TensorPlace]
    headers: dict[str, bytes]
    lengths: dict[str, int]
    listing: dict[str, Any] | None


def lay_out(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], shard_bytes: int
) -> FileLayout:
    """Places tensors, given by shape and dtype, in their order, into files of about
    ``shard_bytes``.

    In a file the widest dtypes come first, so that each tensor is aligned, then names in order: the
    bytes that the safetensors library writes.

    Raises:
        ValueError: a dtype that a checkpoint in K3's format does not have.
    """
    if odd := sorted({str(dtype) for _, dtype in tensors.values() if dtype not in CODES}):
        raise ValueError(f"cannot store {odd}; use one of {[str(d) for d in CODES]}")
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in tensors.items()}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    count = len(shards)
    layout = FileLayout({}, {}, {}, None)
    for number, names in enumerate(shards, 1):
        file = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        _lay_out_file(file, {n: tensors[n] for n in names}, layout)
    if count == 1:
        return layout
    weight_map = {name: layout.places[name].file for name in sorted(layout.places)}
    return layout._replace(
        listing={"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    )


def _lay_out_file(
    file: str, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]], layout: FileLayout
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    order = sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))
    end = 0
    for name in order:
        shape, dtype = tensors[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    layout.headers[file] = len(text).to_bytes(8, "little") + text
    layout.lengths[file] = 8 + len(text) + end
    for name in order:
        begin = 8 + len(text) + header[name]["data_offsets"][0]
        layout.places[name] = TensorPlace(file, begin, *tensors[name])


def create(folder: Path, layout: FileLayout) -> None:
    """Makes the folder and in it all files at their full length, with headers and without tensors.

    Raises:
        ValueError: the folder cannot be made.
        OSError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        text = (
            f"no folder can be made in {str(folder.parent)!r}: {error.strerror}; use another "
            "directory"
        )
        raise ValueError(text) from error
    for file, header in layout.headers.items():
        with open(folder / file, "wb") as out:
            out.write(header)
            out.truncate(layout.lengths[file])
    if layout.listing is not None:
        write_json(folder / INDEX, layout.listing)


class TensorWriter(NamedTuple):
    """Open files of a layout."""

    layout: FileLayout
    files: dict[str, int]

    def write(self, name: str, sliced_shape: tuple[int, ...], tile: Tile, values: Tensor) -> None:
        """Puts ``values`` where ``tile`` of the tensor lies, seen as ``sliced_shape``."""
        place = self.layout.places[name]
        assert values.dtype == place.dtype, f"{name} is {values.dtype}, announced as {place.dtype}"
        assert math.prod(sliced_shape) == math.prod(place.shape), (
            f"{name}: {sliced_shape} is not {place.shape}"
        )
        assert tuple(values.shape) == tuple(s.stop - s.start for s in tile), (
            f"{name} does not fill its tile"
        )
        data = memoryview(
            values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        )
        size, at = place.dtype.itemsize, 0
        for first, length in _runs(sliced_shape, tile):
            _put(self.files[place.file], data[at : at + length * size], place.begin + first * size)
            at += length * size


@contextlib.contextmanager
def open_writer(folder: Path, layout: FileLayout) -> Iterator[TensorWriter]:
    """The files of a layout, once :func:`create` has made them; on leaving they are on disk."""
    with contextlib.ExitStack() as stack:
        files: dict[str, int] = {}
        for file in layout.headers:
            files[file] = os.open(folder / file, os.O_WRONLY)
            stack.callback(os.close, files[file])
        yield TensorWriter(layout, files)
        for number in files.values():
            os.fsync(number)


def _runs(shape: tuple[int, ...], tile: Tile) -> Iterator[tuple[int, int]]:
    """First element and length of each contiguous run of the tile, in its order."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    cut = max((d for d, s in enumerate(tile) if s.stop - s.start != shape[d]), default=0)
    length = math.prod([s.stop - s.start for s in tile[cut:]])
    if not length:
        return
    base = tile[cut].start * strides[cut] if tile else 0
    for index in itertools.product(*(range(s.start, s.stop) for s in tile[:cut])):
        yield base + sum(i * stride for i, stride in zip(index, strides, strict=False)), length


def _put(file: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


def write_json(file: Path, data: dict[str, Any]) -> None:
    """Writes ``data`` and waits until it is on disk."""
    with open(file, "wb") as out:
        out.write((json.dumps(data, indent=2) + "\n").encode())
        out.flush()
        os.fsync(out.fileno())
