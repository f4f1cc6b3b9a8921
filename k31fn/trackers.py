"""Where else a run's metrics go: TensorBoard events, and by config wandb and trackio.

``metrics.jsonl`` is written in any case. A package is imported, and anything sent anywhere, only if
it was chosen.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

__all__ = [
    "Name",
    "NoTracker",
    "Several",
    "Tracker",
    "check",
    "service",
    "tensorboard",
]


def __dir__() -> list[str]:
    return __all__


Name = Literal["wandb", "trackio"]


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


class _TensorBoard:
    """Writes TensorBoard events; make one with :func:`tensorboard`.

    Raises:
        OSError: the events cannot be written, such as on a full disk; from any method, perhaps
            later than the event.
    """

    def __init__(self, make_writer: Callable[[str], Any], directory: Path) -> None:
        self._directory = directory
        # its writer has a thread, whose errors would only be printed
        self._uncaught = threading.excepthook
        threading.excepthook = self._of_thread
        with self._naming_the_directory():
            self._writer = make_writer(str(directory))

    def log(self, step: int, record: Mapping[str, Any]) -> None:
        """One scalar per number; infinite and NaN values stay, TensorBoard shows them as such."""
        with self._naming_the_directory():
            for name, value in record.items():
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if name != "step" and is_number:
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
        """The writer's thread keeps what went wrong for the next call to raise; its traceback would
        add nothing.
        """
        if not type(args.thread).__module__.startswith("tensorboard."):
            self._uncaught(args)


def tensorboard(
    directory: str | Path, *, warn: Callable[[str], object], resumed_at: int | None = None
) -> Tracker:
    """A tracker that writes TensorBoard events to ``directory``.

    Without the ``tensorboard`` package the run goes on: ``warn`` gets one line, and the tracker
    drops what it is given.

    Args:
        directory: made if it is missing, in a folder that is there.
        warn: takes the line that says what is missing.
        resumed_at: first step of a resumed run; TensorBoard then hides what was logged earlier from
            there on.
    """
    try:
        # here, not above: the package is optional, and slow to import
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        warn(f"no TensorBoard events: {error}; pip install 'k31fn[train]' adds them")
        return NoTracker()
    # not with its parents, as the package would: a run's folder may have been renamed meanwhile
    Path(directory).mkdir(exist_ok=True)
    # seconds: what is at most lost when a run is killed, and late for who watches it
    writer = functools.partial(SummaryWriter, purge_step=resumed_at, flush_secs=10)
    return _TensorBoard(writer, Path(directory))


class Several:
    """Gives metrics to each of some trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, record: Mapping[str, Any]) -> None:
        """To each in turn."""
        for tracker in self._trackers:
            tracker.log(step, record)

    def close(self) -> None:
        """Each, also if one before it fails."""
        # a stack calls in reverse order, so they are closed in theirs
        with contextlib.ExitStack() as stack:
            for tracker in reversed(self._trackers):
                stack.callback(tracker.close)


class _Service:
    """wandb or trackio; make one with :func:`service`.

    A run does not depend on a service: the first error is told, and from then on it gets nothing
    more.
    """

    def __init__(self, name: str, module: Any, run: Any, warn: Callable[[str], object]) -> None:
        self._name, self._module, self._run, self._warn = name, module, run, warn

    def log(self, step: int, record: Mapping[str, Any]) -> None:
        """The finite numbers of a step."""
        numbers = {}
        for name, value in record.items():
            # metrics.jsonl has the others; not every service takes NaN
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                numbers[name] = value
        self._try(lambda: self._module.log(numbers, step=step))

    def close(self) -> None:
        """Ends the service's run."""
        self._try(self._module.finish)

    def _try(self, call: Callable[[], object]) -> None:
        if self._run is None:
            return
        try:
            call()
        except Exception as error:  # of a package that may raise anything
            self._run = None  # told once: the next step would say the same
            self._warn(f"{self._name} gets no more metrics: {type(error).__name__}: {error}")


def check(names: Sequence[str]) -> None:
    """Whether the packages of the chosen services are there, before a run begins.

    Raises:
        ImportError: one is not; says what to do.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(
                f"trackers={list(names)}: {error}; pip install {name}, or leave {name!r} out of "
                "trackers"
            ) from error


def service(
    name: Name,
    *,
    project: str,
    run: str,
    config: Mapping[str, Any],
    directory: Path,
    warn: Callable[[str], object],
) -> Tracker:
    """A tracker that gives metrics to wandb or trackio, under settings and log-ins of their own.

    A run that goes on continues the service's run of the same name.

    Args:
        name: which of the two.
        project: of the service.
        run: name of the run there.
        config: what to write down with it.
        directory: where wandb keeps its files.
        warn: takes the line that says what failed.

    Raises:
        ImportError: the package is not installed.
        OSError: the service could not begin a run.
    """
    check([name])
    module: Any = importlib.import_module(name)
    options: dict[str, Any] = {
        "project": project,
        "name": run,
        "config": dict(config),
        "resume": "allow",
    }
    if name == "wandb":
        # by the id it finds the run to continue; trackio does by the name
        options |= {"id": f"{project}-{run}", "dir": str(directory)}
    try:
        started = module.init(**options)
    except Exception as error:  # of a package that may raise anything
        raise OSError(
            f"trackers: {name} cannot begin a run: {type(error).__name__}: {error}"
        ) from error
    return _Service(name, module, started, warn)
