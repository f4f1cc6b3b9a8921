"""What the commands have in common: output that may vanish, and errors of a user's own code."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

__all__ = ["outlives_output", "parse_arguments", "print_own_traceback"]

_Main = TypeVar("_Main", bound=Callable[..., Any])

_LIBRARY = Path(__file__).resolve().parent


def outlives_output(note: str = "") -> Callable[[_Main], _Main]:
    """A decorator of a command: it ends as it would have though its output vanishes.

    A reader may leave (``train.py ... | head``), a terminal may close, the disk of a log may be
    full. What is printed from then on is dropped. Letters that the output's encoding does not have
    are replaced.

    Args:
        note: a line for standard error once standard output is gone; empty: none.
    """

    def decorate(main: _Main) -> _Main:
        @functools.wraps(main)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _replaced("stderr"), _replaced("stdout", note):
                return main(*args, **kwargs)

        return cast(_Main, call)

    return decorate


@contextlib.contextmanager
def _replaced(name: str, note: str = "") -> Iterator[None]:
    before = getattr(sys, name)
    if isinstance(before, _Output) or before is None:  # a command called by a command
        yield
        return
    output = _Output(before, note)
    setattr(sys, name, output)
    try:
        yield
    finally:
        output.flush()
        # only if it is still ours: what was put in its place belongs to someone else
        if getattr(sys, name) is output:
            setattr(sys, name, before)


class _Output(io.TextIOBase):
    """A text stream in front of another, which may fail at any time."""

    def __init__(self, stream: Any, note: str) -> None:
        self._stream = stream
        self._note = note
        self._lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            # sampled text may be of any script, and a file's name of no encoding at all
            text = text.encode(self.encoding, "replace").decode(self.encoding)
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def isatty(self) -> bool:
        return not self._lost and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def _try(self, action: Callable[[], object]) -> None:
        if self._lost:
            return
        try:
            action()
        except OSError as error:
            self._lose(error)
        except ValueError:
            self._lost = True  # it was closed

    def _lose(self, error: OSError) -> None:
        self._lost = True
        # The interpreter flushes the stream at its end: what is left in it must have a way out.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if self._note:
            print(f"{self._note} ({error.strerror})", file=sys.stderr, flush=True)


def parse_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """The arguments of a command, None: of this process; ends the process where they are wrong."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    for word in words:
        # which argparse gives as an empty list, whatever the type of the option (Python 3.11)
        if word.startswith("--") and word.endswith("=--"):
            parser.error(f"{word}: '--' is no value")
    return parser.parse_args(words)


def print_own_traceback(error: BaseException) -> None:
    """Prints where an error was raised, if that is in code of the user's: a recipe or a layer.

    The library's own errors say by themselves what is wrong.
    """
    if isinstance(error, KeyboardInterrupt):
        return  # who interrupts asks for no stack
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.resolve().is_relative_to(_LIBRARY):
            return
        # Of what torch or the standard library raised, who called it is asked next.
        if file.is_file() and not _is_installed(file):
            traceback.print_exception(error, file=sys.stderr)
            return


def _is_installed(file: Path) -> bool:
    packages = {"site-packages", "dist-packages"}
    return file.is_relative_to(sysconfig.get_path("stdlib")) or not packages.isdisjoint(file.parts)
