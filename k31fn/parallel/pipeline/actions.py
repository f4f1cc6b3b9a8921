"""A pipeline schedule is data: for each rank, the actions that it performs, in order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Action", "Kind", "Schedule"]

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
"""``backward_input`` gives the cotangent of a stage's input, ``backward_weight`` the rest,
``backward`` all.
"""


# A tuple, and below a frozen dataclass: both are keys, of messages, ends and cached checks.
class Action(NamedTuple):
    """One step of a rank: what it does with a micro-batch on one of its stages.

    Attributes:
        kind: forward, backward or a part of it.
        micro_batch: its number.
        stage: global number of the stage.
    """

    kind: Kind
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} on stage {self.stage}"


@dataclass(frozen=True)
class Schedule:
    """A table of actions.

    Stage ``s`` lies on rank ``s % num_ranks`` (loop placement): with several chunks a micro-batch
    goes round.

    Attributes:
        num_ranks: ranks of the pipeline.
        num_chunks: stages per rank.
        num_micro_batches: micro-batches of a step.
        rows: the actions of each rank, in order.
    """

    num_ranks: int
    num_chunks: int
    num_micro_batches: int
    rows: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.num_ranks * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """The rank on which a stage lies."""
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, by chunk."""
        return tuple(range(rank, self.num_stages, self.num_ranks))

    @property
    def split(self) -> bool:
        """Says whether any backward is split."""
        kinds = {action.kind for action in itertools.chain(*self.rows)}
        return "backward_input" in kinds
