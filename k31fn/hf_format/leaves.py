"""Leaves of a model read from a folder of safetensors, and written into one: each rank its own
slices.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from k31fn import precision
from k31fn.hf_format import mxfp4
from k31fn.hf_format.file_writer import (
    FileLayout,
    TensorWriter,
    create,
    lay_out,
    open_writer,
    write_json,
)
from k31fn.hf_format.files import DTYPES, TensorSource, open_source
from k31fn.hf_format.problems import PACKED, SCALE, find_problems, is_quantised, listed
from k31fn.hf_format.rank_part import ALONE, RankPart
from k31fn.hf_format.table import Entry
from k31fn.hf_format.transforms import Tile, tile_shape
from k31fn.typing import Tensor

__all__ = [
    "SHARD_BYTES",
    "check_new",
    "pieces",
    "read_leaf",
    "read_leaves",
    "tile_of",
    "write_folder",
]

SHARD_BYTES = 16 * 2**30  # of one file: K3 has 96 files for 1.56 TB
_PARAMS = "params."


def read_leaves(
    table: list[Entry], directory: Path, *, dtype: torch.dtype | None = None, part: RankPart = ALONE
) -> list[Tensor]:
    """This rank's tile of each entry's leaf; of each tensor only its bytes are read. MXFP4 is
    decoded.

    Args:
        table: the leaves.
        directory: of the checkpoint.
        dtype: of the model; None: each weight as it is stored, MXFP4 as bfloat16.
        part: what this rank holds.

    Raises:
        ValueError: incomplete files, missing, unknown and misshaped tensors and wrong dtypes, all
            in one message; or weights that are not finite, all named.
        RuntimeError: another rank failed.
    """
    return part.stage(lambda: _read_all(table, directory, dtype, part))


def write_folder(
    table: list[Entry],
    leaves: list[Tensor],
    target: Path,
    documents: dict[str, dict[str, Any]],
    *,
    quantise: bool = False,
    shard_bytes: int = SHARD_BYTES,
    part: RankPart = ALONE,
) -> None:
    """Writes a new folder with the leaves' tensors and some JSON files: all of it, or nothing.

    The folder is made under another name beside ``target`` and renamed. Each rank writes its own
    tiles.

    Raises:
        ValueError: a leaf has another shape than its tile, the folder is not empty or cannot be
            made, or an expert's tile is no whole groups of MXFP4.
        RuntimeError: another rank failed.
    """
    layout = lay_out(_announced(table, leaves, quantise), shard_bytes)
    partial = target.with_name(f".{target.name}.partial")

    def check() -> None:
        _check_shapes(table, leaves, part)
        if quantise:
            _check_groups(table, part)

    def begin() -> None:
        check_new(target)
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
        create(partial, layout)

    def finish() -> None:
        for name, document in documents.items():
            write_json(partial / name, document)
        # An empty folder is replaced; one that got something meanwhile is not.
        os.replace(partial, target)

    # In stages, each of which ends on all ranks before the next begins: nobody writes into a folder
    # that is not there, and none is renamed that a rank still writes into.
    part.stage(check)
    try:
        part.stage(begin if part.first else _nothing)
        part.stage(lambda: _write(table, leaves, layout, partial, part, quantise))
        part.stage(finish if part.first else _nothing)
    except BaseException:
        # No rank writes any more: a failed stage raises once it has ended on all of them.
        if part.first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def check_new(target: Path) -> None:
    """Refuses a folder in which there is something, or that cannot be written.

    Raises:
        ValueError: names it.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is not empty; use another directory")
    nearest = next(outer for outer in (target, *target.absolute().parents) if outer.exists())
    if not os.access(nearest, os.W_OK):
        raise ValueError(f"{target}: {nearest} cannot be written; use another directory")


def _nothing() -> None:
    """The stage of a rank that only waits for the first one."""


def tile_of(entry: Entry, part: RankPart) -> Tile:
    """What the rank holds of a leaf; the balance is whole everywhere."""
    if not entry.path.startswith(_PARAMS):
        return ALONE.tile(entry.path, entry.spec)
    # Slices may have no ends where a dimension is whole.
    given = part.tile(entry.path.removeprefix(_PARAMS), entry.spec)
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(given, entry.spec.shape, strict=True))


def pieces(entry: Entry, leaf: Tensor, tile: Tile) -> Iterator[tuple[str, Tile, Tensor]]:
    """The tensors that a rank's part of a leaf touches.

    Of each its name, the tile of what it stands for, and its value, a view of ``leaf``.
    """
    if entry.stacked:
        for name, value in zip(entry.names[tile[0]], leaf.unbind(0), strict=True):
            yield name, tile[1:], value
    else:
        yield entry.names[0], tile, leaf


# ------------------------------------------------------------------------------------------ reading
def _read_all(
    table: list[Entry], directory: Path, dtype: torch.dtype | None, part: RankPart
) -> list[Tensor]:
    with open_source(directory) as source:
        problems = find_problems(table, source.tensors)
        if problems:
            raise ValueError(f"checkpoint {directory} does not fit the config:\n{problems}")
        broken: list[str] = []
        values = [read_leaf(entry, source, dtype, tile_of(entry, part), broken) for entry in table]
    if broken:
        lines = "\n".join(listed("with weights that are not finite", broken))
        raise ValueError(f"checkpoint {directory} cannot be used:\n{lines}")
    return values


