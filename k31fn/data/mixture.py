"""Batches from several stores by weight, as a pure function of (seed, step, rank).

Rows are numbered through the whole run. After any number of blocks of :data:`BLOCK` rows each
source has given its share of them, rounded; how many follows from the number of blocks alone.
Inside a block the order is drawn. So a row is found in constant time, however long the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from k31fn.data.image_packing import PackedDataset, collate
from k31fn.data.packing import Example, draw, permute

__all__ = ["BLOCK", "Mixture"]

BLOCK = 256  # rows; shares are kept to a row in each, so a short run has them too
_UNITS = 1 << 32  # shares are counted in whole numbers: they add up exactly, however long the run


@dataclass(frozen=True, eq=False)
class Mixture:
    """Rows of several sources.

    Attributes:
        sources: all with the same shape of rows and the same tokens.
        weights: share of the rows of each; they are divided by their sum.
        batch_size: rows of a step, over all ranks and micro-batches.
        seed: of the order of sources.
        first_row: number of the first row of step 0.

    Raises:
        ValueError: no source, a weight that is not positive, or sources that differ in shape,
            tokens or patches.
    """

    sources: Sequence[PackedDataset]
    weights: Sequence[float]
    batch_size: int
    seed: int = 0
    first_row: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"data.batch_size={self.batch_size} must be at least 1")
        if (
            not self.sources
            or len(self.sources) != len(self.weights)
            or not all(w > 0 for w in self.weights)
        ):
            raise ValueError(
                f"{len(self.sources)} sources with weights {list(self.weights)}: needed is a "
                "positive weight for each"
            )
        kinds = set()
        for source in self.sources:
            store = source.store
            kinds.add((source.shape, store.end_token, store.media_token, store.patch_width))
        # Rows of several sources share a batch.
        if len(kinds) > 1:
            raise ValueError(
                "sources differ in (length, patches), end token, media token or bytes of a patch: "
                f"{sorted(kinds)}; prepare them with one tokenizer and give them one shape"
            )

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, if the shares are those that the sources have."""
        return sum(source.num_rows for source in self.sources)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sources."""
        return sum(int(source.store.lengths.sum()) for source in self.sources)

    @property
    def fingerprint(self) -> str:
        """The hash of the indices of the stores: of what was prepared, and how."""
        # Not of the tokens: reading a store of terabytes would take hours.
        indices = json.dumps([source.store.index for source in self.sources], sort_keys=True)
        return hashlib.blake2b(indices.encode(), digest_size=16).hexdigest()

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
        size = self.batch_size // (num_ranks * num_micro)
        first = self.first_row + step * self.batch_size + (rank * num_micro + micro) * size
        rows = []
        for number in range(first, first + size):
            source, own_number = self.find(number)
            rows.append(self.sources[source].row(own_number))
        # The store is only asked for what is the same of all sources.
        return collate(rows, self.sources[0].shape, self.sources[0].store)

    def find(self, number: int) -> tuple[int, int]:
        """The source of a row, and its number in that source."""
        block, inside = divmod(number, BLOCK)
        before = self._given(block)
        counts = self._given(block + 1) - before
        # In the block the rows of source 0 come first, then those of 1, ...; the order is drawn.
        _, keys = draw(self.seed, block, BLOCK)
        place = int(permute(np.array([inside]), BLOCK, keys)[0])
        ends = np.cumsum(counts)
        source = int(np.searchsorted(ends, place, side="right"))
        first = ends[source] - counts[source]
        return source, int(before[source] + place - first)

    def _given(self, blocks: int) -> np.ndarray:
        """Rows of each source in the first blocks: its share of them, rounded so that they add
        up.
        """
        # Sums of shares are rounded and not the shares, whose roundings would not add up. Python's
        # integers do not overflow, however long the run.
        shares = np.cumsum(self.weights) / sum(self.weights)
        bounds = [0, *(round(share * _UNITS) for share in shares[:-1]), _UNITS]
        return np.diff([bound * blocks * BLOCK // _UNITS for bound in bounds])
