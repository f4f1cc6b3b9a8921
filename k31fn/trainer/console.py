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
        self._console = console or Console(highlight=False, soft_wrap=True, emoji=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
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
        parts = [(s.stop - s.start, recipe.at(s.start)) for s in spans(recipe.phases, recipe.steps)]
        parts = parts or [(recipe.steps, recipe)]
        shapes = ", then ".join(
            f"{steps} steps of {r.batch_size} x {r.length}" for steps, r in parts
        )
        epochs = sum(steps * r.batch_size * r.length for steps, r in parts) / dataset.num_tokens
        self.note(f"run {folder}: {count:,} parameters, {shapes}")
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
        self._console.print(text, markup=False)
