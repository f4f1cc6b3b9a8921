"""Parts of a run that differ in the length of rows, in what is trained, or in the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Phase", "Span", "spans"]


@dataclass(frozen=True)
class Phase:
    """Some steps of a run; what is left out (0 or "") is as the recipe says.

    Attributes:
        steps: how many; 0, in the last phase only: to the end of the run.
        length: tokens of a row.
        batch_size: rows of a step.
        micro_batches: pieces that a step is computed in.
        trainable: "indexer" freezes the trunk. What is frozen keeps its optimiser state, for the
            phases after it.
        attention: stage of Gated DSA: ``dense_warmup``, in which the indexer only watches, or
            ``sparse``.
        peak_lr: the phase has its own schedule up to this learning rate; without it, that of the
            run goes on.
        warmup_steps: of that schedule.
        final_fraction: of ``peak_lr``, at the phase's last step, after half a cosine; 1 keeps the
            rate.
    """

    steps: int = 0
    length: int = 0
    batch_size: int = 0
    micro_batches: int = 0
    trainable: Literal["", "all", "indexer"] = ""
    attention: Literal["", "dense_warmup", "sparse"] = ""
    peak_lr: float = 0.0
    warmup_steps: int = 0
    final_fraction: float = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "length", "batch_size", "micro_batches", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least 0; 0 is what the recipe says"
                )
        # written so that NaN is refused
        if not 0 <= self.peak_lr < math.inf or not 0 <= self.final_fraction <= 1:
            raise ValueError(
                f"peak_lr={self.peak_lr} must be at least 0 and "
                f"final_fraction={self.final_fraction} in [0, 1]"
            )
        # without a schedule of its own they would be passed over in silence
        if not self.peak_lr and (self.warmup_steps or self.final_fraction != 1):
            raise ValueError(
                f"warmup_steps={self.warmup_steps}, final_fraction={self.final_fraction} without "
                "peak_lr: they are of the phase's own schedule; set peak_lr, or leave them out"
            )


class Span(NamedTuple):
    """The steps of a phase: from ``start``, up to ``stop`` without it."""

    start: int
    stop: int


def spans(phases: Sequence[Phase], num_steps: int) -> list[Span]:
    """The steps of each phase in a run of so many; phases beyond its end are left out.

    Raises:
        ValueError: a phase before the last without steps, or phases that end before the run.
    """
    for number, phase in enumerate(phases[:-1]):
        if not phase.steps:
            raise ValueError(
                f"phases[{number}].steps=0: only the last phase goes on to the end; say how many"
            )
    # the last phase may say 0: with the whole run's steps it reaches the end wherever it begins
    sizes = [phase.steps or num_steps for phase in phases]
    if phases and sum(sizes) < num_steps:
        raise ValueError(
            f"phases have {sum(sizes)} steps, steps={num_steps}: lower steps, or set "
            f"phases[{len(phases) - 1}].steps=0"
        )
    result = []
    start = 0
    for size in sizes:
        stop = min(start + size, num_steps)
        # a run of fewer steps, as one tries a recipe, has the phases that it reaches
        if start < stop:
            result.append(Span(start, stop))
        start = stop
    return result
