"""Whether a schedule that splits the backward may be used: the work of its parts is counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k31fn import random, tree
from k31fn.autodiff import SplitWork, check_split
from k31fn.parallel.axis import Axes
from k31fn.parallel.collectives import own_index
from k31fn.parallel.pipeline.actions import Schedule
from k31fn.parallel.pipeline.carry import StageCarry
from k31fn.parallel.pipeline.engine import Stage

__all__ = ["check_stages"]


def check_stages(
    schedule: Schedule,
    stages: Sequence[Stage],
    params: Sequence[Any],
    batch: Any,
    *,
    axis: Axes,
    carries: Sequence[StageCarry],
) -> tuple[SplitWork, ...]:
    """Runs each stage of this rank on random inputs, with its whole and with its split backward,
    and compares.

    For once before the first step of a schedule that splits. Nothing travels along ``axis``; the
    collectives inside of the stages do.

    Args:
        schedule: the table.
        stages: of this rank, one per chunk.
        params: of each of them.
        batch: a micro-batch.
        axis: of the pipeline.
        carries: what each stage of the pipeline takes.

    Returns:
        The floating-point operations of each stage.

    Raises:
        ValueError: the parts of a backward do other work than the whole (by more than 1%), or give
            other gradients; names the stage, with the figures.
    """
    found, device = [], tree.leaves(batch)[0].device
    for number, stage, own in zip(schedule.stages_of(own_index(axis)), stages, params, strict=True):

        def compute(
            params: Any, stream: Any, blocks: tuple[Tensor, ...], stage: Stage = stage
        ) -> Any:
            out = stage(params, StageCarry(stream, blocks), batch)
            return out.carry, out.loss

        try:
            found.append(check_split(compute, own, *_drawn(carries[number], device)))
        except ValueError as e:
            raise ValueError(
                f"pipeline: stage {number} cannot run a schedule that splits the backward: {e}"
            ) from e
    return tuple(found)


def _drawn(carry: StageCarry, device: torch.device) -> StageCarry:
    leaves, structure = tree.flatten(carry)
    keys = random.split(random.key(0, device=device), max(1, len(leaves)))
    values = [
        random.normal(k, tuple(x.shape)).to(x.dtype) for k, x in zip(keys, leaves, strict=False)
    ]
    return tree.unflatten(structure, values)
