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
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from k31fn import regular_files, strict_json
from k31fn.data import sources
from k31fn.data.images import ImageError

__all__ = ["Record", "Unit", "position", "read_unit", "units"]

# Of text; seconds of work, so that many cores end together and little is lost.
UNIT_BYTES = 64 * 2**20
_PART = 1 << 20  # bytes in memory while lines are counted
_MOST_TEXT = 16 << 30  # bytes of a text file, which is one record
_MOST_IMAGE = 1 << 30  # bytes of an image's file: more than 64 million pixels need


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
        unread: names of fields beside the messages that say something of the conversation and have
            no place in it.
        fault: why there is no record; None: it is one.
        files: paths of its images, of those that it names.
    """

    name: str
    text: bytes
    images: tuple[bytes | ImageError, ...]
    messages: Any = ()
    unread: tuple[str, ...] = ()
    fault: ValueError | None = None
    files: tuple[str, ...] = ()


def units(
    path: str | Path, suffixes: Sequence[str], others: Counter[str] | None = None
) -> list[Unit]:
    """The units of a path, in the order of names; ``others`` gets how many files of a folder are
    not read, by suffix.

    Raises:
        ValueError: there is no such path, or nothing in it that can be read.
        ImportError: pyarrow is needed and not installed.
    """
    root = regular_files.path(path, "source")
    if not root.exists():
        raise ValueError(f"source {str(path)!r} does not exist; give a file or a folder")
    if (root / "state.json").exists() and (root / "dataset_info.json").exists():
        return [Unit("arrow", str(root / name), name) for name in sources.arrow_files(root)]
    known = (".jsonl", ".parquet", ".txt", *map(str.lower, suffixes))
    # Else the bytes of an archive or a table would be taken for text.
    if not root.is_dir() and root.suffix.lower() not in known:
        raise ValueError(
            f"source {str(path)!r}: files {root.suffix or 'without a suffix'} are not read; if it "
            f"is text, give it one of {sorted(set(known))}"
        )
    parent = root if root.is_dir() else root.parent
    names = sources.file_names(root, suffixes, others=others) if root.is_dir() else [root.name]
    work: list[Unit] = []
    for name in names:
        if Path(name).suffix.lower() in (".jsonl", ".parquet"):
            work += _of_file(parent / name, name)
        else:
            _add_text(work, parent, name)
    if names and not work:
        raise ValueError(f"source {str(path)!r} holds no record: {names[0]!r} is empty")
    if not work:
        raise ValueError(f"source {str(path)!r} has no file with a suffix of {list(suffixes)}")
    return work


def read_unit(unit: Unit, *, text: str, images: str, chat: str = "") -> Iterator[Record]:
    """The records of a unit; ``text`` and ``images`` name their fields, ``images`` "" for none.

    With ``chat``, the name of the field that holds messages, records are conversations and have no
    text.

    A record that cannot be read is given with its fault, which names file and place, so that a
    caller may leave it out.

    Raises:
        ValueError: the unit cannot be read.
    """
    path = Path(unit.path)
    if unit.kind == "text":
        if chat:
            raise ValueError(
                f"{unit.name} is a text file; conversations are records of .jsonl or .parquet files"
            )
        for name in unit.files:
            data = regular_files.read(path / name, most=_MOST_TEXT)
            if data:
                yield Record(name, data, ())
        return
    fields = [name for name in (chat or text, images, *(_UNREAD if chat else ())) if name]
    read_rows = {"jsonl": _lines, "parquet": _row_groups, "arrow": _arrow}[unit.kind]
    for place, row in read_rows(unit, fields):
        where = f"{unit.name}{place}"
        try:
            record = _record(where, row, path.parent, text, images, chat)
        except ValueError as e:
            # Its line is looked for only now: the lines before it have to be counted.
            yield Record(where, b"", (), fault=ValueError(f"{position(unit, place)}: {e}"))
            continue
        if record.text or record.images:
            yield record


def _record(
    where: str, row: dict[str, Any] | bytes, folder: Path, text: str, images: str, chat: str
) -> Record:
    """The record of a row, which of a ``.jsonl`` file is the line."""
    if isinstance(row, bytes):
        row = strict_json.parse(row, "the line")
    if not isinstance(row, dict):
        raise ValueError(f"the line holds a {type(row).__name__}, not an object")
    if (chat or text) not in row:
        raise ValueError(f"no field {chat or text!r}; it has {sorted(row)}")
    files: list[str] = []
    pictures: list[bytes | ImageError] = []
    if images:
        pictures += _images(where, images, row.get(images), folder, files)
    made = Record(where, b"", tuple(pictures), files=tuple(files))
    if not chat:
        return made._replace(text=sources.text_bytes("the record", text, row[text]))
    # Messages as JSON, too: the hash that chooses the split is of text.
    messages = row[chat]
    unread = tuple(name for name in _UNREAD if row.get(name))
    return made._replace(text=_as_json(messages), messages=messages, unread=unread)


def _as_json(messages: Any) -> bytes:
    # Sorted and with `default`: records of Parquet files hold times and other values.
    return json.dumps(messages, sort_keys=True, default=str).encode()


def position(unit: Unit, place: str) -> str:
    """The place of a record, for a person: file and line of ``@byte`` in a ``.jsonl`` file, else
    file and row.
    """
    if not place.startswith("@"):
        return f"{unit.path}{place}"
    with regular_files.open_file(unit.path) as file:
        # Counted only for an error: a unit starts anywhere in its file.
        line = 1
        left = int(place[1:])
        while left and (data := file.read(min(left, _PART))):
            line += data.count(b"\n")
            left -= len(data)
    return f"{unit.path}:{line}"


def _add_text(work: list[Unit], root: Path, name: str) -> None:
    """Puts a text file into the last unit, or a new one if that is full or of another kind."""
    size = regular_files.check(root / name)
    last = work[-1] if work else None
    if last is not None and last.kind == "text" and last.stop + size <= UNIT_BYTES:
        work[-1] = last._replace(stop=last.stop + size, files=(*last.files, name))
    else:
        work.append(Unit("text", str(root), name, 0, size, (name,)))


def _of_file(path: Path, name: str) -> list[Unit]:
    if path.suffix.lower() == ".jsonl":
        # Cut without being read: the reader of a unit finds the line ends.
        size = regular_files.check(path)
        parts = []
        for start in range(0, size, UNIT_BYTES):
            parts.append(Unit("jsonl", str(path), name, start, min(start + UNIT_BYTES, size)))
        return parts
    with sources.columnar(path):
        # optional: the extra `data`
        import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]

        with pq.ParquetFile(path) as file:
            return [Unit("parquet", str(path), name, i, i + 1) for i in range(file.num_row_groups)]


# Fields beside messages, in OpenAI's format, that a conversation depends on; the format of
# :mod:`k31fn.data.chat` has no place for them.
_UNREAD = ("tools", "functions")
Rows = Iterator[tuple[str, dict[str, Any] | bytes]]


def _lines(unit: Unit, _: list[str]) -> Rows:
    """The lines that start in the unit's bytes; one that reaches beyond them is this unit's,
    whole.
    """
    with regular_files.open_file(unit.path) as file:
        start = unit.start
        if start:
            # The rest of the line that holds the byte before: it is of the unit before, or empty.
            file.seek(start - 1)
            start += len(sources.read_line(file, f"{unit.path}, byte {start}")) - 1
        while start < unit.stop:
            line = sources.read_line(file, f"{unit.path}, byte {start}")
            if not line:
                break
            place = f"@{start}"
            start += len(line)
            if line.strip():
                yield place, line


def _row_groups(unit: Unit, columns: list[str]) -> Rows:
    with sources.columnar(Path(unit.path)):
        # optional: the extra `data`
        import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]

        with pq.ParquetFile(unit.path) as file:
            known = set(columns).intersection(file.schema_arrow.names)
            row = 0
            # 256 at a time: a row group may hold gigabytes of images.
            batches = file.iter_batches(
                batch_size=256,
                row_groups=list(range(unit.start, unit.stop)),
                columns=sorted(known),
            )
            for batch in batches:
                for values in batch.to_pylist():
                    yield f":{unit.start}:{row}", values
                    row += 1


def _arrow(unit: Unit, columns: list[str]) -> Rows:
    with (
        sources.columnar(Path(unit.path)) as pa,
        pa.memory_map(unit.path) as source,
        pa.ipc.open_stream(source) as reader,
    ):
        known = set(columns).intersection(reader.schema.names)
        row = 0
        for batch in reader:
            for values in batch.select(sorted(known)).to_pylist():
                yield f":{row}", values
                row += 1


def _images(
    where: str, field: str, value: Any, folder: Path, files: list[str]
) -> Iterator[bytes | ImageError]:
    """The images of a field; the paths of those that are files are added to ``files``."""
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
            yield _file(where, folder, item, files)
        else:
            raise ValueError(
                f"field {field!r} holds a {type(item).__name__}; an image is a path or bytes"
            )


def _data_url(where: str, url: str) -> bytes | ImageError:
    head, _, body = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("it is not base64")
        return base64.b64decode(body, validate=True)
    except (ValueError, binascii.Error) as e:
        return ImageError(where, "corrupt", f"the data URL cannot be read: {e}")


def _file(where: str, folder: Path, name: str, files: list[str]) -> bytes | ImageError:
    try:
        path = regular_files.contained(folder, name)
    except ValueError as e:
        raise ValueError(f"image {e}") from e
    files.append(str(path))
    try:
        return regular_files.read(path, most=_MOST_IMAGE)
    except ValueError as e:
        return ImageError(where, "missing", f"the file {name!r} cannot be read: {e}")
