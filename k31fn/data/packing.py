"""Training rows as a pure function of (seed, step, rank): there is no iterator, so resuming needs
the step alone.

A :class:`Corpus` is one stream of tokens, document after document, each ending in the end token. An
epoch cuts the stream, taken as a circle, into rows of ``length`` from a phase drawn for the epoch
(so other tokens meet at a cut in the next one), and visits the rows in an order drawn for the
epoch. Every token is in one row of an epoch, once; what the last row lacks is padding. Inside a row
each piece of a document is a document of the row's :class:`Segments`: it sees nothing of its
neighbours, nor of its own part that fell into another row.

Rows are numbered through all epochs: step s of batch size B has the rows s B to s B + B - 1. Ranks
and micro-batches take contiguous parts of that list, so what a step trains on does not depend on
how many there are.

Phase and order come from Philox4x64-10 (NumPy's, whose streams do not change between versions)
under the key (seed, epoch). The order is an alternating Feistel network: over n = a b numbers x =
left b + right, with a about sqrt(n), ``left += F(right) mod a`` and ``right += F(left) mod b`` in
turn; a b slightly more than n is brought back by applying it again to what falls outside. So a row
is found in constant time and memory, whatever the corpus.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from k31fn import segments, tree
from k31fn.data.tokenizer import Tokenizer
from k31fn.typing import Int, Tensor

__all__ = ["Corpus", "Dataset", "Example", "draw", "permute", "pieces"]

_ROUNDS = 8  # of the Feistel network, four for each half


@tree.dataclass
class Example:
    """Rows to train on.

    Attributes:
        tokens: 0 where the row is padding.
        labels: the next token of the same piece; -100 (ignored) at its last token and in padding.
        segments: the pieces of documents in each row.
        images: of the rows (:class:`k31fn.layers.patches.Images`), or ``()`` where data has none.
    """

    tokens: Int[Tensor, "B T"]
    labels: Int[Tensor, "B T"]
    segments: segments.Segments
    images: Any = ()


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised documents in one array. Build it with :meth:`of`.

    Attributes:
        tokens: all documents, each with its end token; uint16 if the vocabulary allows it, else
            uint32.
        offsets: int64; document i is ``tokens[offsets[i]:offsets[i + 1]]``.
    """

    tokens: np.ndarray
    offsets: np.ndarray

    @property
    def num_documents(self) -> int:
        """How many documents."""
        return len(self.offsets) - 1

    @classmethod
    def of(cls, documents: Sequence[np.ndarray], tokenizer: Tokenizer) -> Corpus:
        """Lays out the tokens of documents (from ``tokenizer.encode``) in their order and ends
        each.

        Raises:
            ValueError: there is no document, or one has no token (named by its index).
        """
        if not documents:
            raise ValueError("documents: none; a corpus needs at least one")
        lengths = np.array([0, *map(len, documents)], np.int64)
        lengths[1:] += 1  # the end token
        offsets = np.cumsum(lengths)
        tokens = np.empty(offsets[-1], np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        for index, (start, document) in enumerate(zip(offsets[:-1], documents, strict=True)):
            if not len(document):
                raise ValueError(f"documents[{index}] is empty; leave it out")
            tokens[start : start + len(document)] = document
        tokens[offsets[1:] - 1] = tokenizer.end_token
        return cls(tokens, offsets)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A corpus seen as an endless list of batches.

    Attributes:
        corpus: the documents.
        batch_size: rows of a step, over all ranks and micro-batches.
        length: tokens of a row.
        seed: of the cuts and the order.
        first_row: number of the first row of step 0.

    Raises:
        ValueError: a size or seed out of range.
    """

    corpus: Corpus
    batch_size: int
    length: int
    seed: int = 0
    first_row: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"data.batch_size={self.batch_size} must be at least 1")
        if self.length < 2:
            raise ValueError(
                f"data.length={self.length} must be at least 2: a row of one token predicts nothing"
            )
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"data.seed={self.seed} must be in [0, 2**64); take it modulo 2**64")

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return -(-len(self.corpus.tokens) // self.length)

    @property
    def num_tokens(self) -> int:
        """Tokens of an epoch."""
        return len(self.corpus.tokens)

    @property
    def fingerprint(self) -> str:
        """The hash of the tokens: another one if any differs."""
        return hashlib.blake2b(self.corpus.tokens.data, digest_size=16).hexdigest()

    def batch_at(
        self, step: int, *, rank: int = 0, num_ranks: int = 1, micro: int = 0, num_micro: int = 1
    ) -> Example:
        """The rows of a micro-batch of a data rank at a step, on the CPU.

        Raises:
            ValueError: the batch size is not divided by ``num_ranks * num_micro``, or a number is
                out of its range.
        """
        if num_ranks < 1 or num_micro < 1 or self.batch_size % (num_ranks * num_micro):
            raise ValueError(
                f"data.batch_size={self.batch_size} must be a multiple of num_ranks={num_ranks} * "
                f"num_micro={num_micro}"
            )
        if step < 0 or not 0 <= rank < num_ranks or not 0 <= micro < num_micro:
            raise ValueError(
                f"step={step} must be at least 0, rank={rank} in [0, {num_ranks}) and "
                f"micro={micro} in [0, {num_micro})"
            )
        # Ranks first, then micro-batches: each micro-batch is a run of neighbouring rows, and the
        # rows of a step are the same however they are cut.
        size = self.batch_size // (num_ranks * num_micro)
        first = self.first_row + step * self.batch_size + (rank * num_micro + micro) * size
        return self.rows(np.arange(first, first + size))

    def rows(self, numbers: np.ndarray) -> Example:
        """The rows of these numbers, counted from 0 through all epochs."""
        shape = (len(numbers), self.length)
        tokens = np.zeros(shape, np.int64)
        starts = np.zeros(shape, np.bool_)  # where a piece of a document begins
        used = np.zeros(len(numbers), np.int64)  # tokens of each row; the rest is padding
        epochs, inside = np.divmod(numbers, self.num_rows)
        # A batch may reach into the next epoch, which has another phase and order.
        for epoch in np.unique(epochs):
            phase, keys = draw(self.seed, int(epoch), len(self.corpus.tokens))
            chosen = np.flatnonzero(epochs == epoch)
            places = permute(inside[chosen], self.num_rows, keys)
            for row, place in zip(chosen, places, strict=True):
                used[row] = self._fill(tokens[row], starts[row], phase, int(place))
        starts[:, 0] = True  # a row begins anywhere in a document
        ids = np.cumsum(starts, axis=1) * (np.arange(self.length) < used[:, None])
        packing = segments.from_ids(torch.from_numpy(ids))
        inputs = torch.from_numpy(tokens)
        return Example(inputs, segments.next_token_labels(inputs, packing), packing)

    def _fill(self, tokens: np.ndarray, starts: np.ndarray, phase: int, place: int) -> int:
        """Writes the row at ``place`` of the epoch's circle and marks where documents start;
        returns its length.
        """
        stream = self.corpus.tokens
        offsets = self.corpus.offsets
        count = min(self.length, len(stream) - place * self.length)
        filled = 0
        while filled < count:  # at most twice: the circle closes at a document's end
            begin = (phase + place * self.length + filled) % len(stream)
            size = min(count - filled, len(stream) - begin)
            tokens[filled : filled + size] = stream[begin : begin + size]
            low, high = np.searchsorted(offsets, (begin, begin + size))
            starts[filled + offsets[low:high] - begin] = True
            filled += size
        return count


def pieces(example: Example, tokenizer: Tokenizer) -> Iterator[bytes]:
    """The bytes of each piece of a document in the rows, in order; a piece of the end token alone
    is left out.
    """
    for tokens, ids in zip(example.tokens.numpy(), example.segments.ids.numpy(), strict=True):
        bounds = np.flatnonzero(np.diff(ids, prepend=0, append=0))
        for start, stop in itertools.pairwise(bounds):
            if not ids[start]:
                continue  # padding
            data = tokenizer.decode_bytes(tokens[start:stop])
            if data:
                yield data


def draw(seed: int, epoch: int, size: int) -> tuple[int, np.ndarray]:
    """The phase in [0, size) and the round keys of an epoch."""
    # Raw words and not NumPy's distributions, whose streams may change between versions.
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(1 + _ROUNDS)
    return int(words[0] % np.uint64(size)), words[1:]


def permute(numbers: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of [0, size) applied to ``numbers``, by the Feistel network of the module's
    docstring.
    """
    # The smallest a b >= size with a about its root: little falls outside.
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    moduli = np.array([a, b], np.uint64)
    out = numbers.astype(np.uint64)
    outside = np.ones(len(out), np.bool_)
    while outside.any():
        halves = list(np.divmod(out[outside], moduli[1]))
        for number, key in enumerate(keys):
            one = number % 2
            mixed = _mix(halves[1 - one] + key) % moduli[one]
            halves[one] = (halves[one] + mixed) % moduli[one]
        out[outside] = halves[0] * moduli[1] + halves[1]
        # Applied again to what is outside: a bijection of a b numbers that comes back in the end.
        outside = out >= size
    return out.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: a bijection of 64-bit words in which each bit depends on every
    other.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
