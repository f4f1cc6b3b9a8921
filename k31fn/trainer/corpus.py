"""The text and images of a run: rows to train on, and held-out rows to score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from k31fn import data
from k31fn.config.recipe import Recipe
from k31fn.data.image_packing import PackedDataset
from k31fn.trainer.phases import over_phases

__all__ = ["Corpus", "check_vocabulary", "load_corpus"]


class Corpus(NamedTuple):
    """What a run reads.

    Attributes:
        tokenizer: of its text.
        dataset: rows to train on, phase after phase.
        some: held-out rows to score during the run.
        all: those to score at its end.
        notes: what is to be said of it before the run begins, a line each.
    """

    tokenizer: data.Tokenizer
    dataset: data.Rows
    some: data.HeldOut
    all: data.HeldOut
    notes: tuple[str, ...] = ()


def load_corpus(recipe: Recipe) -> Corpus:
    """Reads the recipe's text, before anything is written.

    Raises:
        ValueError: it cannot be read or does not fit the model.
    """
    tokenizer = data.open_tokenizer(recipe.data.tokenizer, end=recipe.data.end)
    check_vocabulary(recipe, tokenizer, "raise it")
    if isinstance(recipe.data, data.Prepared):
        return _load_prepared(recipe, recipe.data, tokenizer)
    splits = data.load(recipe.data, tokenizer)

    # held-out text is cut in rows of the run's own length in every phase, so losses compare
    def rows(phase: Recipe) -> data.Dataset:
        return data.Dataset(splits.train, phase.batch_size, phase.length, phase.seed)

    def heldout(num_bytes: int) -> data.HeldOut:
        return data.heldout(splits.heldout, tokenizer, length=recipe.length, num_bytes=num_bytes)

    dataset = over_phases(recipe, rows)
    return Corpus(tokenizer, dataset, heldout(recipe.eval_bytes), heldout(recipe.heldout_bytes))


def check_vocabulary(recipe: Recipe, tokenizer: data.Tokenizer, fix: str) -> None:
    """Raises ValueError, with ``fix`` at its end, if the model has no row for some token."""
    # a larger vocabulary is fine: it is padded to what tensor parallelism divides
    if recipe.model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size={recipe.model.vocab_size} is less than the tokenizer's "
            f"{tokenizer.vocab_size}; {fix}"
        )


def _load_prepared(recipe: Recipe, cfg: data.Prepared, tokenizer: data.Tokenizer) -> Corpus:
    notes: dict[str, None] = {}  # each once, though every phase opens the stores

    def note(folders: Sequence[str], sources: Sequence[PackedDataset]) -> None:
        for folder, source in zip(folders, sources, strict=True):
            if source.store.unchecked:
                text = (
                    f"{folder}: {source.store.unchecked} shards of an earlier version, without "
                    "checksums, are unchecked; prepare it again to have them"
                )
                notes[text] = None

    def rows(phase: Recipe) -> data.Mixture:
        mixture = data.open_prepared(
            cfg, tokenizer, length=phase.length, batch_size=phase.batch_size, seed=phase.seed
        )
        note(cfg.train, mixture.sources)
        return mixture

    dataset = over_phases(recipe, rows)
    stores = data.open_heldout(cfg, tokenizer, length=recipe.length)
    note(cfg.heldout, stores)
    tower = recipe.model.vision
    width = stores[0].store.patch_width
    if cfg.patches and not isinstance(tower, tuple) and width != tower.pixels_per_patch:
        raise ValueError(
            f"data.train: patches of {width} bytes, model.vision takes {tower.pixels_per_patch}; "
            f"prepare the data with patches of patch_size={tower.patch_size}"
        )

    def heldout(num_bytes: int) -> data.HeldOut:
        return data.heldout_rows(stores, tokenizer, num_bytes=num_bytes)

    return Corpus(
        tokenizer,
        dataset,
        heldout(recipe.eval_bytes),
        heldout(recipe.heldout_bytes),
        tuple(notes),
    )
