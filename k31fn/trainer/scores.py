"""Held-out losses that a run has written down: what is known is not scored again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k31fn import data, metrics
from k31fn.config.recipe import Recipe
from k31fn.trainer.corpus import Corpus
from k31fn.trainer.ranks.agreement import Ranks

__all__ = ["HELDOUT", "METRICS", "NGRAM", "ngram_loss", "read_scores"]

METRICS = "metrics.jsonl"
HELDOUT = "heldout/loss"
NGRAM = "heldout/ngram4_loss"


@dataclass
class _Scores:
    """Losses on held-out text, nats per byte.

    Attributes:
        heldout: by steps done.
        ngram: of the 4-gram model of the bytes that the run trains on; ``()``: not known, as on
            other ranks than the first.
    """

    heldout: dict[int, float]
    ngram: float | tuple[()]


def read_scores(
    folder: Path, done: int, ranks: Ranks, note: Callable[[str], object] = lambda text: None
) -> _Scores:
    """What earlier processes of the run in ``folder`` wrote down up to step ``done``, on all ranks;
    its later records are removed.

    Args:
        folder: the run's.
        done: steps in the checkpoint that the run goes on from.
        ranks: of the run.
        note: is told of records without their checkpoint, and of a checkpoint without its records.
    """
    # every rank decides by it whether an evaluation is due, so all must know the same
    pairs, ngram, missing = ranks.on_first(lambda: _recorded(folder / METRICS, done))
    if missing:
        note(missing)
    return _Scores(dict(pairs), ngram if isinstance(ngram, float) else ())


def _recorded(file: Path, done: int) -> list[Any]:
    """As JSON data, whose objects have no numbers as keys."""
    written = metrics.read(file) if file.exists() else []
    missing = _missing(file, done, {r["step"] for r in written if "train/loss" in r})
    # steps after the checkpoint are made again, and would be there twice
    metrics.rewind(file, done)
    heldout, ngram = [], None
    for record in written:
        if record["step"] >= done:
            continue
        if HELDOUT in record:
            # a record has the number of the last step, from 0; scores are by steps done
            heldout.append([record["step"] + 1, record[HELDOUT]])
        if NGRAM in record and ngram is None:
            ngram = record[NGRAM]
    return [heldout, ngram, missing]


def _missing(file: Path, done: int, steps: set[int]) -> str:
    """What is not there of a run that someone has tidied up, in a line; empty: nothing."""
    if steps and not done:
        # a run that was killed before its first checkpoint looks the same, and is told the same
        return (
            f"{file} has {len(steps)} steps, and there is no checkpoint of them: the run begins at "
            "step 0, and they are removed"
        )
    lacking = done - len([step for step in steps if step < done])
    if lacking:
        return f"{file} lacks {lacking} of the {done} steps in the checkpoint"
    return ""


def ngram_loss(recipe: Recipe, corpus: Corpus) -> float:
    """The yardstick of a byte model: Witten-Bell, fitted on the bytes that the run trained on."""
    text = data.trained_on(corpus.dataset, recipe.steps, corpus.tokenizer)
    return data.NGram.fit(text, order=4).nats_per_byte(corpus.all.pieces, skip=1)
