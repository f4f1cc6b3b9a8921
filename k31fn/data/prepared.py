"""Prepared stores as the data of a run: a mixture to train on, and rows to score."""

from __future__ import annotations

from dataclasses import dataclass

from k31fn.data.image_packing import PackedDataset, Shape
from k31fn.data.mixture import Mixture
from k31fn.data.store import Store, open_store
from k31fn.data.tokenizer import Tokenizer, fingerprint

__all__ = ["Prepared", "open_heldout", "open_prepared"]


@dataclass(frozen=True)
class Prepared:
    """Which stores to train on.

    Attributes:
        train: their folders, such as ``("out/train",)`` after ``python -m k31fn.data prepare SOURCE
            out``.
        heldout: folders of those that the run is scored on.
        weights: share of the rows of each of ``train``; ``()``: each as many as it has.
        patches: of images in a row, a multiple of 4; 0: rows without images.
        tokenizer: what they were prepared with, as :func:`k31fn.data.open_tokenizer` takes it.
        end: the name of its end token; "": its own.
    """

    train: tuple[str, ...]
    heldout: tuple[str, ...]
    weights: tuple[float, ...] = ()
    patches: int = 0
    tokenizer: str = "bytes"
    end: str = ""

    def __post_init__(self) -> None:
        for name in ("train", "heldout"):
            if not getattr(self, name):
                raise ValueError(f"data.{name}=() names no store; give the folder of one at least")
        if self.weights and len(self.weights) != len(self.train):
            raise ValueError(
                f"data.weights={self.weights} has {len(self.weights)} shares for "
                f"{len(self.train)} stores of data.train"
            )
        if self.patches < 0 or self.patches % 4:
            raise ValueError(
                f"data.patches={self.patches} must be a multiple of 4, or 0 for rows without images"
            )


def open_prepared(
    cfg: Prepared, tokenizer: Tokenizer, *, length: int, batch_size: int, seed: int = 0
) -> Mixture:
    """The rows to train on.

    Raises:
        ValueError: a store cannot be opened, or was prepared with another tokenizer.
    """
    shape = Shape(length, cfg.patches)
    train = [PackedDataset(_open(folder, tokenizer), shape, seed) for folder in cfg.train]
    # Without weights each row of the union is as likely as any other.
    weights = cfg.weights or [float(source.num_rows) for source in train]
    return Mixture(train, weights, batch_size, seed)


def open_heldout(cfg: Prepared, tokenizer: Tokenizer, *, length: int) -> list[PackedDataset]:
    """The held-out rows (:func:`k31fn.data.heldout_rows`), whose order no seed changes.

    Raises:
        ValueError: as :func:`open_prepared`.
    """
    shape = Shape(length, cfg.patches)
    # Seed 0, whatever the run's: runs of any seed are scored on the same rows.
    return [PackedDataset(_open(folder, tokenizer), shape) for folder in cfg.heldout]


def _open(folder: str, tokenizer: Tokenizer) -> Store:
    store = open_store(folder)
    media_token = tokenizer.special_tokens.get("<|media_pad|>", -1)
    # What tells tokenizers apart at once. The path that it was prepared with may have moved.
    theirs = (store.index["vocab_size"], store.end_token, store.media_token)
    ours = (tokenizer.vocab_size, tokenizer.end_token, media_token)
    if theirs != ours:
        raise ValueError(
            f"{folder} was prepared with another tokenizer: vocabulary size, end token and media "
            f"token {theirs}, those of data.tokenizer are {ours}; it was "
            f"{store.index['prepared'].get('tokenizer')!r}"
        )
    # Another one of the same size would teach nonsense; earlier stores do not say.
    if store.index.get("tokenizer", fingerprint(tokenizer)) != fingerprint(tokenizer):
        raise ValueError(
            f"{folder} was prepared with another tokenizer of this size, or other special tokens "
            f"than data.tokenizer: it was {store.index['prepared'].get('tokenizer')!r}"
        )
    return store
