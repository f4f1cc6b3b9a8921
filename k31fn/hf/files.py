"""safetensors files: a reader that gives each tensor when it is asked for, a writer that holds one at a time.

Format: https://huggingface.co/docs/safetensors, section "Format". Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from k31fn.typing import Tensor

__all__ = [
    "DTYPES",
    "INDEX",
    "SINGLE",
    "Info",
    "Output",
    "Source",
    "open_source",
    "read_json",
    "write_json",
    "write_tensors",
]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Info(NamedTuple):
    """What a file says of a tensor. ``dtype`` is the format's code, such as ``BF16``."""

    shape: tuple[int, ...]
    dtype: str


class Source(NamedTuple):
    """The tensors of a checkpoint by name, and how to read one."""

    tensors: dict[str, Info]
    read: Callable[[str], Tensor]


class Output(NamedTuple):
    """A tensor to write: what is known beforehand, and how to get it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


@contextlib.contextmanager
def open_source(directory: Path) -> Iterator[Source]:
    """The checkpoint in ``directory``: one ``model.safetensors``, or shards with an index.

    Raises:
        ValueError: there is no such checkpoint, both kinds are there, or the index does not fit the shards.
    """
    with contextlib.ExitStack() as stack:
        tensors: dict[str, Info] = {}
        handles: dict[str, Any] = {}
        for file, listed in _files(directory).items():
            try:
                handle = stack.enter_context(safe_open(str(directory / file), framework="pt"))
            except SafetensorError as e:
                raise ValueError(f"{directory / file} is not a complete safetensors file: {e}") from e
            names = set(handle.keys())
            if listed is not None and names != listed:
                raise ValueError(
                    f"{directory / file} does not hold what {INDEX} lists: lacks {sorted(listed - names)[:5]}, has "
                    f"{sorted(names - listed)[:5]} more; take the index and all shards from one download"
                )
            for name in names:
                part = handle.get_slice(name)
                tensors[name] = Info(tuple(part.get_shape()), part.get_dtype())
                handles[name] = handle
        yield Source(tensors, lambda name: handles[name].get_tensor(name))


def _files(directory: Path) -> dict[str, set[str] | None]:
    """Files of the checkpoint, with the names that an index promises in each."""
    single, index = (directory / SINGLE).is_file(), (directory / INDEX).is_file()
    if single and index:
        raise ValueError(f"{directory} holds both {SINGLE} and {INDEX}: remove the one that is out of date")
    if single:
        return {SINGLE: None}
    if not index:
        found = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else "no such directory"
        raise ValueError(f"{directory} holds neither {SINGLE} nor {INDEX}, but: {found}")
    listing = read_json(directory / INDEX).get("weight_map")
    if not isinstance(listing, dict):
        raise ValueError(f"{directory / INDEX} has no weight_map")
    files: dict[str, set[str] | None] = {}
    for name, file in listing.items():
        if not isinstance(file, str) or Path(file).name != file or not (directory / file).is_file():
            raise ValueError(f"{directory / INDEX}: {name} is in {file!r}, which is not a file of {directory}")
        listed = files.setdefault(file, set())
        assert listed is not None
        listed.add(name)
    return files


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


def write_json(file: Path, data: dict[str, Any]) -> None:
    """Writes ``data`` to a temporary file and renames it to ``file``."""
    with _replacing(file) as out:
        out.write((json.dumps(data, indent=2) + "\n").encode())


def write_tensors(file: Path, outputs: dict[str, Output]) -> None:
    """Writes the tensors to a temporary file and renames it to ``file``: a reader sees all of it, or the old one.

    One tensor is made and held at a time. Widest dtypes come first, so that each tensor is aligned, then names in
    order: the bytes that the safetensors library writes.

    Raises:
        ValueError: a dtype that a checkpoint in K3's format does not have.
    """
    if odd := sorted({str(o.dtype) for o in outputs.values() if o.dtype not in _CODES}):
        raise ValueError(f"{file}: cannot store {odd}; use one of {[str(d) for d in _CODES]}")
    order = sorted(outputs, key=lambda name: (-outputs[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        shape, dtype, _ = outputs[name]
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _replacing(file) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            tensor = outputs[name].make().detach().cpu().contiguous()
            assert (tuple(tensor.shape), tensor.dtype) == outputs[name][:2], f"{name} is not as announced"
            out.write(tensor.view(torch.uint8).numpy().data)


@contextlib.contextmanager
def _replacing(file: Path) -> Iterator[Any]:
    """A new file that takes the place of ``file`` once it is complete and on disk; on failure nothing is left of it."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
