"""Folders of safetensors files: what their headers say, a reader of slices, JSON.

Format: https://huggingface.co/docs/safetensors, section "Format": eight bytes with the length of a
JSON header, the header, the tensors. Headers are checked whole before a byte of a tensor is read.
Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from k31fn import regular_files, strict_json
from k31fn.hf_format.transforms import Tile
from k31fn.typing import Tensor

__all__ = [
    "CODES",
    "DTYPES",
    "INDEX",
    "SINGLE",
    "TensorInfo",
    "TensorSource",
    "open_source",
    "survey",
]

# Names of files that other readers look for.
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What a weight may be stored as; the sizes below also know what other tensors of a file may be.
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
# Bytes of a header, as in the safetensors library: a length read from a file of another kind would
# be a request for any amount of memory.
_MOST = 100_000_000


class TensorInfo(NamedTuple):
    """What a header says of a tensor. ``dtype`` is the format's code, such as ``BF16``."""

    shape: tuple[int, ...]
    dtype: str
    file: str


class TensorSource(NamedTuple):
    """The tensors of a checkpoint by name, and how to read a tile of one: only its bytes are
    read.
    """

    tensors: dict[str, TensorInfo]
    read: Callable[[str, Tile], Tensor]


@contextlib.contextmanager
def open_source(directory: Path) -> Iterator[TensorSource]:
    """The checkpoint in ``directory``: one ``model.safetensors``, or shards with an index.

    Raises:
        ValueError: there is no such checkpoint, both kinds are there, the index does not fit the
            shards, or files are incomplete; all of it listed.
    """
    tensors, problems = survey(directory)
    if problems:
        raise ValueError(f"checkpoint {directory} cannot be read:\n  " + "\n  ".join(problems))
    with contextlib.ExitStack() as stack:
        # Opened when first read: a rank of many touches few of a hundred files.
        handles: dict[str, Any] = {}

        def read(name: str, tile: Tile) -> Tensor:
            file = tensors[name].file
            if file not in handles:
                handle = safe_open(str(directory / file), framework="pt")
                handles[file] = stack.enter_context(handle)
            return handles[file].get_slice(name)[tile]

        yield TensorSource(tensors, read)


