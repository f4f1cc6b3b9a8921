"""Rows of text and images from a store, as a pure function of (seed, step, rank), like
:mod:`k31fn.data.packing`.

A row has two budgets: ``length`` tokens, of which the placeholders of images are a part, and
``patches`` that the vision tower sees. Documents are put into rows whole and in an order that is
drawn once: each goes into the row that is being filled, or opens the next one. A document that is
longer than a row is cut into pieces, never inside an image. So a row is made of pieces; which ones
does not depend on the epoch, only the order of the rows does.

In a row every piece is a document of the row's segments. Labels at its last token, over
placeholders and in padding are -100, and of a conversation (:mod:`k31fn.data.chat`) all that are no
part of an answer. Conversations are not cut.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from k31fn import segments
from k31fn.data.images import normalise
from k31fn.data.packing import Example, draw, permute
from k31fn.data.store import Store
from k31fn.layers import projector
from k31fn.layers.patches import Grid, Images, from_grids, num_patches, num_slots
from k31fn.typing import Tensor

__all__ = ["PackedDataset", "Row", "Shape", "collate"]

IGNORED = -100


class Shape(NamedTuple):
    """The size of rows.

    Attributes:
        length: tokens.
        patches: of images, a multiple of 4; 0 for rows without images, which then have no
            ``images``.
    """

    length: int
    patches: int = 0


class _DocumentPiece(NamedTuple):
    """Part of a document: its number, and from where to where its tokens go."""

    document: int
    start: int
    stop: int


class Row(NamedTuple):
    """What a row holds: the tokens of each piece, which of them are learnt, and grid and patches of
    each image.
    """

    pieces: list[np.ndarray]
    learnt: list[np.ndarray]
    grids: list[Grid]
    patches: list[np.ndarray]


@dataclass(frozen=True, eq=False)
class PackedDataset:
    """A store seen as an endless list of rows. Its pieces are found when it is made, in one pass
    over the lengths.

    Attributes:
        store: prepared documents.
        shape: of the rows.
        seed: of the order.

    Raises:
        ValueError: a size out of range, or an image that fits into no row; names the document.
    """

    store: Store
    shape: Shape
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shape.length < 2:
            raise ValueError(
                f"data.length={self.shape.length} must be at least 2: a row of one token predicts "
                "nothing"
            )
        if self.shape.patches < 0 or self.shape.patches % 4:
            raise ValueError(
                f"data.patches={self.shape.patches} must be a multiple of 4, or 0 for rows "
                "without images"
            )
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"data.seed={self.seed} must be in [0, 2**64); take it modulo 2**64")
        if not self.store.num_documents:
            raise ValueError(
                "the store holds no document; prepare more data, or hold out another fraction"
            )
        _ = self._rows  # now, so that a document that does not fit is an error at the start

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return len(self._rows)

    def row(self, number: int) -> Row:
        """The row of this number, counted from 0 through all epochs."""
        epoch, inside = divmod(number, self.num_rows)
        _, keys = draw(self.seed, epoch, self.num_rows)
        place = int(permute(np.array([inside]), self.num_rows, keys)[0])
        row = Row([], [], [], [])
        for piece in self._rows[place]:
            document = self.store.read(piece.document)
            row.pieces.append(document.tokens[piece.start : piece.stop])
            if self.store.answers:
                row.learnt.append(np.asarray(document.learnt[piece.start : piece.stop]))
            else:
                row.learnt.append(np.ones(piece.stop - piece.start, np.bool_))
            images = zip(document.grids, document.spans, document.patches, strict=True)
            for grid, (start, stop), patches in images:
                # An image is in one piece of its document, whole.
                if piece.start <= start and stop <= piece.stop:
                    row.grids.append(grid)
                    row.patches.append(patches)
        return row

    @functools.cached_property
    def _rows(self) -> list[list[_DocumentPiece]]:
        """The pieces of every row."""
        count = self.store.num_documents
        # Drawn once, from the numbers of an epoch that never comes: which documents share a row
        # stays the same, so all rows are known from lengths alone.
        _, keys = draw(self.seed, 1 << 63, count)
        rows: list[list[_DocumentPiece]] = []
        tokens = patches = 0
        for document in permute(np.arange(count), count, keys).tolist():
            for piece, size in self._pieces(document):
                tokens += piece.stop - piece.start
                patches += size
                if not rows or tokens > self.shape.length or patches > self.shape.patches:
                    rows.append([])
                    tokens = piece.stop - piece.start
                    patches = size
                rows[-1].append(piece)
        return rows

    def _pieces(self, document: int) -> Iterator[tuple[_DocumentPiece, int]]:
        """The pieces of a document, each with its patches: as few as fit into rows, none ending
        inside an image.
        """
        spans, grids = self.store.images_of(document)
        sizes = grids.prod(1, dtype=np.int64)
        self._check(document, spans, sizes)
        length = int(self.store.lengths[document])
        # An answer without its question teaches something else.
        if self.store.answers and (length > self.shape.length or sizes.sum() > self.shape.patches):
            raise ValueError(
                f"document {document} is a conversation of {length} tokens and {sizes.sum()} "
                f"patches, which is not cut; a row has data.length={self.shape.length}, "
                f"data.patches={self.shape.patches}: prepare the data with "
                f"--max-length {self.shape.length}, or make rows longer"
            )
        start = 0
        image = 0  # the first one that no piece has yet
        while start < length:
            stop = min(start + self.shape.length, length)
            used = 0
            while image < len(spans) and spans[image, 0] < stop:
                # The piece ends before the first image that does not fit, and the next begins with
                # it.
                if spans[image, 1] > stop or used + sizes[image] > self.shape.patches:
                    stop = int(spans[image, 0])
                    break
                used += int(sizes[image])
                image += 1
            yield _DocumentPiece(document, start, stop), used
            start = stop

    def _check(self, document: int, spans: np.ndarray, sizes: np.ndarray) -> None:
        for (start, stop), size in zip(spans.tolist(), sizes.tolist(), strict=True):
            if stop - start > self.shape.length or size > self.shape.patches:
                raise ValueError(
                    f"document {document} has an image of {stop - start} tokens and {size} "
                    f"patches, more than a row: data.length={self.shape.length}, "
                    f"data.patches={self.shape.patches}; raise them, or prepare the data with "
                    "fewer patches per image"
                )


def collate(rows: Sequence[Row], shape: Shape, store: Store) -> Example:
    """A batch of rows, on the CPU; ``store`` is one of those they are from, for its tokens and
    sizes.
    """
    tokens = np.zeros((len(rows), shape.length), np.int64)
    learnt = np.zeros((len(rows), shape.length), np.bool_)
    lengths: list[list[int]] = []
    for line, marks, row in zip(tokens, learnt, rows, strict=True):
        lengths.append(list(map(len, row.pieces)))
        count = sum(lengths[-1])
        line[:count] = np.concatenate(row.pieces)
        marks[:count] = np.concatenate(row.learnt)
    packing = segments.from_lengths(lengths, shape.length)
    inputs = torch.from_numpy(tokens)
    labels = segments.next_token_labels(inputs, packing)
    # Whether the label's own token is learnt, which stands one place further.
    labels = labels.masked_fill(~torch.from_numpy(learnt).roll(-1, dims=1), IGNORED)
    # Features, not tokens, are what stands in the placeholders: there is nothing to predict.
    if store.media_token >= 0:
        labels = labels.masked_fill(labels == store.media_token, IGNORED)
    images = _images(rows, inputs, shape, store) if shape.patches else ()
    return Example(inputs, labels, packing, images)


def _images(rows: Sequence[Row], tokens: Tensor, shape: Shape, store: Store) -> Images:
    patches = from_grids([row.grids for row in rows], shape.patches)
    pixels = torch.zeros(len(rows), shape.patches, store.patch_width)
    for line, row in zip(pixels, rows, strict=True):
        if row.patches:
            # Bytes until here: a store of float32 would be four times as large.
            values = normalise(np.concatenate(row.patches))
            assert len(values) == sum(map(num_patches, row.grids)), (
                "a store's grids and patches disagree"
            )
            line[: len(values)] = values
    slots = projector.slots(tokens, store.media_token)
    # A placeholder more or less would give every image after it the features of another.
    placeholders = slots.amax(1) + 1
    wanted = torch.tensor([sum(map(num_slots, row.grids)) for row in rows])
    if not torch.equal(placeholders, wanted):
        raise ValueError(
            f"rows have {placeholders.tolist()} placeholders for images of {wanted.tolist()} slots"
        )
    return Images(pixels, patches, slots)
