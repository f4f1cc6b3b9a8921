"""Steps that stand out: a loss or a gradient norm far above what it lately was.

All of it on the device.
"""

from __future__ import annotations

import torch

from k31fn import tree
from k31fn.typing import Bool, Float, Int, Tensor

__all__ = ["SpikeState", "init_spikes", "is_spike", "update_spikes"]

_WINDOW = 64  # steps
_FEWEST = 32  # of which a median is taken
_IN_A_ROW = 8  # spikes after which the level counts as a new one
_FLOOR = 0.01  # of the median: the least deviation, for runs whose numbers hardly move


@tree.dataclass
class SpikeState:
    """What the last steps that were taken had.

    Attributes:
        values: losses and gradient norms of the last ones, in a ring.
        count: steps taken since the level was last forgotten.
        in_a_row: spikes since the last step that was taken.
    """

    values: Float[Tensor, "2 W"]
    count: Int[Tensor, ""]
    in_a_row: Int[Tensor, ""]


def init_spikes(*, device: torch.device | str, dtype: torch.dtype = torch.float32) -> SpikeState:
    """The state before the first step."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    # A clone: with one tensor for two leaves, a write into one would change the other.
    return SpikeState(torch.zeros(2, _WINDOW, dtype=dtype, device=device), zero, zero.clone())


def is_spike(
    state: SpikeState, loss: Float[Tensor, ""], norm: Float[Tensor, ""], threshold: float
) -> Bool[Tensor, ""]:
    """Whether either is more than ``threshold`` deviations above its median over the last 64 steps
    taken.

    A deviation is 1.4826 times the median distance from the median, which is the standard deviation
    of a normal distribution and knows nothing of single outliers; at least a hundredth of the
    median. False before 32 steps.
    """
    new = torch.stack([loss, norm]).to(state.values.dtype)
    # Before the ring is full, its last places hold no steps.
    known = torch.arange(_WINDOW, device=new.device) < state.count
    middle = _median(state.values, known)
    deviation = 1.4826 * _median((state.values - middle[:, None]).abs(), known)
    limit = middle + threshold * torch.maximum(deviation, _FLOOR * middle.abs())
    return (new > limit).any() & (state.count >= _FEWEST)


def update_spikes(
    state: SpikeState,
    loss: Float[Tensor, ""],
    norm: Float[Tensor, ""],
    spike: Bool[Tensor, ""],
    skip: Bool[Tensor, ""],
) -> SpikeState:
    """The state after a step: with its numbers, if it was taken.

    After 8 spikes in a row what was before is forgotten: a level that stays is none, and a run must
    not stand still.

    Args:
        state: before.
        loss: of the step.
        norm: of its gradient.
        spike: whether it was one.
        skip: whether it was skipped, for this reason or another.
    """
    new = torch.stack([loss, norm]).to(state.values.dtype)
    # Selected on the device: the host does not know whether the step was taken.
    next_place = torch.arange(_WINDOW, device=new.device) == state.count % _WINDOW
    values = torch.where(next_place & ~skip, new[:, None], state.values)
    # A step that was skipped for another reason neither adds to a row of spikes nor ends it.
    in_a_row = torch.where(spike, state.in_a_row + 1, torch.where(skip, state.in_a_row, 0))
    forget = in_a_row >= _IN_A_ROW
    count = torch.where(forget, 0, state.count + (~skip).to(state.count.dtype))
    return SpikeState(values, count, torch.where(forget, 0, in_a_row))


def _median(rows: Float[Tensor, "2 W"], known: Bool[Tensor, "W"]) -> Float[Tensor, "2"]:
    """The lower median of the known values of each row; infinite if none is."""
    # Not torch.median: how many values are known is a number on the device, so no shape.
    ordered = torch.where(known, rows, torch.inf).sort(dim=1).values
    index = ((known.sum() - 1) // 2).clamp(min=0)
    return ordered.gather(1, index.expand(2, 1)).squeeze(1)
