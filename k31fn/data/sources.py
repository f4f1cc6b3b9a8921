"""Sources of documents: files on this machine, as bytes. Nothing is downloaded, executed or
unpickled.

What a ``path`` may be:

- ``stdlib``: the Python standard library's own source files (:func:`stdlib`);
- a folder: each file whose suffix is listed, in capitals or not; hidden files and folders are left
  out, and what has such a name and is no regular file is refused (:mod:`k31fn.regular_files`);
- a text file: cut at line ends into sections, so that one file can be split;
- ``.jsonl`` and ``.parquet`` files, alone or in a folder: a document per record;
- a folder written by ``Dataset.save_to_disk`` of HF ``datasets``: its Arrow files are read
  directly.

The order is that of the sorted relative names. Empty documents are left out.
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from k31fn import regular_files, strict_json

__all__ = [
    "Document",
    "arrow_files",
    "columnar",
    "file_names",
    "pyarrow",
    "read",
    "read_line",
    "stdlib",
    "text_bytes",
]

# bytes; long against a training row, short enough that 1 MB of text makes 60 documents to split
SECTION = 16384

_MOST = 16 << 30  # bytes of a text file, all of which are in memory
_MOST_LINE = 256 << 20  # bytes of a record, which may hold images

# Left out of the standard library: tables written by programs, which are no prose to learn from;
# what describes this machine; tests, which some systems package apart, so the corpus would depend
# on the packaging (and 17 MB of them would outweigh 9 MB of library); what is not the standard
# library.
_TABLES = {"encodings", "pydoc_data", "html/entities.py", "stringprep.py"}
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_THIS_MACHINE = ("_sysconfigdata", "config-", "sitecustomize.py", "usercustomize.py")


class Document(NamedTuple):
    """A document and its name, relative to the path it was read from; names are unique within one
    path.
    """

    name: str
    data: bytes


def read(path: str | Path, *, suffixes: Sequence[str], field: str) -> Iterator[Document]:
    """The documents of a path, in the order of their names.

    Args:
        path: ``stdlib``, or a file or folder of this machine (see the module).
        suffixes: which files of a folder are read, such as ``.txt``.
        field: the field (column) of a record that holds its text.

    Raises:
        ValueError: the path or a file of it is missing, unreadable, not understood, or a record
            lacks the field; the message names file and line.
        ImportError: pyarrow is needed and not installed.
    """
    if str(path) == "stdlib":
        yield from stdlib()
        return
    root = regular_files.path(path, "data.path")
    if not root.exists():
        raise ValueError(
            f"data.path={str(path)!r} does not exist; give a file, a folder or 'stdlib'"
        )
    if not root.is_dir():
        yield from _file(root, root.name, suffixes, field, alone=True)
    elif (root / "dataset_dict.json").exists():
        splits = sorted(p.name for p in root.iterdir() if p.is_dir())
        raise ValueError(
            f"data.path={str(path)!r} holds the splits {splits}; give the folder of one of them"
        )
    elif (root / "state.json").exists() and (root / "dataset_info.json").exists():
        yield from _saved_dataset(root, field)
    else:
        for name in file_names(root, suffixes):
            yield from _file(root / name, name, suffixes, field, alone=False)


def stdlib() -> Iterator[Document]:
    """The ``.py`` files of the running Python's standard library: about 9 MB of code and prose in
    600 files.

    Without generated tables, tests and machine-dependent files. It differs between Python versions.

    Raises:
        ValueError: this Python has no source files of its standard library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = file_names(root, [".py"], _not_in_stdlib_corpus) if root.is_dir() else []
    if not names:
        raise ValueError(
            f"data.path='stdlib': no source files in {root}; give a file or folder of text"
        )
    for name in names:
        yield from _document(name, regular_files.read(root / name, most=_MOST))


def _not_in_stdlib_corpus(name: str) -> bool:
    parts = PurePosixPath(name).parts
    if _NOT_LIBRARY.intersection(parts):
        return True
    if any(part.startswith(_THIS_MACHINE) for part in parts):
        return True
    return name in _TABLES or parts[0] in _TABLES


def _is_hidden(name: str) -> bool:
    """Whether a file, or a folder that it is in, has a name that begins with a dot."""
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


def file_names(
    root: Path,
    suffixes: Sequence[str],
    leave_out: Callable[[str], bool] = _is_hidden,
    others: Counter[str] | None = None,
) -> list[str]:
    """Relative names of the files with one of these suffixes, in capitals or not, sorted; links to
    folders are not followed.

    Args:
        root: the folder.
        suffixes: such as ``.txt``.
        leave_out: names of files and folders that are passed over.
        others: gets how many of the other files have which suffix.

    Raises:
        ValueError: a folder cannot be read, or what has such a name is no regular file.
    """

    def refuse(e: OSError) -> None:
        raise ValueError(f"cannot read folder {e.filename!r}: {e.strerror}") from e

    names: list[str] = []
    endings = tuple(suffix.lower() for suffix in suffixes)
    for folder, folders, files in os.walk(root, onerror=refuse):
        relative = Path(folder).relative_to(root)
        # In place: os.walk goes on into what the list then holds.
        folders[:] = [f for f in folders if not leave_out((relative / f).as_posix())]
        for file in files:
            name = (relative / file).as_posix()
            if leave_out(name):
                continue
            if file.lower().endswith(endings):
                _check(Path(folder, file))
                names.append(name)
            elif others is not None:
                others[PurePosixPath(file).suffix.lower() or "no suffix"] += 1
    # The file system's order differs between machines.
    return sorted(names)


