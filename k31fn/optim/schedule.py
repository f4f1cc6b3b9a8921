"""Learning rates as functions of the step."""

from __future__ import annotations

import math

__all__ = ["warmup_cosine", "warmup_stable_decay"]


def warmup_cosine(
    step: int, *, peak: float, num_steps: int, warmup_steps: int = 0, final_fraction: float = 0.1
) -> float:
    """Linear warm-up to ``peak``, then half a cosine down to ``final_fraction * peak``.

    Step s of the warm-up has ``peak (s + 1) / warmup_steps``: none has 0, and the last one of it
    has the peak. The last step, ``num_steps - 1``, has the final value, and so have steps beyond
    it.

    Args:
        step: from 0.
        peak: largest value.
        num_steps: length of the run.
        warmup_steps: at most ``num_steps``; 0: the first step has the peak.
        final_fraction: of the peak, in [0, 1].

    Raises:
        ValueError: a number out of its range.
    """
    _check(step, peak, num_steps, warmup_steps, final_fraction)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    top = max(warmup_steps - 1, 0)  # the step that has the peak
    progress = min((step - top) / max(num_steps - 1 - top, 1), 1.0)
    return peak * (final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * progress)) / 2)


def warmup_stable_decay(
    step: int,
    *,
    peak: float,
    num_steps: int,
    warmup_steps: int = 0,
    decay_steps: int,
    final_fraction: float = 0.0,
) -> float:
    """Linear warm-up to ``peak``, which holds until the last ``decay_steps``, then a straight line
    down (WSD).

    Hu et al. 2024, arXiv 2404.06395; the line is that of Hagele et al. 2024, arXiv 2405.18392. A
    run can be made longer from any step of the flat part. The warm-up is that of
    :func:`warmup_cosine`. Step s of the decay, from 1, has ``peak (1 - (1 - final_fraction) s /
    decay_steps)``: the last one, ``num_steps - 1``, has the final value, and so have steps beyond
    it.

    Args:
        step: from 0.
        peak: largest value.
        num_steps: length of the run.
        warmup_steps: at most ``num_steps``.
        decay_steps: at most ``num_steps - warmup_steps``; 0: the peak holds to the end.
        final_fraction: of the peak, in [0, 1].

    Raises:
        ValueError: a number out of its range.
    """
    _check(step, peak, num_steps, warmup_steps, final_fraction)
    if not 0 <= decay_steps <= num_steps - warmup_steps:
        raise ValueError(
            f"decay_steps={decay_steps} must be in [0, {num_steps - warmup_steps}]: "
            f"num_steps={num_steps} without warmup_steps={warmup_steps}"
        )
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = min(step, num_steps - 1) - (num_steps - 1 - decay_steps)  # steps of the decay, from 1
    if not decay_steps or done <= 0:
        return peak
    return peak * (1 - (1 - final_fraction) * done / decay_steps)


def _check(
    step: int, peak: float, num_steps: int, warmup_steps: int, final_fraction: float
) -> None:
    if step < 0 or num_steps < 1 or not 0 <= warmup_steps <= num_steps:
        raise ValueError(
            f"step={step} must be at least 0, num_steps={num_steps} at least 1, "
            f"warmup_steps={warmup_steps} in [0, num_steps]"
        )
    if not (peak > 0 and 0 <= final_fraction <= 1):
        raise ValueError(f"peak={peak} must be positive, final_fraction={final_fraction} in [0, 1]")
