"""Rows of several lengths, one after the other, as a pure function of (seed, step, rank).

Rows of one length go on where the last part of that length ended; another length has rows of its
own: it cuts the same text elsewhere, in its own order. So each token is in a row of one length once
per epoch of that length.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from k31fn.data.mixture import Mixture
from k31fn.data.packing import Dataset, Example

__all__ = ["Curriculum", "Rows"]


@dataclass(frozen=True, eq=False)
class Curriculum:
    """Datasets of the same text that follow one another.

    Attributes:
        parts: each with its number of the first row (``first_row``).
        starts: first step of each, the first one 0, ascending.

    Raises:
        ValueError: no part, or starts that are not such.
    """

    parts: tuple[Dataset | Mixture, ...]
    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        if (
            len(self.parts) != len(self.starts)
            or self.starts[:1] != (0,)
            or list(self.starts) != sorted(self.starts)
        ):
            raise ValueError(
                f"starts={self.starts} of {len(self.parts)} parts must be one each, ascending "
                "from 0"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return self.parts[0].num_tokens  # all parts are of one text

    @property
    def fingerprint(self) -> str:
        """The hash of the text."""
        return self.parts[0].fingerprint

    def batch_at(
        self, step: int, *, rank: int = 0, num_ranks: int = 1, micro: int = 0, num_micro: int = 1
    ) -> Example:
        """The rows of a micro-batch of a data rank at a step, on the CPU.

        Raises:
            ValueError: as the dataset of that step, or a negative step.
        """
        # A negative step goes to the first part, which refuses it.
        number = max(bisect.bisect_right(self.starts, step) - 1, 0)
        own_step = step - self.starts[number]  # each part counts from its first row
        return self.parts[number].batch_at(
            own_step, rank=rank, num_ranks=num_ranks, micro=micro, num_micro=num_micro
        )

    def steps_of_parts(self, num_steps: int) -> Iterator[tuple[Dataset | Mixture, int]]:
        """Each part and how many of the first ``num_steps`` steps it has."""
        ends = [*self.starts[1:], num_steps]
        for part, (start, stop) in zip(self.parts, itertools.pairwise([0, *ends]), strict=True):
            # A run may end before the later parts begin.
            yield part, max(min(stop, num_steps) - start, 0)


Rows = Dataset | Mixture | Curriculum
"""What a run trains on: of text, of prepared stores, or of either in rows of several lengths."""
