"""The training loop: data, steps, evaluation, checkpoints, clean ends.

Every rank runs it alike. Each writes its part of a checkpoint; all else is read, written and
printed by rank 0 alone. What goes wrong on one rank, and what ends a run, is agreed on before the
next step: all leave the loop after the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch

from k31fn import data, metrics, plot, scopes, trackers
from k31fn.checkpoint.errors import CheckpointError, NotSavedError
from k31fn.config.codec import to_dict
from k31fn.config.recipe import Recipe
from k31fn.parallel.collectives import own_index
from k31fn.trainer.console import View
from k31fn.trainer.evaluation import heldout_loss
from k31fn.trainer.init_source import start_from
from k31fn.trainer.log import Log, NonFiniteError
from k31fn.trainer.part_metrics import Labels, label
from k31fn.trainer.phases import learning_rate, make_phase_step, over_phases
from k31fn.trainer.profile import Profile
from k31fn.trainer.ranks.agreement import OtherRankError, Ranks
from k31fn.trainer.ranks.stop import Stop
from k31fn.trainer.saving import Saves
from k31fn.trainer.state import TrainState, init_state
from k31fn.trainer.step import make_batches, rows_at
from k31fn.trainer.warmup import rehearse

__all__ = ["Corpus", "Outcome", "load_corpus", "train"]

_Error = TypeVar("_Error", bound=BaseException)

_METRICS, _HELDOUT, _NGRAM = "metrics.jsonl", "heldout/loss", "heldout/ngram4_loss"


class Outcome(NamedTuple):
    """How a run ended: steps done, whether that is all of them, and the held-out losses (nats per
    byte) then.

    The losses are ``()`` in a run that was stopped before it had both; the second also on other
    ranks than the first and in a run on prepared data.
    """

    step: int
    complete: bool
    heldout: float | tuple[()]
    ngram: float | tuple[()]


class Corpus(NamedTuple):
    """The run's text and images: rows to train on, and held-out rows to score during the run and at
    its end.
    """

    tokenizer: data.Tokenizer
    dataset: data.Rows
    some: data.HeldOut
    all: data.HeldOut


def load_corpus(recipe: Recipe) -> Corpus:
    """Reads the recipe's text, before anything is written.

    Raises:
        ValueError: it cannot be read or does not fit the model.
    """
    tokenizer = data.open_tokenizer(recipe.data.tokenizer, end=recipe.data.end)
    if recipe.model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size={recipe.model.vocab_size} is less than the tokenizer's "
            f"{tokenizer.vocab_size}; raise it"
        )
    if isinstance(recipe.data, data.Prepared):
        return _load_prepared(recipe, recipe.data, tokenizer)
    splits = data.load(recipe.data, tokenizer)
    dataset = over_phases(
        recipe, lambda r: data.Dataset(splits.train, r.batch_size, r.length, r.seed)
    )
    some, every = (
        data.heldout(splits.heldout, tokenizer, length=recipe.length, num_bytes=n)
        for n in (recipe.eval_bytes, recipe.heldout_bytes)
    )
    return Corpus(tokenizer, dataset, some, every)


def _load_prepared(recipe: Recipe, cfg: data.Prepared, tokenizer: data.Tokenizer) -> Corpus:
    def rows(r: Recipe) -> data.Mixture:
        return data.open_prepared(
            cfg, tokenizer, length=r.length, batch_size=r.batch_size, seed=r.seed
        )

    dataset, heldout = (
        over_phases(recipe, rows),
        data.open_heldout(cfg, tokenizer, length=recipe.length),
    )
    tower, width = recipe.model.vision, heldout[0].store.patch_width
    if cfg.patches and not isinstance(tower, tuple) and width != tower.pixels_per_patch:
        raise ValueError(
            f"data.train: patches of {width} bytes, model.vision takes {tower.pixels_per_patch}; "
            "prepare the data with "
            f"patches of patch_size={tower.patch_size}"
        )
    some, every = (
        data.heldout_rows(heldout, tokenizer, num_bytes=n)
        for n in (recipe.eval_bytes, recipe.heldout_bytes)
    )
    return Corpus(tokenizer, dataset, some, every)


def train(
    recipe: Recipe,
    corpus: Corpus,
    folder: Path,
    *,
    device: torch.device,
    view: View,
    stop: Stop,
    ranks: Ranks | None = None,
    profile: range = range(0),
    rehearsal: bool = False,
) -> Outcome:
    """Runs ``recipe`` in its ``folder``, from its newest complete checkpoint if there is one.

    However it ends, the state after the last whole step is saved. Only what breaks off a step
    itself (no memory, a second Ctrl-C, a lost rank) leaves nothing newer than the last checkpoint.

    Args:
        recipe: the run; its mesh is that of ``ranks``.
        corpus: its text.
        folder: where it reads and writes; every rank's host must see its checkpoints.
        device: of this rank.
        view: what is printed.
        stop: of this rank.
        ranks: of the run; None: this is the only one.
        profile: steps of which a trace is written (:mod:`k31fn.trainer.profile`).
        rehearsal: whether a step that changes nothing comes first
            (:func:`k31fn.trainer.warmup.rehearse`).

    Raises:
        ValueError: the folder's checkpoint is not of this recipe.
        NonFiniteError: several steps in a row were not finite.
        CheckpointError: a checkpoint could not be written.
        OSError: something else could not be written.
        OtherRankError: one of these on another rank.
    """
    ranks = ranks or Ranks()
    with _Run(recipe, corpus, folder, device, view, ranks, profile) as run:
        if rehearsal:
            run.rehearse()
        run.steps(stop)
        outcome = run.score(run.evaluate_all(stop))
    if outcome.step and ranks.first:
        try:
            plot.save_loss_plot(folder)
        except ImportError as error:
            view.note(str(error))
    return outcome


_FAILURES = (
    NonFiniteError,
    CheckpointError,
    OSError,
    OtherRankError,
)  # that leave the state as it is


def _joined(first: _Error | None, another: Exception) -> _Error | Exception:
    """``first`` with the other one as its note, if there is a first and the other says more than it
    does.

    A save that fails once more as the one before says nothing new.
    """
    if first is None:
        return another
    again = (
        isinstance(first, NotSavedError)
        and isinstance(another, NotSavedError)
        and another.cause == first.cause
    )
    if not again and str(another) not in (str(first), *getattr(first, "__notes__", ())):
        first.add_note(str(another))
    return first


class _StoppedError(Exception):
    """A signal came during an evaluation."""


class _Run:
    """A run that goes on; leaving the block saves it.

    Attributes:
        done: steps done.
        state: after them; None while a step, which writes into it, is under way.
    """

    def __init__(
        self,
        recipe: Recipe,
        corpus: Corpus,
        folder: Path,
        device: torch.device,
        view: View,
        ranks: Ranks,
        profile: range = range(0),
    ) -> None:
        self._recipe, self._corpus, self._folder = recipe, corpus, folder
        self._device, self._view, self._ranks = device, view, ranks
        self._error: Exception | None = None  # what failed on this rank since the ranks last agreed
        self._saves: Saves | None = None
        self._tracker: trackers.Tracker = trackers.NoTracker()
        self._profile = Profile(profile, folder, own_index(ranks.axes.atoms), device, view.note)
        try:
            self._saves = Saves(
                recipe, folder / "checkpoints", corpus.dataset.fingerprint, view, ranks
            )
            newest = self._saves.latest()
            self.done = self._saved = (
                newest or 0
            )  # of weights that were imported, that is the step of the checkpoint
            scored, self._ngram = ranks.on_first(self._open)
            self._scored = dict(scored)
            self.state: TrainState | None = (
                self._initial() if newest is None else self._saves.restore(newest, device)
            )
            self._saves.prepare(self.state)
            ranks.on_first(self._open_tracker)
        except BaseException as error:
            self._finish([lambda: self._close(ranks.together)], error)
            raise
        view.begin(recipe, folder, self.done, corpus.dataset)
        self._log = Log(
            folder / _METRICS if ranks.first else None, self._tracker, view, ranks.times
        )

    def _initial(self) -> TrainState:
        recipe, state = self._recipe, init_state(self._recipe, self._device, self._ranks.axes)
        return (
            start_from(recipe.init, recipe, state, self._ranks, self._device)
            if recipe.init
            else state
        )

    def _open(self) -> list[Any]:
        """The losses that are written down, up to the step that the run goes on from."""
        metrics.rewind(self._folder / _METRICS, self.done)
        scored, ngram = self._recorded()
        return [list(scored.items()), ngram]

    def _open_tracker(self) -> None:
        before = self.done if (self._folder / "events").exists() else None
        warn, where = self._view.note, self._folder
        chosen = [trackers.tensorboard(where / "events", warn=warn, resumed_at=before)]
        self._tracker = trackers.Several(
            chosen
        )  # what is open already is closed if one that follows fails
        for name in self._recipe.trackers:
            names: Any = {
                "project": self._recipe.name,
                "run": where.name,
                "config": to_dict(self._recipe),
            }
            chosen.append(trackers.service(name, directory=where, warn=warn, **names))
            self._tracker = trackers.Several(chosen)

    def _close(self, together: bool) -> None:
        if self._saves is not None:
            self._saves.close(together=together)

    def __enter__(self) -> _Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Saves what is not saved, whatever else fails; the first error is the one that is seen,
        others its notes.
        """
        self._view.end()
        together = error is None or self._ranks.together  # else other ranks are elsewhere
        ends = [
            self._log.flush,
            self._profile.close,
            self._tracker.close,
            lambda: self._close(together),
        ]
        if together:
            ends.insert(1, self.save)
        first = self._finish(ends, error or self._error)
        if first is not None and error is None:
            raise first

    def _finish(
        self, ends: list[Callable[[], None]], first: BaseException | None
    ) -> BaseException | None:
        """Does all of ``ends``; what fails is a note of ``first``, or becomes it."""
        for end in ends:
            try:
                end()
            except _FAILURES as another:
                first = _joined(first, another)
        return first

    def rehearse(self) -> None:
        """A step that changes nothing, if any follows."""
        if self.done == self._recipe.steps:
            return
        step, axes = make_phase_step(self._recipe, self.done, self._ranks.axes), self._ranks.axes
        rows = rows_at(self._corpus.dataset, self.done, axes)
        assert self.state is not None
        state, self.state = self.state, None
        self.state, seconds = rehearse(
            self._recipe.at(self.done), step, state, rows, self._device, axes
        )
        self._view.note(f"rehearsed a step in {seconds:.1f} s")
        self._log.restart_clock()

    def steps(self, stop: Stop) -> None:
        """All steps that remain, with what happens between them; ends early after a signal."""
        recipe, axes, phase, step_fn, labels = self._recipe, self._ranks.axes, -1, None, Labels()
        now = recipe
        while not self._agree(stop) and self.done < recipe.steps:
            if self.done and self.done % recipe.eval_every == 0 and self.done not in self._scored:
                self._evaluate_some(stop)
                continue
            if step_fn is None or recipe.phase_of(self.done) != phase:
                phase, now = recipe.phase_of(self.done), recipe.at(self.done)
                step_fn, labels = (
                    make_phase_step(recipe, self.done, axes),
                    label(recipe, self.done, self._device),
                )
            lr = learning_rate(recipe, self.done)
            with self._profile.step(self.done):
                with scopes.scope("data"):
                    batches = make_batches(
                        now, rows_at(self._corpus.dataset, self.done, axes), self._device, axes
                    )
                assert self.state is not None
                state, self.state = self.state, None
                self.state, numbers = step_fn(state, batches, lr)
            self.done += 1
            self._try(lambda: self._profile.after(self.done - 1))
            tokens = now.batch_size * now.length
            self._try(lambda: self._log.push(self.done - 1, numbers, lr, tokens, labels))  # noqa: B023
            if self.done % recipe.checkpoint_every == 0 or self.done == recipe.steps:
                self._try(
                    self._log.flush
                )  # a step in a checkpoint is not made again: its record must be there
                self._try(self.save)
        self._view.end()

    def evaluate_all(self, stop: Stop) -> float | tuple[()]:
        """The loss on the held-out text under the final state; ``()`` if the run has stopped
        before.

        Then all is saved, and the ranks need each other no more.
        """
        loss: float | tuple[()] = ()
        if self.done == self._recipe.steps:
            known = self.done in self._scored
            loss = self._scored[self.done] if known else self._evaluate(self._corpus.all, stop)
        for end in (self._log.flush, self.save, lambda: self._close(True)):
            self._try(end)
        self._agree(stop)
        self._ranks.part()
        return loss

    def score(self, heldout: float | tuple[()]) -> Outcome:
        """The held-out loss, and of text beside it that of the 4-gram model of the bytes that the
        run trained on.
        """
        recipe, scored = self._recipe, self._corpus.all
        if isinstance(heldout, tuple):
            return Outcome(self.done, False, (), ())
        if not self._ranks.first:
            return Outcome(self.done, True, heldout, ())
        text = f"held-out loss {heldout:.4f} nats per byte on {scored.num_bytes:,} bytes"
        if isinstance(recipe.data, data.Prepared):
            self._view.note(text)
            return Outcome(self.done, True, heldout, ())
        if not isinstance(self._ngram, float):
            seen = data.trained_on(self._corpus.dataset, recipe.steps, self._corpus.tokenizer)
            self._ngram = data.NGram.fit(seen, order=4).nats_per_byte(scored.pieces, skip=1)
            self._log.write({"step": recipe.steps - 1, _NGRAM: self._ngram})
        self._view.note(
            f"{text}; Witten-Bell 4-gram model of the bytes trained on: {self._ngram:.4f}"
        )
        return Outcome(self.done, True, heldout, self._ngram)

    def save(self) -> None:
        """A checkpoint of the steps done, in the background, unless there is one."""
        if self.state is None or self.done <= self._saved:
            return
        assert self._saves is not None
        self._saves.save(self.done, self.state, self._scored)
        self._saved = self.done

    def _recorded(self) -> tuple[dict[int, float], float | tuple[()]]:
        """Held-out losses that an earlier process of this run wrote down, by steps done, and the
        4-gram model's.
        """
        file = self._folder / _METRICS
        records = metrics.read(file) if file.exists() else []
        scored = {r["step"] + 1: r[_HELDOUT] for r in records if _HELDOUT in r}
        return scored, next((r[_NGRAM] for r in records if _NGRAM in r), ())

    def _try(self, f: Callable[[], object]) -> None:
        """Keeps what fails on this rank alone until the ranks agree."""
        try:
            f()
        except _FAILURES as error:
            self._error = _joined(self._error, error)

    def _agree(self, stop: Stop) -> bool:
        """Whether a signal came on any rank. Raises on all if something failed on one."""
        assert self._saves is not None
        self._try(self._saves.poll)
        error, self._error = self._error, None
        stop.agree(self._ranks, error)
        return bool(stop.cause)

    def _evaluate_some(self, stop: Stop) -> None:
        """An evaluation during the run."""
        self._try(self._log.flush)
        some = self._corpus.some
        loss = self._evaluate(some, stop)
        if not isinstance(loss, tuple):
            text = f"held-out loss {loss:.4f} nats per byte on {some.num_bytes:,} bytes"
            self._view.note(f"step {self.done - 1}: {text}")

    def _evaluate(self, scored: data.HeldOut, stop: Stop) -> float | tuple[()]:
        """Nats per byte, also written down; ``()`` if a signal came first."""
        assert self.state is not None
        with self._view.evaluating(len(scored.rows.tokens)) as advance:

            def progress(rows: int) -> None:
                advance(rows)
                if self._agree(stop):
                    raise _StoppedError

            try:
                recipe = self._recipe.at(max(self.done - 1, 0))
                loss = heldout_loss(recipe, self.state, scored, self._ranks.axes, progress=progress)
            except _StoppedError:
                return ()
        self._try(lambda: self._log.write({"step": self.done - 1, _HELDOUT: loss}))
        self._scored[self.done] = loss
        self._log.restart_clock()
        return loss
