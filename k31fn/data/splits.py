"""Documents of a source, tokenised and split into training and held-out text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from k31fn.data.packing import Corpus
from k31fn.data.sources import read
from k31fn.data.tokenizer import Tokenizer

__all__ = ["Config", "Splits", "load"]


@dataclass(frozen=True)
class Config:
    """Which text to train on.

    Attributes:
        path: ``stdlib`` (the Python standard library's source), or a folder, ``.txt``, ``.jsonl``
            or ``.parquet`` file, or a folder saved by HF ``datasets``.
        suffixes: files of a folder that are read.
        field: the field or column of records that holds the text.
        heldout_fraction: of the documents, about.
        tokenizer: as :func:`k31fn.data.open_tokenizer` takes it.
        end: the name of its end token; "": its own.

    Raises:
        ValueError: a fraction outside (0, 1), or no suffix, or one without its dot.
    """

    path: str = "stdlib"
    suffixes: tuple[str, ...] = (".txt", ".md", ".rst", ".py", ".jsonl", ".parquet")
    field: str = "text"
    heldout_fraction: float = 0.05
    tokenizer: str = "bytes"
    end: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.heldout_fraction < 1:
            raise ValueError(
                f"data.heldout_fraction={self.heldout_fraction} must be between 0 and 1, such as "
                "0.05"
            )
        if not self.suffixes or not all(s.startswith(".") for s in self.suffixes):
            raise ValueError(
                f"data.suffixes={self.suffixes} must be file suffixes with their dot, such as "
                "'.txt'"
            )


class Splits(NamedTuple):
    """The two parts share no document and no two documents are equal; ``duplicates`` were left
    out.
    """

    train: Corpus
    heldout: Corpus
    duplicates: int


def load(cfg: Config, tokenizer: Tokenizer) -> Splits:
    """Reads, splits and tokenises all documents of a source, on one core about 50 MB/s with bytes
    as tokens.

    A document is held out if the hash of its name is below ``heldout_fraction`` of the range: it
    stays where it is when others come or go. Each part is laid out in the order of the hashes, so
    neighbours in a row are unrelated.

    Raises:
        ValueError: the source cannot be read (see :func:`k31fn.data.sources.read`), or it or a part
            of it is empty.
        ImportError: pyarrow is needed and not installed.
    """
    texts: dict[bytes, tuple[float, str, np.ndarray]] = {}
    count = 0
    for name, data in read(cfg.path, suffixes=cfg.suffixes, field=cfg.field):
        count += 1
        # The first of equal documents stays: one of them in each part would be learnt by heart.
        texts.setdefault(_digest(data), (_place(name), name, tokenizer.encode(data)))
    if not texts:
        raise ValueError(
            f"data.path={cfg.path!r} is empty: no text in files with "
            f"data.suffixes={list(cfg.suffixes)}"
        )
    ordered = sorted(texts.values(), key=lambda text: text[:2])
    train: list[np.ndarray] = []
    heldout: list[np.ndarray] = []
    for place, _, tokens in ordered:
        (heldout if place < cfg.heldout_fraction else train).append(tokens)
    if not heldout or not train:
        if not heldout:
            part, fix = "held out", f"raise it above {ordered[0][0]:.6f}"
        else:
            part, fix = "left to train on", f"lower it to {ordered[-1][0]:.6f}"
        raise ValueError(
            f"data.heldout_fraction={cfg.heldout_fraction}: none of the {len(ordered)} documents "
            f"is {part}; {fix}, or give more documents"
        )
    duplicates = count - len(ordered)
    return Splits(Corpus.of(train, tokenizer), Corpus.of(heldout, tokenizer), duplicates)


def _place(name: str) -> float:
    """The hash of a name, in [0, 1)."""
    # 48 bits, which a float holds exactly. A file's name may hold bytes that are not UTF-8.
    return int.from_bytes(
        hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=6).digest()
    ) / (1 << 48)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
