"""Files that come from anywhere: only regular ones are opened, none is read beyond a bound.

A named pipe would wait for ever, a device has no end, a link may be of itself. So a path is looked
at before it is opened, and what is no regular file is refused by its name.

**Links.** A link to a regular file is followed wherever it leads if a person put it there: in a
folder of data, a checkpoint (the cache of the Hugging Face hub is made of links), a tokenizer's
folder. What *the content of a file* names (the image of a record, the shard of a store, the Arrow
file of a saved data set) must lie inside of a folder, links resolved: whoever wrote the content
does not choose what is read of this machine. Links to folders are not followed in a walk.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["check", "contained", "open_file", "path", "read", "shown"]

_LONGEST_LINE = 1600  # of a message
# What a path may be instead of a regular file, for a person.
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def path(text: str | Path, field: str = "path") -> Path:
    """A path that a person typed: ``~`` is the home folder, also behind an option's ``=``, where a
    shell leaves it as it is.

    Raises:
        ValueError: it is empty, which would mean the folder that one happens to be in; or ``~`` is
            of nobody; begins with ``field``.
    """
    if not str(text):
        raise ValueError(f"{field}='' names nothing; give a path ('.' is this folder)")
    try:
        return Path(text).expanduser()
    except RuntimeError as e:  # ~someone, of whom the system does not know
        raise ValueError(f"{field}={str(text)!r}: there is no such home folder: {e}") from e


def check(path: str | Path) -> int:
    """The size of a regular file, in bytes; for readers that open a path themselves.

    Raises:
        ValueError: it is missing or something else, such as a pipe; names it.
    """
    try:
        found = os.stat(path)
    except OSError as e:
        raise _unreadable(path, e) from e
    return _size(path, found)


def open_file(path: str | Path) -> BinaryIO:
    """A regular file, opened for reading.

    Raises:
        ValueError: as :func:`check`, or it may not be read.
    """
    # Before it is opened: opening alone wakes the other end of a pipe, or rewinds a tape.
    check(path)
    try:
        # Not blocking, should a pipe have taken the place since; for a file it changes nothing.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise _unreadable(path, e) from e
    file = os.fdopen(descriptor, "rb")
    try:
        _size(path, os.fstat(descriptor))
    except ValueError:
        file.close()
        raise
    return file


def read(path: str | Path, *, most: int) -> bytes:
    """The bytes of a regular file.

    Args:
        path: of the file.
        most: bytes that such a file can have; a longer one is another thing.

    Raises:
        ValueError: as :func:`open_file`, or it is longer.
    """
    too_long = ValueError(f"cannot read {str(path)!r}: it has more than {most:,} bytes")
    with open_file(path) as file:
        # By its size first: a file of a terabyte is refused before it takes memory.
        if os.fstat(file.fileno()).st_size > most:
            raise too_long
        try:
            data = file.read(most + 1)
        except OSError as e:
            raise _unreadable(path, e) from e
    # It may have grown, and some files of the system say that they are empty.
    if len(data) > most:
        raise too_long
    return data


def contained(folder: str | Path, part: str, *, within: str | Path | None = None) -> Path:
    """The path that ``part``, a name that the content of a file gives, has in ``folder``.

    Args:
        folder: that the name is relative to.
        part: such as ``images/1.png``.
        within: the folder that it must lie in, if it is another.

    Raises:
        ValueError: it leads out, by ``..``, as an absolute path or by a link; or holds a zero byte.
    """
    outer = os.path.realpath(folder if within is None else within)
    if "\0" in part:
        raise ValueError(f"{part[:60]!r} is no name of a file")
    # Resolved, so that neither ".." nor a link leads out. Of a link to itself this is the link.
    path = os.path.realpath(os.path.join(folder, part))
    if os.path.commonpath([outer, path]) != outer:
        raise ValueError(f"{part!r} is outside {outer!r}; only what lies in it is read")
    return Path(path)


def _size(path: str | Path, found: os.stat_result) -> int:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise ValueError(f"cannot read {str(path)!r}: it is {kind}, not a regular file")
    return found.st_size


def _unreadable(path: str | Path, error: OSError) -> ValueError:
    return ValueError(f"cannot read {str(path)!r}: {error.strerror}")


def shown(message: object, place: str | Path = "") -> str:
    """The text of a message with what a terminal would obey as escapes: names that files give may
    hold codes that erase a screen, or bytes that are not UTF-8. Of a line without an end, which a
    file's value may be, its beginning and its end.

    Args:
        message: or an error.
        place: what was written, for an error of the system that does not say it, as of a full disk.
    """
    text = str(message)
    if place and isinstance(message, OSError) and message.filename is None:
        text = f"{place}: {text}"
    lines = []
    for line in text.split("\n"):  # of a list of problems each has its own
        escaped = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
        if len(escaped) > _LONGEST_LINE:
            # what is wrong stands at the beginning, what to do at the end
            escaped = f"{escaped[: _LONGEST_LINE // 2]} ... {escaped[-_LONGEST_LINE // 4 :]}"
        lines.append(escaped)
    return "\n".join(lines)
