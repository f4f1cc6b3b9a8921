"""The training loop: data, steps, evaluation, checkpoints, clean ends."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from k31fn import data, metrics, optim, plot, trackers
from k31fn.checkpoint import Checkpointer, CheckpointError
from k31fn.config import Recipe
from k31fn.trainer.console import View
from k31fn.trainer.log import Log, NonFiniteError
from k31fn.trainer.state import TrainState, abstract_state, init_state
from k31fn.trainer.step import heldout_loss, make_batches, make_step
from k31fn.trainer.stop import Stop

__all__ = ["Corpus", "Outcome", "load_corpus", "train"]

_METRICS, _HELDOUT, _NGRAM = "metrics.jsonl", "heldout/loss", "heldout/ngram4_loss"


class Outcome(NamedTuple):
    """How a run ended: steps done, whether that is all of them, and the held-out losses (nats per byte) then.

    The losses are ``()`` in a run that was stopped before it had both.
    """

    step: int
    complete: bool
    heldout: float | tuple[()]
    ngram: float | tuple[()]


class Corpus(NamedTuple):
    """The run's text: rows to train on, and held-out rows to score during the run and at its end."""

    tokenizer: data.ByteTokenizer
    dataset: data.Dataset
    some: data.HeldOut
    all: data.HeldOut


def load_corpus(recipe: Recipe) -> Corpus:
    """Reads the recipe's text, before anything is written.

    Raises:
        ValueError: it cannot be read or does not fit the model.
    """
    tokenizer = data.ByteTokenizer()
    if recipe.model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size={recipe.model.vocab_size} is less than the tokenizer's {tokenizer.vocab_size}; raise it"
        )
    splits = data.load(recipe.data, tokenizer)
    dataset = data.Dataset(splits.train, recipe.batch_size, recipe.length, recipe.seed)
    some, every = (
        data.heldout(splits.heldout, tokenizer, length=recipe.length, num_bytes=n)
        for n in (recipe.eval_bytes, recipe.heldout_bytes)
    )
    return Corpus(tokenizer, dataset, some, every)


def train(recipe: Recipe, corpus: Corpus, folder: Path, *, device: torch.device, view: View, stop: Stop) -> Outcome:
    """Runs ``recipe`` in its ``folder``, from its newest complete checkpoint if there is one.

    However it ends, the state after the last whole step is saved. Only what breaks off a step itself (no memory, a
    second Ctrl-C) leaves nothing newer than the last checkpoint.

    Raises:
        ValueError: the folder's checkpoint is not of this recipe.
        NonFiniteError: several steps in a row were not finite.
        CheckpointError: a checkpoint could not be written.
        OSError: something else could not be written.
    """
    with (
        Checkpointer(folder / "checkpoints", keep=recipe.keep) as checkpoints,
        _Run(recipe, corpus, folder, checkpoints, device, view) as run,
    ):
        run.steps(stop)
        outcome = run.score(stop)
    if outcome.step:
        try:
            plot.save_loss_plot(folder)
        except ImportError as error:
            view.note(str(error))
    return outcome


class _StoppedError(Exception):
    """A signal came during an evaluation."""


