"""What a person watching a run sees: a line per step, and a progress bar if it is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from k31fn import data, metrics, model, params
from k31fn.config.phase import spans
from k31fn.config.recipe import Recipe

__all__ = ["View"]


class View:
    """Prints to standard output; in a terminal the lines scroll above a progress bar."""

    def __init__(self, console: Console | None = None) -> None:
        # soft_wrap: a line that is longer than the terminal stays one line when it is copied
        self._console = console or Console(highlight=False, soft_wrap=True, emoji=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,  # the bar goes at the end; lines of text are what stays
            disable=not self._console.is_terminal,
        )
        self._task: Any = None
        self._steps = 0

    @classmethod
    def silent(cls) -> View:
        """One that prints nothing."""
        return cls(Console(quiet=True))

    def begin(self, recipe: Recipe, folder: Path, first: int, dataset: data.Rows) -> None:
        """What is about to run."""
        count = params.count(model.specs(recipe.model))
        shapes, tokens = [], 0
        for steps, phase in _phases(recipe):
            shapes.append(f"{steps} steps of {phase.batch_size} x {phase.length}")
            tokens += steps * phase.batch_size * phase.length
        epochs = tokens / dataset.num_tokens
        self.note(f"run {folder}: {count:,} parameters, {', then '.join(shapes)}")
        self.note(f"training text: {dataset.num_tokens:,} tokens, {epochs:.2f} epochs")
        self._steps = recipe.steps
        if first == recipe.steps:
            self.note("all steps are done")
            return
        if first:
            self.note(f"goes on after step {first - 1}")
        self._bar.start()
        self._task = self._bar.add_task("training", total=recipe.steps, completed=first)

    def step(self, record: Mapping[str, Any]) -> None:
        """The numbers of a step."""
        self._print(metrics.step_line(record, self._steps))
        self._bar.update(self._task, completed=record["step"] + 1)

    def note(self, text: str) -> None:
        """A line of text."""
        self._print(text)

    def evaluating(self, rows: int) -> contextlib.AbstractContextManager[Callable[[int], object]]:
        """A second bar while ``rows`` held-out rows are scored; gives the function that advances
        it.
        """
        return self.working("scoring held-out text", rows)

    @contextlib.contextmanager
    def working(self, text: str, total: int) -> Iterator[Callable[[int], object]]:
        """A second bar while ``total`` things are done; yields the function that advances it, from
        any thread.
        """
        # a warm-up comes before the run's own bar has begun
        started = not self._bar.live.is_started
        if started:
            self._bar.start()
        task = self._bar.add_task(text, total=total)
        try:
            yield lambda n: self._bar.advance(task, n)
        finally:
            self._bar.remove_task(task)
            if started:
                self._bar.stop()

    def end(self) -> None:
        """The bar goes, the lines stay."""
        self._bar.stop()

    def _print(self, text: str) -> None:
        # markup=False: "[...]" in a path or an error is text
        self._console.print(text, markup=False)


def _phases(recipe: Recipe) -> list[tuple[int, Recipe]]:
    """Steps and recipe of each phase; of a run without phases its own."""
    if not recipe.phases:
        return [(recipe.steps, recipe)]
    phases = []
    for start, stop in spans(recipe.phases, recipe.steps):
        phases.append((stop - start, recipe.at(start)))
    return phases
