"""The training loop, and the run that it drives.

Every rank runs it alike. Each writes its part of a checkpoint; all else is read, written and
printed by rank 0 alone. What goes wrong on one rank, and what ends a run, is agreed on before the
next step: all leave the loop after the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from k31fn import data, model, plot, scopes, trackers
from k31fn import device as devices
from k31fn.config.recipe import Recipe
from k31fn.jit.function import CaptureError
from k31fn.parallel.collectives import own_index
from k31fn.trainer.console import View
from k31fn.trainer.corpus import Corpus
from k31fn.trainer.current_phase import CurrentPhase, JitMode, begin_phase
from k31fn.trainer.evaluation import heldout_loss
from k31fn.trainer.init_source import start_from
from k31fn.trainer.layout import RankLayout, lay_out
from k31fn.trainer.log import Log, open_trackers
from k31fn.trainer.phases import learning_rate, phase_layout
from k31fn.trainer.profile import Profile
from k31fn.trainer.ranks.agreement import Ranks
from k31fn.trainer.ranks.pending_errors import PendingErrors, do_all
from k31fn.trainer.ranks.stop import Stop
from k31fn.trainer.saving import Saves
from k31fn.trainer.scores import HELDOUT, METRICS, NGRAM, ngram_loss, read_scores
from k31fn.trainer.state import TrainState, init_state
from k31fn.trainer.step import Metrics, make_batches, rows_at
from k31fn.trainer.warmup import rehearse

__all__ = ["Outcome", "train"]


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
    jit: JitMode = "off",
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
        jit: whether steps are captured (:func:`k31fn.trainer.current_phase.begin_phase`).

    Raises:
        ValueError: the folder's checkpoint is not of this recipe.
        NonFiniteError: several steps in a row were not finite.
        CaptureError: ``jit`` is "on", and a step cannot be captured.
        CheckpointError: a checkpoint could not be written.
        OSError: something else could not be written.
        OtherRankError: one of these on another rank.
    """
    ranks = ranks or Ranks()
    # once for the run: what needs it is handed it
    layout = lay_out(recipe, ranks.axes)
    with _TrainingRun(layout, corpus, folder, device, view, ranks, stop, profile, jit) as run:
        if rehearsal:
            run.rehearse()
        loop(run, stop)
        heldout = run.evaluate_all(stop)
        # After it no rank waits for another: the first may take its time for the 4-gram model.
        run.part(stop)
        outcome = run.report(heldout)
    if outcome.step and ranks.first:
        try:
            plot.save_loss_plot(folder)
        except ImportError as error:
            view.note(str(error))
    return outcome


def loop(run: _TrainingRun, stop: Stop) -> None:
    """All steps that remain, with what happens between them; ends early after a signal.

    The ranks agree before each step and each evaluation: on a signal that one got, and on an error
    that one had.
    """
    recipe = run.layout.recipe
    while not run.agree(stop) and run.done < recipe.steps:
        if run.done and run.done % recipe.eval_every == 0 and not run.is_scored:
            run.evaluate_some(stop)
            continue  # the ranks agree again: a signal may have ended the evaluation
        phase = run.phase()
        lr = learning_rate(recipe, run.done)
        with run.profile.step(run.done):
            batches = run.next_batches(phase)
            metrics = run.step(phase, batches, lr)
        run.log_step(phase, metrics, lr)
        if run.done % recipe.checkpoint_every == 0 or run.done == recipe.steps:
            run.save()
    run.view.end()


class _Stopped(Exception):  # noqa: N818 - not an error: it leaves an evaluation
    """A signal came during an evaluation."""


