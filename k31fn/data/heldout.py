"""A fixed sample of held-out text, and the bytes that a run has trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from k31fn import tree
from k31fn.data.curriculum import Curriculum, Rows
from k31fn.data.image_packing import PackedDataset, collate
from k31fn.data.packing import Corpus, Dataset, Example, pieces
from k31fn.data.tokenizer import CHAT_NAMES, Tokenizer
from k31fn.typing import Tensor

__all__ = ["HeldOut", "heldout", "heldout_rows", "trained_on"]

_CHUNK = 256  # rows at a time: enough for numpy, few enough to stop soon after enough bytes


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Rows to score a model on: nats per byte is the sum of its token losses divided by
    ``num_bytes``.

    Attributes:
        rows: as in training, but tokens that are no bytes are not scored either (label -100), nor
            the names of the elements of a conversation.
        num_bytes: bytes of the tokens that are scored, that is, all but the first token of each
            piece.
        pieces: the bytes of each piece of a document in the rows, for a model of another kind; none
            of prepared data.
    """

    rows: Example
    num_bytes: int
    pieces: tuple[bytes, ...]


def heldout(
    corpus: Corpus, tokenizer: Tokenizer, *, length: int, num_bytes: int = 200_000
) -> HeldOut:
    """The first rows of the corpus, in an order that depends on nothing else, in which
    ``num_bytes`` are scored.

    All rows if that is more than there is. The order has a seed of its own: runs of any seed score
    the same bytes.

    Raises:
        ValueError: ``num_bytes`` is not positive, or no token of the corpus can be scored.
    """
    # Seed 0, whatever the run's: else two runs would be scored on other bytes.
    dataset = Dataset(corpus, batch_size=1, length=length)
    rows, total = _first(_chunks(dataset, dataset.num_rows), tokenizer, num_bytes)
    return HeldOut(rows, total, tuple(pieces(rows, tokenizer)))


def heldout_rows(
    sources: Sequence[PackedDataset], tokenizer: Tokenizer, *, num_bytes: int = 200_000
) -> HeldOut:
    """The first rows of prepared data, of each source in turn and none twice, in which
    ``num_bytes`` are scored.

    Raises:
        ValueError: as :func:`heldout`.
    """
    rows, total = _first(_rows_in_turn(sources), tokenizer, num_bytes)
    return HeldOut(rows, total, ())


def _rows_in_turn(sources: Sequence[PackedDataset]) -> Iterator[Example]:
    """Row 0 of each source, then row 1 of each, until all have given all."""
    for number in range(max(source.num_rows for source in sources)):
        for source in sources:
            if number < source.num_rows:
                yield collate([source.row(number)], source.shape, source.store)


def _first(chunks: Iterable[Example], tokenizer: Tokenizer, num_bytes: int) -> tuple[Example, int]:
    """The first rows in which so many bytes are scored, and how many there are."""
    if num_bytes < 1:
        raise ValueError(f"num_bytes={num_bytes} must be at least 1")
    examples: list[Example] = []
    total = 0
    for chunk in chunks:
        labels = _bytes_only(chunk, tokenizer)
        # Labels that are ignored are no tokens, so they have no bytes.
        bytes_upto = total + np.cumsum([len(tokenizer.decode_bytes(row)) for row in labels])
        enough = int(np.searchsorted(bytes_upto, num_bytes)) + 1
        scored = dataclasses.replace(chunk, labels=labels)
        examples.append(tree.map(lambda x, n=enough: x[:n], scored))
        total = int(bytes_upto[min(enough, len(bytes_upto)) - 1])
        if total >= num_bytes:
            break
    if not total:
        raise ValueError(
            f"the held-out text of {len(examples)} rows has no token to score: too short"
        )
    return tree.map(lambda *parts: torch.cat(parts), *examples), total


def _bytes_only(rows: Example, tokenizer: Tokenizer) -> Tensor:
    """The labels that are text: no special tokens, and of conversations no names of elements, which
    say nothing.
    """
    names = tokenizer.special_tokens
    special = torch.tensor([tokenizer.end_token, *names.values()])
    labels = rows.labels.masked_fill(torch.isin(rows.labels, special), -100)
    if not {*CHAT_NAMES} <= names.keys():
        return labels
    # The special token before each label: a name stands behind one that opens or closes.
    places = torch.arange(rows.tokens.shape[1]).where(torch.isin(rows.tokens, special), 0)
    last = rows.tokens.gather(1, places.cummax(1).values)
    opens, closes = CHAT_NAMES[:2]
    in_name = torch.isin(last, torch.tensor([names[opens], names[closes]]))
    return labels.masked_fill(in_name, -100)


def trained_on(dataset: Rows, num_steps: int, tokenizer: Tokenizer) -> Iterator[bytes]:
    """The pieces of documents in the batches of steps 0 to num_steps - 1.

    Each byte of the corpus is in them at most once for each length of rows; after an epoch that is
    the whole corpus. The dataset is of text: of prepared data the documents are not known as bytes.
    """
    if isinstance(dataset, Curriculum):
        parts = list(dataset.steps_of_parts(num_steps))
    else:
        parts = [(dataset, num_steps)]
    # Parts of one length go on in the same rows, so the last of them has the most.
    rows_used: dict[int, tuple[Dataset, int]] = {}
    for part, steps in parts:
        assert isinstance(part, Dataset)
        num_rows = part.first_row + steps * part.batch_size
        _, before = rows_used.get(part.length, (part, 0))
        rows_used[part.length] = part, max(num_rows, before)
    for part, num_rows in rows_used.values():
        # An epoch is the whole corpus; further ones would repeat it.
        for chunk in _chunks(part, min(num_rows, part.num_rows)):
            yield from pieces(chunk, tokenizer)


def _chunks(dataset: Dataset, num_rows: int) -> Iterator[Example]:
    for first in range(0, num_rows, _CHUNK):
        yield dataset.rows(np.arange(first, min(first + _CHUNK, num_rows)))
