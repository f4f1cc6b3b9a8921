"""Where else a run's metrics go: TensorBoard events. ``metrics.jsonl`` is written in any case."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

__all__ = ["NoTracker", "TensorBoard", "Tracker", "tensorboard"]


@runtime_checkable
class Tracker(Protocol):
    """Takes the metrics of a run as it goes."""

    def log(self, step: int, record: Mapping[str, Any]) -> None:
        """The numbers of one step by name; anything else in ``record`` is left out."""
        ...

    def close(self) -> None:
        """Writes out what is still held."""
        ...


class NoTracker:
    """Takes metrics and drops them."""

    def log(self, step: int, record: Mapping[str, Any]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class TensorBoard:
    """Writes TensorBoard events; make one with :func:`tensorboard`.

    Raises:
        OSError: the events cannot be written, such as on a full disk; from any method, perhaps later than the event.
    """

    def __init__(self, make_writer: Callable[[str], Any], directory: Path) -> None:
        self._directory = directory
        self._uncaught = threading.excepthook
        threading.excepthook = self._of_thread
        with self._naming_the_directory():
            self._writer = make_writer(str(directory))

    def log(self, step: int, record: Mapping[str, Any]) -> None:
        """One scalar per number; infinite and NaN values stay, TensorBoard shows them as such."""
        with self._naming_the_directory():
            for name, value in record.items():
                if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                    self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes out what is still held."""
        with self._naming_the_directory():
            self._writer.close()
        threading.excepthook = self._uncaught

    @contextlib.contextmanager
    def _naming_the_directory(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._directory)) from error

    def _of_thread(self, args: Any) -> None:
        """The writer's thread keeps what went wrong for the next call to raise; its traceback would add nothing."""
        if not type(args.thread).__module__.startswith("tensorboard."):
            self._uncaught(args)


def tensorboard(directory: str | Path, *, warn: Callable[[str], object], resumed_at: int | None = None) -> Tracker:
    """A tracker that writes TensorBoard events to ``directory``.

    Without the ``tensorboard`` package the run goes on: ``warn`` gets one line, and the tracker drops what it is given.

    Args:
        directory: made if it is missing.
        warn: takes the line that says what is missing.
        resumed_at: first step of a resumed run; TensorBoard then hides what was logged earlier from there on.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        warn(f"no TensorBoard events: {error}; pip install 'k31fn[train]' adds them")
        return NoTracker()
    writer = functools.partial(SummaryWriter, purge_step=resumed_at, flush_secs=10)
    return TensorBoard(writer, Path(directory))