class _TrainingRun:
    """A run that goes on; leaving the block saves it.

    Attributes:
        layout: of the whole recipe on this rank.
        done: steps done.
        state: after them; None while a step, which writes into it, is under way.
        profile: of the steps that are recorded.
        view: what is printed.
    """

    def __init__(
        self,
        layout: RankLayout,
        corpus: Corpus,
        folder: Path,
        device: torch.device,
        view: View,
        ranks: Ranks,
        stop: Stop,
        profile: range,
        jit: JitMode,
    ) -> None:
        recipe = layout.recipe
        self.layout = layout
        self.view = view
        self.profile = Profile(profile, folder, own_index(ranks.axes.atoms), device, view.note)
        self._corpus = corpus
        self._folder = folder
        self._device = device
        self._ranks = ranks
        self._errors = PendingErrors()
        self._tracker: trackers.Tracker = trackers.NoTracker()
        self._saves: Saves | None = None
        self._phase: CurrentPhase | None = None
        self._jit: JitMode = jit
        try:
            text = corpus.dataset.fingerprint
            self._saves = Saves(
                layout, folder / "checkpoints", text, view, ranks, lambda: stop.since
            )
            newest = self._saves.latest()
            # of weights that were imported it is the step of the checkpoint, not 0
            self.done = newest or 0
            self._scores = read_scores(folder, self.done, ranks, view.note)
            self.state: TrainState | None = (
                self._first_state() if newest is None else self._saves.restore(newest, device)
            )
            # memory for the copies is taken now: a run that will not have it fails before its steps
            self._saves.prepare(self.state)
            ranks.on_first(self._open_trackers)
        except BaseException as error:
            do_all([lambda: self._close_saves(ranks.together)], error)
            raise
        view.begin(recipe, folder, self.done, corpus.dataset)
        metrics_file = folder / METRICS if ranks.first else None
        self._log = Log(metrics_file, self._tracker, view, ranks.times)

    def _first_state(self) -> TrainState:
        state = init_state(self.layout, self._device)
        source = self.layout.recipe.init
        if not source:
            return state
        return start_from(source, self.layout, state, self._ranks, self._device)

    def _open_trackers(self) -> None:
        resumed_at = self.done if (self._folder / "events").exists() else None
        recipe = self.layout.recipe
        self._tracker = open_trackers(recipe, self._folder, resumed_at, warn=self.view.note)

    def _close_saves(self, together: bool) -> None:
        if self._saves is not None:
            self._saves.close(together=together)

    def __enter__(self) -> _TrainingRun:
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
        self.view.end()
        # After an error that the ranks have not agreed on the others are elsewhere, and a save,
        # which all must begin together, would wait for them.
        together = error is None or self._ranks.together
        ends: list[Callable[[], None]] = [self._log.flush]
        if together:
            ends.append(self._save_state)
        ends += [
            self.profile.close,
            self._tracker.close,
            lambda: self._close_saves(together),
        ]
        first = do_all(ends, error or self._errors.first)
        if first is not None and error is None:
            raise first

    @property
    def is_scored(self) -> bool:
        """Whether the held-out loss after the steps done is known."""
        return self.done in self._scores.heldout

    def phase(self) -> CurrentPhase:
        """The phase of the next step."""
        recipe = self.layout.recipe
        number = recipe.phase_of(self.done)
        if self._phase is None or self._phase.number != number:
            self._phase = begin_phase(
                self.layout, self.done, self._device, self._jit, self.view.note
            )
        return self._phase

    def next_batches(self, phase: CurrentPhase) -> list[model.Batch]:
        """The micro-batches of the next step."""
        axes = self.layout.axes
        # by the number of the step alone: a run that goes on reads what it would have read
        with scopes.scope("data"):
            rows = rows_at(self._corpus.dataset, self.done, axes)
            return make_batches(phase.layout.recipe, rows, self._device, axes)

    def step(self, phase: CurrentPhase, batches: list[model.Batch], lr: float) -> Metrics:
        """One step: ``state`` and ``done`` go on."""
        state = self._give_up_state()
        try:
            self.state, metrics = phase.step(state, batches, devices.number(lr, self._device))
        except CaptureError:
            self.state = state  # the step has not begun
            raise
        self.done += 1
        return metrics

    def _give_up_state(self) -> TrainState:
        """The state for a step, which writes into it: if that breaks off, there is none to save."""
        assert self.state is not None
        state, self.state = self.state, None
        return state

    def log_step(self, phase: CurrentPhase, metrics: Metrics, lr: float) -> None:
        """Records the step that was just queued, and the trace if it was the last one of it."""
        number = self.done - 1
        tokens = phase.layout.recipe.batch_size * phase.layout.recipe.length
        self._errors.attempt(lambda: self.profile.after(number))
        self._errors.attempt(lambda: self._log.push(number, metrics, lr, tokens, phase.labels))

    def save(self) -> None:
        """A checkpoint of the steps done, with their records."""
        # a step in a checkpoint is not made again: its record must be there
        self._errors.attempt(self._log.flush)
        self._errors.attempt(self._save_state)

    def _save_state(self) -> None:
        """In the background, unless there is one of these steps."""
        if self.state is not None and self.done:
            assert self._saves is not None
            self._saves.save(self.done, self.state, self._scores.heldout)

    def agree(self, stop: Stop) -> bool:
        """Whether a signal came on any rank. Raises on all if something failed on one."""
        assert self._saves is not None
        # Saves go on in the background, and all ranks must take their stages at the same point.
        self._errors.attempt(self._saves.poll)
        stop.agree(self._ranks, self._errors.take())
        return bool(stop.cause)

    def part(self, stop: Stop) -> None:
        """Saves all; then the ranks need each other no more."""
        self.save()
        self._errors.attempt(lambda: self._close_saves(True))
        self.agree(stop)
        self._ranks.part()

    def rehearse(self) -> None:
        """A step that changes nothing, if any follows."""
        if self.done == self.layout.recipe.steps:
            return
        phase = self.phase()
        axes = self.layout.axes
        rows = rows_at(self._corpus.dataset, self.done, axes)
        state = self._give_up_state()
        self.state, seconds = rehearse(
            phase.layout.recipe, phase.step, state, rows, self._device, axes
        )
        self.view.note(f"rehearsed a step in {seconds:.1f} s")
        self._log.restart_clock()

    def evaluate_some(self, stop: Stop) -> None:
        """An evaluation during the run."""
        self._errors.attempt(self._log.flush)  # its line comes before that of the evaluation
        some = self._corpus.some
        loss = self._evaluate(some, stop)
        if not isinstance(loss, tuple):
            text = f"held-out loss {loss:.4f} nats per byte on {some.num_bytes:,} bytes"
            self.view.note(f"step {self.done - 1}: {text}")

    def evaluate_all(self, stop: Stop) -> float | tuple[()]:
        """The loss on the held-out text under the final state; ``()`` if the run has stopped
        before.
        """
        if self.done != self.layout.recipe.steps:
            return ()
        if self.is_scored:
            return self._scores.heldout[self.done]
        return self._evaluate(self._corpus.all, stop)

    def _evaluate(self, scored: data.HeldOut, stop: Stop) -> float | tuple[()]:
        """Nats per byte, also written down; ``()`` if a signal came first."""
        assert self.state is not None
        # as the last step was trained: the indexer may have only watched in its phase
        layout = phase_layout(self.layout, max(self.done - 1, 0))
        with self.view.evaluating(len(scored.rows.tokens)) as advance:

            def progress(rows: int) -> None:
                # after each batch of rows, all ranks alike: an evaluation may take minutes
                advance(rows)
                if self.agree(stop):
                    raise _Stopped

            try:
                loss = heldout_loss(layout, self.state, scored, progress=progress)
            except _Stopped:
                return ()
        self._errors.attempt(lambda: self._log.write({"step": self.done - 1, HELDOUT: loss}))
        self._scores.heldout[self.done] = loss
        self._log.restart_clock()
        return loss

    def report(self, heldout: float | tuple[()]) -> Outcome:
        """How the run ended; tells the held-out loss, and of text beside it that of the 4-gram
        model of the bytes that the run trained on.
        """
        recipe = self.layout.recipe
        scored = self._corpus.all
        if isinstance(heldout, tuple):
            return Outcome(self.done, False, (), ())
        if not self._ranks.first:
            return Outcome(self.done, True, heldout, ())
        text = f"held-out loss {heldout:.4f} nats per byte on {scored.num_bytes:,} bytes"
        if isinstance(recipe.data, data.Prepared):
            self.view.note(text)
            return Outcome(self.done, True, heldout, ())
        ngram = self._scores.ngram
        # fitting takes seconds, so a run that is only scored again takes what it wrote down
        if isinstance(ngram, tuple):
            ngram = ngram_loss(recipe, self._corpus)
            self._log.write({"step": recipe.steps - 1, NGRAM: ngram})
        self.view.note(f"{text}; Witten-Bell 4-gram model of the bytes trained on: {ngram:.4f}")
        return Outcome(self.done, True, heldout, ngram)