class _Run:
    """A run that goes on; leaving the block saves it.

    Attributes:
        done: steps done.
        state: after them; None while a step, which writes into it, is under way.
    """

    def __init__(
        self, recipe: Recipe, corpus: Corpus, folder: Path, checkpoints: Checkpointer, device: torch.device, view: View
    ) -> None:
        self._recipe, self._corpus, self._folder = recipe, corpus, folder
        self._checkpoints, self._device, self._view = checkpoints, device, view
        self._text = hashlib.blake2b(corpus.dataset.corpus.tokens.data, digest_size=16).hexdigest()
        self.done = self._saved = checkpoints.latest(on_damage=view.note) or 0
        self.state: TrainState | None = self._restored() if self.done else init_state(recipe, device)
        metrics.rewind(folder / _METRICS, self.done)
        self._scored, self._ngram = self._recorded()
        before = self.done if (folder / "events").exists() else None
        self._tracker = trackers.tensorboard(folder / "events", warn=view.note, resumed_at=before)
        view.begin(recipe, folder, self.done, corpus.dataset)
        self._log = Log(folder / _METRICS, self._tracker, view)

    def __enter__(self) -> _Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Saves what is not saved, whatever else fails; the first error is the one that is seen, others its notes."""
        self._view.end()
        first = error
        for end in (self._log.flush, self.save, self._tracker.close):
            try:
                end()
            except (NonFiniteError, CheckpointError, OSError) as another:
                first = first or another
                if str(another) not in (str(first), *getattr(first, "__notes__", ())):
                    first.add_note(str(another))
        if first is not None and error is None:
            raise first

    def steps(self, stop: Stop) -> None:
        """All steps that remain, with what happens between them; ends early after a signal."""
        recipe, o = self._recipe, self._recipe.optimizer
        step_fn = make_step(recipe)
        while self.done < recipe.steps and not stop.signal:
            if self.done and self.done % recipe.eval_every == 0 and self.done not in self._scored:
                self._evaluate_some(stop)
                continue
            lr = optim.warmup_cosine(
                self.done,
                peak=o.peak_lr,
                num_steps=recipe.steps,
                warmup_steps=min(o.warmup_steps, recipe.steps),
                final_fraction=o.final_fraction,
            )
            rows = self._corpus.dataset.batch_at(self.done)
            batches = make_batches(recipe, rows, self._device)
            assert self.state is not None
            state, self.state = self.state, None
            self.state, numbers = step_fn(state, batches, lr)
            self.done += 1
            self._log.push(self.done - 1, numbers, lr, rows.tokens.numel())
            if self.done % recipe.checkpoint_every == 0 or self.done == recipe.steps:
                self._log.flush()  # a step in a checkpoint is not made again: its record must be there
                self.save()
        self._view.end()

    def score(self, stop: Stop) -> Outcome:
        """The held-out text under the final state, beside the 4-gram model of the bytes that the run trained on."""
        recipe, scored = self._recipe, self._corpus.all
        if self.done < recipe.steps:
            return Outcome(self.done, False, (), ())
        heldout = self._scored[self.done] if self.done in self._scored else self._evaluate(scored, stop)
        if isinstance(heldout, tuple):
            return Outcome(self.done, False, (), ())
        if isinstance(self._ngram, tuple):
            seen = data.trained_on(self._corpus.dataset, recipe.steps, self._corpus.tokenizer)
            self._ngram = data.NGram.fit(seen, order=4).nats_per_byte(scored.pieces, skip=1)
            self._log.write({"step": recipe.steps - 1, _NGRAM: self._ngram})
        self._view.note(
            f"held-out loss {heldout:.4f} nats per byte on {scored.num_bytes:,} bytes; Witten-Bell 4-gram model of the "
            f"bytes trained on: {self._ngram:.4f}"
        )
        return Outcome(self.done, True, heldout, self._ngram)

    def save(self) -> None:
        """A checkpoint of the steps done, in the background, unless there is one."""
        if self.state is not None and self.done > self._saved:
            self._checkpoints.save(self.done, self.state, {"text": self._text})
            self._saved = self.done

    def _restored(self) -> TrainState:
        state = self._checkpoints.restore(self.done, abstract_state(self._recipe), device=self._device)
        if self._checkpoints.metadata(self.done).get("text") != self._text:
            self._view.note(f"the text of data.path={self._recipe.data.path!r} has changed since the checkpoint")
        return state

    def _recorded(self) -> tuple[dict[int, float], float | tuple[()]]:
        """Held-out losses that an earlier process of this run wrote down, by steps done, and the 4-gram model's."""
        file = self._folder / _METRICS
        records = metrics.read(file) if file.exists() else []
        scored = {r["step"] + 1: r[_HELDOUT] for r in records if _HELDOUT in r}
        return scored, next((r[_NGRAM] for r in records if _NGRAM in r), ())

    def _evaluate_some(self, stop: Stop) -> None:
        """An evaluation during the run."""
        self._log.flush()
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
                if stop.signal:
                    raise _StoppedError

            try:
                loss = heldout_loss(self._recipe, self.state, scored, progress=progress)
            except _StoppedError:
                return ()
        self._log.write({"step": self.done - 1, _HELDOUT: loss})
        self._scored[self.done] = loss
        self._log.restart_clock()
        return loss
