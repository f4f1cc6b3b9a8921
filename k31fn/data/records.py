"""Records of text and images, in units of work that can be read apart: parts of files of this
machine.

- text files, each one record, are put together into units of about ``UNIT_BYTES``;
- a ``.jsonl`` file is cut at line ends into units of about ``UNIT_BYTES``;
- a ``.parquet`` file is cut into its row groups;
- a folder written by ``Dataset.save_to_disk`` of HF ``datasets`` is cut into its Arrow files.

A record's images are in one field: one image or a list of them, each the bytes of a file, an object
with ``bytes`` or ``path`` as HF ``datasets`` stores them, a ``data:`` URL, or a path below the
folder of the record's file.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from k31fn.data import sources
from k31fn.data.images import ImageError

__all__ = ["Record", "Unit", "position", "read_unit", "units"]

# Of text; seconds of work, so that many cores end together and little is lost.
UNIT_BYTES = 64 * 2**20


class Unit(NamedTuple):
    """A part of a file, or some text files.

    Attributes:
        kind: ``text``, ``jsonl``, ``parquet`` or ``arrow``.
        path: of the file; of the folder that the text files are in.
        name: of the file inside the source; of the first text file.
        start: first byte (``jsonl``), row group (``parquet``) or 0.
        stop: one past the last; the bytes of text files.
        files: names of the text files.
    """

    kind: str
    path: str
    name: str
    start: int = 0
    stop: int = 0
    files: tuple[str, ...] = ()


class Record(NamedTuple):
    """A document.

    Attributes:
        name: of the record.
        text: its text; of a conversation its messages as JSON.
        images: of each the bytes of its file, or why there are none.
        messages: of a conversation, not looked at.
    """

    name: str
    text: bytes
    images: tuple[bytes | ImageError, ...]
    messages: Any = ()


def units(path: str | Path, suffixes: Sequence[str]) -> list[Unit]:
    """The units of a path, in the order of names.

    Raises:
        ValueError: there is no such path, or nothing in it that can be read.
        ImportError: pyarrow is needed and not installed.
    """
    root = Path(path)
    if not root.exists():
        raise ValueError(f"source {str(path)!r} does not exist; give a file or a folder")
    if (root / "state.json").exists() and (root / "dataset_info.json").exists():
        return [Unit("arrow", str(root / name), name) for name in sources.arrow_files(root)]
    parent = root.parent if root.is_file() else root
    names = [root.name] if root.is_file() else sources.file_names(root, suffixes)
    work: list[Unit] = []
    for name in names:
        if Path(name).suffix in (".jsonl", ".parquet"):
            work += _of_file(parent / name, name)
        else:
            _add_text(work, parent, name)
    if not work:
        raise ValueError(f"source {str(path)!r} has no file with a suffix of {list(suffixes)}")
    return work


def read_unit(unit: Unit, *, text: str, images: str, chat: str = "") -> Iterator[Record]:
    """The records of a unit; ``text`` and ``images`` name their fields, ``images`` "" for none.

    With ``chat``, the name of the field that holds messages, records are conversations and have no
    text.

    Raises:
        ValueError: a record cannot be read; names file and place.
    """
    path = Path(unit.path)
    if unit.kind == "text":
        if chat:
            raise ValueError(
                f"{unit.name} is a text file; conversations are records of .jsonl or .parquet files"
            )
        for name in unit.files:
            data = (path / name).read_bytes()
            if data:
                yield Record(name, data, ())
        return
    main_field = chat or text
    fields = [main_field, images] if images else [main_field]
    read_rows = {"jsonl": _lines, "parquet": _row_groups, "arrow": _arrow}[unit.kind]
    for place, row in read_rows(unit, fields):
        where = f"{unit.name}{place}"
        if main_field not in row:
            raise ValueError(
                f"{position(unit, place)}: no field {main_field!r}; it has {sorted(row)}"
            )
        # Messages as JSON, too: the hash that chooses the split is of text.
        messages = row[chat] if chat else ()
        data = _as_json(messages) if chat else sources.text_bytes(where, text, row[text])
        pictures = tuple(_images(where, images, row.get(images), path.parent)) if images else ()
        if data or pictures:
            yield Record(where, data, pictures, messages)


def _as_json(messages: Any) -> bytes:
    # Sorted and with `default`: records of Parquet files hold times and other values.
    return json.dumps(messages, sort_keys=True, default=str).encode()


def position(unit: Unit, place: str) -> str:
    """The place of a record, for a person: file and line of ``@byte`` in a ``.jsonl`` file, else
    file and row.
    """
    if not place.startswith("@"):
        return f"{unit.path}{place}"
    with open(unit.path, "rb") as file:
        # Counted only for an error: a unit starts anywhere in its file.
        line = file.read(int(place[1:])).count(b"\n") + 1
    return f"{unit.path}:{line}"


def _add_text(work: list[Unit], root: Path, name: str) -> None:
    """Puts a text file into the last unit, or a new one if that is full or of another kind."""
    size = (root / name).stat().st_size
    last = work[-1] if work else None
    if last is not None and last.kind == "text" and last.stop + size <= UNIT_BYTES:
        work[-1] = last._replace(stop=last.stop + size, files=(*last.files, name))
    else:
        work.append(Unit("text", str(root), name, 0, size, (name,)))


def _of_file(path: Path, name: str) -> list[Unit]:
    if path.suffix == ".jsonl":
        # Cut without being read: the reader of a unit finds the line ends.
        size = path.stat().st_size
        parts = []
        for start in range(0, size, UNIT_BYTES):
            parts.append(Unit("jsonl", str(path), name, start, min(start + UNIT_BYTES, size)))
        return parts
    sources.pyarrow(path)
    # optional: the extra `data`
    import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]

    with pq.ParquetFile(path) as file:
        return [Unit("parquet", str(path), name, i, i + 1) for i in range(file.num_row_groups)]


Rows = Iterator[tuple[str, dict[str, Any]]]


def _lines(unit: Unit, _: list[str]) -> Rows:
    """The lines that start in the unit's bytes; one that reaches beyond them is this unit's,
    whole.
    """
    with open(unit.path, "rb") as file:
        start = unit.start
        if start:
            # The rest of the line that holds the byte before: it is of the unit before, or empty.
            file.seek(start - 1)
            start += len(file.readline()) - 1
        while start < unit.stop:
            line = file.readline()
            if not line:
                break
            place = f"@{start}"
            start += len(line)
            if line.strip():
                yield place, _object(unit, place, line)


def _object(unit: Unit, place: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except ValueError as e:  # of UTF-8 or of JSON
        raise ValueError(f"{position(unit, place)}: the line is not UTF-8 JSON: {e}") from e
    if not isinstance(row, dict):
        raise ValueError(
            f"{position(unit, place)}: the line holds a {type(row).__name__}, not an object"
        )
    return row


def _row_groups(unit: Unit, columns: list[str]) -> Rows:
    # optional: the extra `data`
    import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]

    with pq.ParquetFile(unit.path) as file:
        known = set(columns).intersection(file.schema_arrow.names)
        row = 0
        # 256 at a time: a row group may hold gigabytes of images.
        batches = file.iter_batches(
            batch_size=256, row_groups=list(range(unit.start, unit.stop)), columns=sorted(known)
        )
        for batch in batches:
            for values in batch.to_pylist():
                yield f":{unit.start}:{row}", values
                row += 1


def _arrow(unit: Unit, columns: list[str]) -> Rows:
    pa = sources.pyarrow(Path(unit.path))
    with pa.memory_map(unit.path) as source, pa.ipc.open_stream(source) as reader:
        known = set(columns).intersection(reader.schema.names)
        row = 0
        for batch in reader:
            for values in batch.select(sorted(known)).to_pylist():
                yield f":{row}", values
                row += 1


def _images(where: str, field: str, value: Any, folder: Path) -> Iterator[bytes | ImageError]:
    if value is None:
        return
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):  # as HF datasets keep an image: bytes, or a path if none
            item = item.get("bytes") or item.get("path")
        if isinstance(item, bytes):
            yield item
        elif isinstance(item, str) and item.startswith("data:"):
            yield _data_url(where, item)
        elif isinstance(item, str):
            yield _file(where, folder, item)
        else:
            raise ValueError(
                f"{where}: field {field!r} holds a {type(item).__name__}; an image is a path or "
                "bytes"
            )


def _data_url(where: str, url: str) -> bytes | ImageError:
    head, _, body = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("it is not base64")
        return base64.b64decode(body, validate=True)
    except (ValueError, binascii.Error) as e:
        return ImageError(where, "corrupt", f"the data URL cannot be read: {e}")


def _file(where: str, folder: Path, name: str) -> bytes | ImageError:
    # Resolved, so that neither ".." nor a link leads out: records come from anywhere.
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(
            f"{where}: image {name!r} is outside {folder}; only files below the record's are read"
        )
    try:
        return path.read_bytes()
    except OSError as e:
        return ImageError(where, "missing", f"the file {name!r} cannot be read: {e.strerror}")
