"""The cuts of a stack of layers into stages."""

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
        within = all(0 <= cut <= num_layers for cut in cuts)
        if len(cuts) != num_stages - 1 or list(cuts) != sorted(cuts) or not within:
            raise ValueError(
                f"cuts={list(cuts)}: {num_stages} stages of {num_layers} layers need "
                f"{num_stages - 1} ascending first layers within 0..{num_layers}"
            )
        return _ranges([0, *cuts, num_layers])
    # Only cuts by hand may leave a stage empty: it costs a rank, and saves nothing by itself.
    if num_stages > num_layers:
        raise ValueError(
            f"{num_stages} stages for {num_layers} layers: a stage has a layer at least; nearest: "
            f"{num_layers}, or give cuts"
        )
    if costs is None:
        size, num_larger = divmod(num_layers, num_stages)
        return _ranges([i * size + min(i, num_larger) for i in range(num_stages + 1)])
    # Not c < 0: a NaN, which compares to nothing, is refused too.
    if len(costs) != num_layers or any(not c >= 0 for c in costs):
        raise ValueError(
            f"costs={list(costs)}: one for each of {num_layers} layers is needed, none negative"
        )
    return _balanced(list(costs), num_stages)


def _ranges(ends: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(first, end) for first, end in pairwise(ends))


def _balanced(costs: list[float], num_stages: int) -> tuple[range, ...]:
    """Ranges by dynamic programming: ``best[n]`` is the smallest largest cost of the first ``n``
    layers, and its last cut.

    Exact, and cheap at the size of a model; layers differ too much (dense, experts, indexer) for
    equal numbers of them to be near it.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: list[tuple[float, int]] = [(total, 0) for total in sums]  # with one stage
    choices = [best]
    for num_used in range(2, num_stages + 1):
        with_fewer = best
        best = []
        for n, total in enumerate(sums):
            # Fewer layers than stages: never chosen, for each stage has a layer.
            if n < num_used:
                best.append((0.0, 0))
                continue
            # Ties go to the earliest cut, on every rank alike.
            options = [
                (max(with_fewer[cut][0], total - sums[cut]), cut) for cut in range(num_used - 1, n)
            ]
            best.append(min(options))
        choices.append(best)
    # Back from the end: the last cut of all layers, then the last one of those before it, ...
    ends = [len(costs)]
    for best in reversed(choices):
        _, cut = best[ends[-1]]
        ends.append(cut)
    return _ranges(ends[::-1])
