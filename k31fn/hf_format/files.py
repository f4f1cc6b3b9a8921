"""Folders of safetensors files: what their headers say, a reader of slices, JSON.

Format: https://huggingface.co/docs/safetensors, section "Format": eight bytes with the length of a
JSON header, the header, the tensors. Headers are checked whole before a byte of a tensor is read.
Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

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
    "read_header",
    "read_json",
    "survey",
]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_SIZES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
}
_SIZES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}
_MOST = 100_000_000  # bytes of a header, as in the safetensors library


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
        raise ValueError(
            f"checkpoint {directory} cannot be read:\n" + "\n".join(f"  {p}" for p in problems)
        )
    with contextlib.ExitStack() as stack:
        handles: dict[str, Any] = {}

        def read(name: str, tile: Tile) -> Tensor:
            file = tensors[name].file
            if file not in handles:
                handles[file] = stack.enter_context(
                    safe_open(str(directory / file), framework="pt")
                )
            return handles[file].get_slice(name)[tile]

        yield TensorSource(tensors, read)


def survey(directory: Path) -> tuple[dict[str, TensorInfo], list[str]]:
    """The tensors of a checkpoint, from the headers alone, and what is wrong with its files."""
    single, index = (directory / SINGLE).is_file(), (directory / INDEX).is_file()
    if single and index:
        return {}, [f"it holds both {SINGLE} and {INDEX}: remove the one that is out of date"]
    if not single and not index:
        found = (
            sorted(p.name for p in directory.iterdir())
            if directory.is_dir()
            else "no such directory"
        )
        return {}, [f"it holds neither {SINGLE} nor {INDEX}, but: {found}"]
    try:
        listed, total = ({SINGLE: None}, None) if single else _index(directory / INDEX)
    except ValueError as e:
        return {}, [str(e)]
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for file, names in listed.items():
        try:
            held = read_header(directory / file)
        except ValueError as e:
            problems.append(str(e))
            continue
        if names is not None and held.keys() != names:
            problems.append(_lie(file, names, held, tensors))
        tensors |= held
    size = sum(_SIZES[t.dtype] * math.prod(t.shape) for t in tensors.values())
    if not problems and total not in (None, size):
        problems.append(f"{INDEX} says total_size={total}, the shards hold {size} bytes of tensors")
    return tensors, problems


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file. Reads its header only, and checks that the file is as long
    as it says.

    Raises:
        ValueError: there is no such file, or it is not a complete safetensors file.
    """
    if not file.is_file():
        raise ValueError(f"{file.name} does not exist")
    size = file.stat().st_size
    with open(file, "rb") as data:
        length = int.from_bytes(data.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST):
            raise ValueError(
                f"{file.name} is not a complete safetensors file: {size} bytes end inside its "
                "header"
            )
        text = data.read(length)
    try:
        header = json.loads(text)
        fields = [
            (n, t["dtype"], tuple(t["shape"]), *t["data_offsets"])
            for n, t in header.items()
            if n[:2] != "__"
        ]
        fields.sort(key=lambda field: field[3:])
        ends = [0, *(end for *_, end in fields)]
        wrong = [
            n
            for (n, dtype, shape, begin, end), before in zip(fields, ends, strict=False)
            if begin != before or end - begin != _SIZES[dtype] * math.prod(shape)
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(
            f"{file.name} is not a complete safetensors file: its header is not valid: {e!r}"
        ) from e
    if wrong:
        raise ValueError(
            f"{file.name}: the header gives {wrong[0]} and {len(wrong) - 1} others a wrong place "
            "or length"
        )
    if ends[-1] != size - 8 - length:
        raise ValueError(
            f"{file.name} is not a complete safetensors file: its header promises {ends[-1]} "
            "bytes of tensors, it has "
            f"{size - 8 - length}"
        )
    return {name: TensorInfo(shape, dtype, file.name) for name, dtype, shape, *_ in fields}


def _index(file: Path) -> tuple[dict[str, set[str]], int | None]:
    """The names that an index promises in each file, and the bytes that it promises in all."""
    data = read_json(file)
    listing = data.get("weight_map")
    if not isinstance(listing, dict) or not listing:
        raise ValueError(f"{INDEX} has no weight_map")
    files: dict[str, set[str]] = {}
    for name, shard in listing.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(
                f"{INDEX}: {name} is in {shard!r}, which is not the name of a file in the folder"
            )
        files.setdefault(shard, set()).add(name)
    metadata = data.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return dict(sorted(files.items())), total


def _lie(
    file: str, listed: set[str], held: dict[str, TensorInfo], before: dict[str, TensorInfo]
) -> str:
    lacks, more = sorted(listed - held.keys()), sorted(held.keys() - listed)
    elsewhere = [f"{n} (in {before[n].file})" if n in before else n for n in lacks]
    return (
        f"{file} does not hold what {INDEX} lists: lacks {elsewhere[:5]}, has {more[:5]} more "
        f"({len(lacks)} and {len(more)}); take the index and all shards from one download"
    )


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: there is no such file, or it is not a JSON object.
    """
    if not file.is_file():
        raise ValueError(f"{file} does not exist")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as e:
        raise ValueError(f"{file} is not JSON: {e}") from e
    if not isinstance(data, dict):
        raise ValueError(f"{file} must hold a JSON object, it holds a {type(data).__name__}")
    return data
