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
import operator
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from k31fn.hf_format.files import CODES, INDEX, SINGLE
from k31fn.hf_format.transforms import Tile, tile_shape
from k31fn.typing import Tensor

__all__ = [
    "FileLayout",
    "TensorWriter",
    "create",
    "lay_out",
    "open_writer",
    "write_json",
]


class _TensorPlace(NamedTuple):
    """The place of a tensor: its file and the first byte in it."""

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

    places: dict[str, _TensorPlace]
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
    unknown = {str(dtype) for _, dtype in tensors.values()} - set(map(str, CODES))
    if unknown:
        raise ValueError(f"cannot store {sorted(unknown)}; use one of {list(map(str, CODES))}")
    shards: list[list[str]] = [[]]
    filled = total = 0
    for name, (shape, dtype) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        total += size
        # A tensor that is larger than a shard has one to itself.
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
    return layout._replace(listing={"metadata": {"total_size": total}, "weight_map": weight_map})


def _lay_out_file(
    file: str, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]], layout: FileLayout
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    order = sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))
    end = 0
    for name in order:
        shape, dtype = tensors[name]
        begin = end
        end += math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned in the file, too
    layout.headers[file] = len(text).to_bytes(8, "little") + text
    layout.lengths[file] = 8 + len(text) + end
    for name in order:
        begin = 8 + len(text) + header[name]["data_offsets"][0]
        layout.places[name] = _TensorPlace(file, begin, *tensors[name])


def create(folder: Path, layout: FileLayout) -> None:
    """Makes the folder and in it all files at their full length, with headers and without tensors.

    Raises:
        ValueError: the folder cannot be made.
        OSError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ValueError(
            f"no folder can be made in {str(folder.parent)!r}: {error.strerror}; use another "
            "directory"
        ) from error
    for file, header in layout.headers.items():
        with open(folder / file, "wb") as out:
            out.write(header)
            out.truncate(layout.lengths[file])  # the rest is a hole, which any rank may fill
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
        assert tuple(values.shape) == tile_shape(tile), f"{name} does not fill its tile"
        # As bytes: numpy has no bfloat16.
        flat = values.detach().cpu().contiguous().view(-1).view(torch.uint8)
        data = memoryview(flat.numpy().data)
        size = place.dtype.itemsize
        done = 0
        for first, length in _runs(sliced_shape, tile):
            piece = data[done : done + length * size]
            _put(self.files[place.file], piece, place.begin + first * size)
            done += length * size


@contextlib.contextmanager
def open_writer(folder: Path, layout: FileLayout) -> Iterator[TensorWriter]:
    """The files of a layout, once :func:`create` has made them; on leaving they are on disk."""
    with contextlib.ExitStack() as stack:
        files: dict[str, int] = {}
        for file in layout.headers:
            files[file] = os.open(folder / file, os.O_WRONLY)
            stack.callback(os.close, files[file])
        yield TensorWriter(layout, files)
        # Not after an error: then the folder is thrown away.
        for descriptor in files.values():
            os.fsync(descriptor)


def _runs(shape: tuple[int, ...], tile: Tile) -> Iterator[tuple[int, int]]:
    """First element and length of each contiguous run of the tile, in its order."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    sizes = tile_shape(tile)
    # The last dimension that is cut: what follows it is whole, so it is contiguous with it.
    cut = max((d for d, size in enumerate(sizes) if size != shape[d]), default=0)
    length = math.prod(sizes[cut:])
    if not length:
        return
    base = tile[cut].start * strides[cut] if tile else 0
    for index in itertools.product(*(range(s.start, s.stop) for s in tile[:cut])):
        yield base + sum(map(operator.mul, index, strides)), length


def _put(file: int, data: memoryview, at: int) -> None:
    # A call may write less than it is given: Linux at most 2 GiB.
    while data:
        written = os.pwrite(file, data, at)
        data = data[written:]
        at += written


def write_json(file: Path, data: dict[str, Any]) -> None:
    """Writes ``data`` and waits until it is on disk."""
    with open(file, "wb") as out:
        out.write((json.dumps(data, indent=2) + "\n").encode())
        out.flush()
        os.fsync(out.fileno())
