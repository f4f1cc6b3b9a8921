"""The check that a schedule which splits the backward may be used: the work of its parts is
counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k31fn import random, tree
from k31fn.autodiff.split_vjp import SplitWork, check_split
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
    works: list[SplitWork] = []
    device = tree.leaves(batch)[0].device
    numbers = schedule.stages_of(own_index(axis))
    for number, stage, weights in zip(numbers, stages, params, strict=True):

        def compute(
            params: Any, stream: Any, blocks: tuple[Tensor, ...], stage: Stage = stage
        ) -> Any:
            out = stage(params, StageCarry(stream, blocks), batch)
            return out.carry, out.loss

        # Random inputs, for each stage alone: the real ones would need a pipeline that runs. The
        # work does not depend on them, and wrong gradients show at any.
        inputs = _draw_inputs(carries[number], device)
        try:
            works.append(check_split(compute, weights, *inputs))
        except ValueError as e:
            raise ValueError(
                f"pipeline: stage {number} cannot run a schedule that splits the backward: {e}"
            ) from e
    return tuple(works)


def _draw_inputs(carry: StageCarry, device: torch.device) -> StageCarry:
    leaves, structure = tree.flatten(carry)
    # At least one key, for the first stage takes an empty carry and split refuses 0: then not all
    # keys have a leaf.
    keys = random.split(random.key(0, device=device), max(1, len(leaves)))
    values: list[Tensor] = []
    for key, x in zip(keys, leaves, strict=False):
        values.append(random.normal(key, tuple(x.shape)).to(x.dtype))
    return tree.unflatten(structure, values)
