"""What crosses a cut between two stages.

A stage hands on a stream, which every stage replaces (a running sum, or several), and blocks, which
are only ever appended to and read by all later stages (block attention residuals). Stage ``s`` lies
on rank ``s % num_ranks``, so with several chunks a rank meets a micro-batch again, and has some of
its blocks already: only the others are sent.

In the backward the same tensors go the other way. A block's cotangent collects, on each rank, what
that rank's stages deposit, and leaves with the message that answers the one with which the block
came; so it reaches the stage that made the block as the sum over all stages that read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from k31fn import tree

__all__ = ["StageCarry", "WireFormat"]


class StageCarry(NamedTuple):
    """The tensors that a stage takes and gives; the first takes, and the last gives, an empty one.

    Attributes:
        stream: a tree of floating tensors.
        blocks: all tensors appended so far, in order; a stage returns what it took and its own
            after them.
    """

    stream: Any = ()
    blocks: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class WireFormat:
    """Who has which block.

    Attributes:
        carries: what each stage takes; shapes and dtypes count, meta tensors will do.
        num_ranks: ranks of the pipeline.
    """

    carries: tuple[StageCarry, ...]
    num_ranks: int

    def num_blocks(self, stage: int) -> int:
        """Blocks that a stage takes; after the last stage as many as it took, for what it makes
        goes nowhere.
        """
        return len(self.carries[min(stage, len(self.carries) - 1)].blocks)

    def fresh(self, stage: int) -> range:
        """Blocks that the rank of a stage has not had before: those appended since its stage before
        this one ended.
        """
        # What its last stage took and appended itself is on the rank already, so it is not sent.
        before = stage - self.num_ranks + 1
        return range(self.num_blocks(before) if before > 0 else 0, self.num_blocks(stage))

    def new(self, stage: int) -> range:
        """Blocks that a stage appends."""
        return range(self.num_blocks(stage), self.num_blocks(stage + 1))

    def check(self, stage: int, stream: Any, blocks: Sequence[Tensor]) -> None:
        """Refuses what a stage gives if it is not what the next one takes.

        Args:
            stage: by global number.
            stream: that it gives.
            blocks: that it has appended.

        Raises:
            ValueError: another structure of the stream, another number of new blocks, or another
                shape or dtype.
        """
        after = self.carries[stage + 1] if stage + 1 < len(self.carries) else StageCarry()
        expected_blocks = tuple(after.blocks[i] for i in self.new(stage))
        # The receiver's buffers are made by the carries: another shape would arrive as garbage.
        actual = _describe(StageCarry(stream, tuple(blocks)))
        expected = _describe(StageCarry(after.stream, expected_blocks))
        if actual != expected:
            raise ValueError(
                f"pipeline: stage {stage} gives {actual} as its stream and new blocks, but by the "
                f"carries the next stage takes {expected}"
            )

    def message(self, stage: int) -> list[Tensor]:
        """The tensors that travel into a stage, and as cotangents out of it: the stream's leaves,
        then the fresh blocks.
        """
        carry = self.carries[stage]
        tensors = tree.leaves(carry.stream)
        tensors += [carry.blocks[i] for i in self.fresh(stage)]
        return tensors

    def nbytes(self, stage: int) -> int:
        """Bytes of that message."""
        return sum(x.nbytes for x in self.message(stage))

    def parts(self, stage: int, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """The stream and the fresh blocks of a message."""
        leaves, structure = tree.flatten(self.carries[stage].stream)
        return tree.unflatten(structure, tensors[: len(leaves)]), list(tensors[len(leaves) :])


def _describe(carry: StageCarry) -> list[tuple[str, str]]:
    """Path, shape and dtype of each leaf."""
    rows: list[tuple[str, str]] = []
    for path, x in tree.flatten_with_paths(carry):
        rows.append((path, f"{list(x.shape)} {x.dtype}"))
    return rows