def survey(directory: Path) -> tuple[dict[str, TensorInfo], list[str]]:
    """The tensors of a checkpoint, from the headers alone, and what is wrong with its files."""
    single = (directory / SINGLE).is_file()
    index = (directory / INDEX).is_file()
    if single and index:
        return {}, [f"it holds both {SINGLE} and {INDEX}: remove the one that is out of date"]
    if not single and not index:
        names_there: list[str] | str = "no such directory"
        if directory.is_dir():
            names_there = sorted(path.name for path in directory.iterdir())
        return {}, [f"it holds neither {SINGLE} nor {INDEX}, but: {names_there}"]
    listed: dict[str, set[str]] | dict[str, None] = {SINGLE: None}
    total: int | None = None
    if index:
        try:
            listed, total = _index(directory / INDEX)
        except ValueError as e:
            return {}, [str(e)]
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for file, names in listed.items():
        try:
            header = _read_header(directory / file)
        except ValueError as e:
            problems.append(str(e))
            continue
        if names is not None and header.keys() != names:
            problems.append(_mismatch(file, names, header, tensors))
        tensors |= header
    size = sum(_SIZES[tensor.dtype] * math.prod(tensor.shape) for tensor in tensors.values())
    # A total that is wrong only since a file is broken would be noise.
    if not problems and total not in (None, size):
        problems.append(f"{INDEX} says total_size={total}, the shards hold {size} bytes of tensors")
    return tensors, problems


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file. Reads its header only, and checks that the file is as long
    as it says.

    Raises:
        ValueError: there is no such file, or it is not a complete safetensors file.
    """
    if not file.exists():
        raise ValueError(f"{file.name} does not exist")
    size = regular_files.check(file)
    with regular_files.open_file(file) as data:
        length = int.from_bytes(data.read(8), "little")
        # Before it is read: this may be any file, and the number any number.
        if size < 8 or length > min(size - 8, _MOST):
            raise ValueError(
                f"{file.name} is not a complete safetensors file: {size} bytes end inside its "
                "header"
            )
        text = data.read(length)
    try:
        tensors, end, wrong = _parse_header(file.name, strict_json.parse(text, "it"))
    except ValueError as e:
        raise ValueError(
            f"{file.name} is not a complete safetensors file: its header is not valid: {e}"
        ) from e
    if wrong:
        raise ValueError(
            f"{file.name}: the header gives {wrong[0]} and {len(wrong) - 1} others a wrong place "
            "or length"
        )
    if end != size - 8 - length:
        raise ValueError(
            f"{file.name} is not a complete safetensors file: its header promises {end} bytes of "
            f"tensors, it has {size - 8 - length}"
        )
    return tensors


def _parse_header(file: str, header: Any) -> tuple[dict[str, TensorInfo], int, list[str]]:
    """The tensors of a header, where the last one ends, and those at a wrong place."""
    if not isinstance(header, dict):
        raise ValueError(f"it is a {type(header).__name__}, not an object")
    fields: list[tuple[int, int, str, str, tuple[int, ...]]] = []
    for name, tensor in header.items():
        if not name.startswith("__"):  # such as __metadata__
            fields.append(_entry(name, tensor if isinstance(tensor, dict) else {}))
    # The format allows neither gaps nor overlaps: sorted by place, each begins where one ends.
    fields.sort(key=lambda field: field[:2])
    tensors: dict[str, TensorInfo] = {}
    wrong: list[str] = []
    previous_end = 0
    for begin, end, name, dtype, shape in fields:
        if begin != previous_end or end - begin != _SIZES[dtype] * math.prod(shape):
            wrong.append(name)
        tensors[name] = TensorInfo(shape, dtype, file)
        previous_end = end
    return tensors, previous_end, wrong


def _entry(name: str, tensor: dict[str, Any]) -> tuple[int, int, str, str, tuple[int, ...]]:
    """Begin, end, name, dtype and shape of a tensor of a header."""
    values: list[Any] = [tensor.get(field) for field in ("dtype", "shape", "data_offsets")]
    dtype, shape, place = values
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise ValueError(f"{name!r} has dtype {repr(dtype)[:60]}, not one of {', '.join(_SIZES)}")
    is_pair = isinstance(place, list) and len(place) == 2
    numbers = [*place, *shape] if is_pair and isinstance(shape, list) else [None]
    # A product of sizes below zero, or with a fraction, may well be the right number.
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in numbers):
        raise ValueError(
            f"{name!r} has shape {str(shape)[:60]} at {str(place)[:60]}, not whole numbers of 0 or "
            "more"
        )
    return place[0], place[1], name, dtype, tuple(shape)


def _index(file: Path) -> tuple[dict[str, set[str]], int | None]:
    """The names that an index promises in each file, and the bytes that it promises in all."""
    data = strict_json.load_object(file, most=_MOST)
    listing = data.get("weight_map")
    if not isinstance(listing, dict) or not listing:
        raise ValueError(f"{INDEX} has no weight_map")
    files: dict[str, set[str]] = {}
    for name, shard in listing.items():
        # A path may not lead out of the folder, whoever wrote the index.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(
                f"{INDEX}: {name} is in {shard!r}, which is not the name of a file in the folder"
            )
        files.setdefault(shard, set()).add(name)
    metadata = data.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return dict(sorted(files.items())), total


def _mismatch(
    file: str, listed: set[str], header: dict[str, TensorInfo], before: dict[str, TensorInfo]
) -> str:
    """How a shard differs from what the index lists; ``before`` are tensors of shards before it."""
    lacks = sorted(listed - header.keys())
    more = sorted(header.keys() - listed)
    places = [f"{name} (in {before[name].file})" if name in before else name for name in lacks]
    return (
        f"{file} does not hold what {INDEX} lists: lacks {places[:5]}, has {more[:5]} more "
        f"({len(lacks)} and {len(more)}); take the index and all shards from one download"
    )