def _file(
    path: Path, name: str, suffixes: Sequence[str], field: str, *, alone: bool
) -> Iterator[Document]:
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        yield from _jsonl(path, name, field)
    elif suffix == ".parquet":
        yield from _parquet(path, name, field)
    elif not alone:
        yield from _document(name, regular_files.read(path, most=_MOST))
    elif suffix in (".txt", *map(str.lower, suffixes)):
        # A file that is all of the data: else it could not be split, nor its documents mixed.
        for index, section in enumerate(_sections(regular_files.read(path, most=_MOST))):
            yield from _document(f"{name}#{index}", section)
    else:
        raise ValueError(
            f"data.path={str(path)!r}: files {path.suffix or 'without a suffix'} are not read; "
            f"if it is text, add {path.suffix!r} to data.suffixes={list(suffixes)}"
        )


def _document(name: str, data: bytes) -> Iterator[Document]:
    """The document, or nothing if it is empty: an epoch would have an end token of nothing."""
    if data:
        yield Document(name, data)


def _check(path: Path) -> None:
    try:
        regular_files.check(path)
    except ValueError as e:
        raise ValueError(f"{e}; remove it") from e


def _sections(data: bytes) -> Iterator[bytes]:
    """Parts, each cut after a line end, the first at or behind SECTION bytes."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + SECTION)
        stop = len(data) if end < 0 else end + 1
        yield data[start:stop]
        start = stop


def _jsonl(path: Path, name: str, field: str) -> Iterator[Document]:
    number = 0
    with regular_files.open_file(path) as file:
        while line := read_line(file, f"{path}:{number + 1}"):
            number += 1
            if line.strip():
                text = _line_text(f"{path}:{number}", line, field)
                yield from _document(f"{name}:{number}", text)


def read_line(file: BinaryIO, where: str) -> bytes:
    """The next line of a file of records; empty at its end.

    Raises:
        ValueError: it is longer than any record, as if the file had no line ends; names the place.
    """
    try:
        line = file.readline(_MOST_LINE + 1)
    except OSError as e:
        raise ValueError(f"{where} cannot be read: {e.strerror}") from e
    if len(line) > _MOST_LINE:
        raise ValueError(f"{where}: a line of more than {_MOST_LINE:,} bytes is no record")
    return line


def _line_text(where: str, line: bytes, field: str) -> bytes:
    record = strict_json.parse(line, where)
    if not isinstance(record, dict) or field not in record:
        known = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{where}: no field data.field={field!r}; the line has {known}")
    return text_bytes(where, field, record[field])


def text_bytes(where: str, field: str, value: Any) -> bytes:
    """The text of a record's field; ``where`` names the record in errors."""
    if isinstance(value, bytes):
        return value  # of a binary column; what it is not as UTF-8 is the tokenizer's to say
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: the field {field!r} is of type {type(value).__name__}; it must be text"
        )
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as e:
        raise ValueError(f"{where}: the field {field!r} is not valid Unicode: {e.reason}") from e


def _parquet(path: Path, name: str, field: str) -> Iterator[Document]:
    with columnar(path):
        # optional: the extra `data`
        import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]

        with pq.ParquetFile(path) as file:
            _check_column(path, file.schema_arrow.names, field)
            yield from _records(path, name, field, file.iter_batches(columns=[field]))


def _saved_dataset(root: Path, field: str) -> Iterator[Document]:
    """A folder of ``Dataset.save_to_disk``: ``state.json`` lists Arrow stream files in the order of
    their rows.
    """
    for name in arrow_files(root):
        path = root / name
        with (
            columnar(path) as pa,
            pa.memory_map(str(path)) as source,
            pa.ipc.open_stream(source) as reader,
        ):
            _check_column(path, reader.schema.names, field)
            batches = (batch.select([field]) for batch in reader)  # one at a time
            yield from _records(path, name, field, batches)


def arrow_files(root: Path) -> list[str]:
    """The Arrow files of a saved dataset, in the order of their rows."""
    try:
        state = strict_json.load_object(root / "state.json")
        names = [entry["filename"] for entry in state["_data_files"]]
        for name in names:
            regular_files.contained(root, name)
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{str(root / 'state.json')!r} does not list the files of a dataset: {e!r}"
        ) from e
    return names


def _records(path: Path, name: str, field: str, batches: Iterator[Any]) -> Iterator[Document]:
    row = 0
    for batch in batches:
        for value in batch.column(0).to_pylist():
            yield from _document(f"{name}:{row}", text_bytes(f"{path}, row {row}", field, value))
            row += 1


def _check_column(path: Path, columns: list[str], field: str) -> None:
    if field not in columns:
        raise ValueError(f"{path}: no column data.field={field!r}; it has {sorted(columns)}")


@contextlib.contextmanager
def columnar(path: Path) -> Iterator[Any]:
    """The package pyarrow for work on one file, which it opens by its path; what it says of the
    file is raised as a ValueError with the file's name.

    Raises:
        ValueError: it is no regular file, its name is not UTF-8, or it cannot be read.
        ImportError: pyarrow is not installed.
    """
    pa = pyarrow(path)
    _check(path)
    try:
        str(path).encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"the name {str(path)!r} is not UTF-8; rename it") from e
    try:
        yield pa
    except (OSError, pa.ArrowException) as e:
        # its reasons may have several lines
        reason = " ".join(str(e).split())
        raise ValueError(f"cannot read {str(path)!r}: {reason}") from e


def pyarrow(path: Path) -> Any:
    """The package pyarrow, or an ImportError that says what needs it."""
    try:
        import pyarrow as pa  # pyright: ignore[reportMissingImports]  # optional: the extra `data`
    except ImportError as e:
        raise ImportError(f"{str(path)!r} needs pyarrow; pip install 'k31fn[data]'") from e
    return pa
