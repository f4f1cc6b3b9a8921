"""Where a stack of layers is cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["stage_ranges"]


def stage_ranges(
    num_layers: int,
    num_stages: int,
    *,
    costs: Sequence[float] | None = None,
    cuts: Sequence[int] | None = None,
) -> tuple[range, ...]:
    """The layers of each stage, by global number.

    Args:
        num_layers: layers of the model.
        num_stages: stages.
        costs: of each layer; the largest sum of a stage is then as small as can be. None: numbers
            of layers that differ by one at most, the larger ones first (the last stage also has the
            head).
        cuts: the first layer of each stage but the first, which decide instead; they may repeat,
            which leaves a stage without layers, and end at ``num_layers`` for a last stage that has
            the head only.

    Raises:
        ValueError: fewer layers than stages, costs or cuts of another number, a negative cost, or
            cuts that do not ascend.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages} must be at least 1")
    if cuts is not None:
        if (
            len(cuts) != num_stages - 1
            or list(cuts) != sorted(cuts)
            or any(not 0 <= c <= num_layers for c in cuts)
        ):
            raise ValueError(
                f"cuts={list(cuts)}: {num_stages} stages of {num_layers} layers need "
                f"{num_stages - 1} ascending first "
                f"layers within 0..{num_layers}"
            )
        return tuple(range(a, b) for a, b in pairwise((0, *cuts, num_layers)))
    if num_stages > num_layers:
        raise ValueError(
            f"{num_stages} stages for {num_layers} layers: a stage has a layer at least; nearest: "
            f"{num_layers}, or "
            "give cuts"
        )
    if costs is None:
        each, more = divmod(num_layers, num_stages)
        firsts = [i * each + min(i, more) for i in range(num_stages + 1)]
        return tuple(range(a, b) for a, b in pairwise(firsts))
    if len(costs) != num_layers or any(not c >= 0 for c in costs):
        raise ValueError(
            f"costs={list(costs)}: one for each of {num_layers} layers is needed, none negative"
        )
    return _balanced(list(costs), num_stages)


def _balanced(costs: list[float], num_stages: int) -> tuple[range, ...]:
    """By dynamic programming: ``best[n]`` is the smallest largest cost of the first ``n`` layers,
    and its last cut.
    """
    sums = [0.0]
    for c in costs:
        sums.append(sums[-1] + c)
    best: list[tuple[float, int]] = [(s, 0) for s in sums]
    choices = [best]
    for stages in range(2, num_stages + 1):
        before = best
        best = [
            min((max(before[k][0], sums[n] - sums[k]), k) for k in range(stages - 1, n))
            if n >= stages
            else (0.0, 0)
            for n in range(len(sums))
        ]
        choices.append(best)
    ends = [len(costs)]
    for best in reversed(choices):
        ends.append(best[ends[-1]][1])
    return tuple(range(a, b) for a, b in pairwise(reversed(ends)))