def read_leaf(
    entry: Entry, source: TensorSource, dtype: torch.dtype | None, tile: Tile, broken: list[str]
) -> Tensor:
    """A tile of an entry's leaf; names of tensors with values that are not finite are added to
    ``broken``.
    """
    if dtype is None:
        dtype = functools.reduce(torch.promote_types, _stored_dtypes(entry, source))
    dtype = precision.storage_dtype(entry.spec.dtype, dtype)
    # Filled tensor by tensor: stacking experts that were read would hold them twice.
    value = torch.empty(tile_shape(tile), dtype=dtype)
    for name, inner, piece in pieces(entry, value, tile):
        place = entry.stored_tile(inner)
        if is_quantised(name, source.tensors):
            raw = _read_quantised(source, name, place, dtype)
        elif entry.sliced_shape == entry.stored_shape:
            raw = source.read(name, place)
        else:
            # The kernel of a convolution: its last dimensions are one of ours, so whole rows are
            # read and cut afterwards.
            raw = source.read(name, place[:1]).flatten(1)[:, place[1]]
        # Asked here and not of the leaf: the name in the message is the tensor's.
        if not bool(torch.isfinite(raw).all()):
            broken.append(name)
        piece.copy_(entry.row.transform.load(raw, inner))
    return value


def _stored_dtypes(entry: Entry, source: TensorSource) -> set[torch.dtype]:
    """Dtypes of an entry's tensors; of MXFP4 the one that it is decoded to."""
    dtypes: set[torch.dtype] = set()
    for name in entry.names:
        if is_quantised(name, source.tensors):
            dtypes.add(torch.bfloat16)
        else:
            dtypes.add(DTYPES[source.tensors[name].dtype])
    return dtypes


def _read_quantised(source: TensorSource, name: str, place: Tile, dtype: torch.dtype) -> Tensor:
    """A tile of an MXFP4 weight: its columns are read from the start of their first group to the
    end of their last.
    """
    rows, columns = place
    first = columns.start // mxfp4.GROUP
    last = -(-columns.stop // mxfp4.GROUP)
    half = mxfp4.GROUP // 2  # bytes of a group: two codes in each
    packed = source.read(name + PACKED, (rows, slice(first * half, last * half)))
    scale = source.read(name + SCALE, (rows, slice(first, last)))
    try:
        values = mxfp4.decode(packed, scale, dtype)
    except ValueError as e:
        raise ValueError(f"{name}: {e}") from e
    start = first * mxfp4.GROUP
    return values[:, columns.start - start : columns.stop - start]


# ------------------------------------------------------------------------------------------ writing
def _check_shapes(table: list[Entry], leaves: list[Tensor], part: RankPart) -> None:
    for entry, leaf in zip(table, leaves, strict=True):
        shape = tile_shape(tile_of(entry, part))
        if tuple(leaf.shape) != shape:
            raise ValueError(f"{entry.path} has shape {list(leaf.shape)}, cfg wants {list(shape)}")


def _announced(
    table: list[Entry], leaves: list[Tensor], quantise: bool
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of the checkpoint."""
    announced: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for entry, leaf in zip(table, leaves, strict=True):
        shape = entry.stored_shape
        for name in entry.names:
            if quantise and entry.quantisable:
                rows, columns = shape
                announced[name + PACKED] = (rows, columns // 2), torch.uint8
                announced[name + SCALE] = (rows, columns // mxfp4.GROUP), torch.uint8
            else:
                announced[name] = shape, leaf.dtype
    return announced


def _check_groups(table: list[Entry], part: RankPart) -> None:
    for entry in table:
        if not entry.quantisable:
            continue
        columns = entry.stored_tile(tile_of(entry, part)[1:])[1]
        whole = entry.stored_shape[1]
        # A group has one scale, which two ranks would each choose for their half.
        if columns.start % mxfp4.GROUP or columns.stop % mxfp4.GROUP or whole % mxfp4.GROUP:
            raise ValueError(
                f"{entry.path}: columns {columns.start} to {columns.stop} of {whole} are no "
                f"whole groups of {mxfp4.GROUP}, as MXFP4 needs; export without quantising, or "
                "from a mesh that splits it otherwise"
            )


def _write(
    table: list[Entry],
    leaves: list[Tensor],
    layout: FileLayout,
    folder: Path,
    part: RankPart,
    quantise: bool,
) -> None:
    with open_writer(folder, layout) as writer:
        for entry, leaf in zip(table, leaves, strict=True):
            if not part.writes(entry.path.removeprefix(_PARAMS)):
                continue
            for name, inner, value in pieces(entry, leaf, tile_of(entry, part)):
                stored = entry.row.transform.export(value, inner, entry.shape)
                place = entry.stored_tile(inner)
                if quantise and entry.quantisable:
                    _write_quantised(writer, name, entry.stored_shape, place, stored)
                else:
                    writer.write(name, entry.sliced_shape, place, stored)


def _write_quantised(
    writer: TensorWriter, name: str, shape: tuple[int, ...], place: Tile, stored: Tensor
) -> None:
    height, width = shape
    rows, columns = place
    # Of bfloat16 values, whatever the leaf has: the bits that the release was made from.
    packed, scale = mxfp4.encode(stored.to(torch.bfloat16))
    for suffix, values, per in ((PACKED, packed, 2), (SCALE, scale, mxfp4.GROUP)):
        tile = rows, slice(columns.start // per, columns.stop // per)
        writer.write(name + suffix, (height, width // per), tile, values)
