"""A gradient against central differences, extrapolated to a step of zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import random

__all__ = ["DifferenceProblem", "check_differences", "is_floating", "normal_like"]

# A central difference with step h has a truncation error of order h^2, which extrapolation over
# halved steps removes order by order, and a rounding error of about 2^-53 |f| / h, which nothing
# removes. The first step is small enough for a function that bends at the scale of its inputs to
# converge in four steps (relative error 1e-10 or better); where it does not converge (a kink lies
# within the step) the halving goes on, down to a rounding error of 1e-11 |f|.
_FIRST_STEP = 2.0**-4
_MOST_STEPS = 13


@dataclass(frozen=True)
class DifferenceProblem:
    """A scalar function of float64 leaves, and its gradient as reverse mode has it.

    ``magnitude`` is that of the terms that the scalar sums up: its rounding error is some 2^-53 of
    this.
    """

    order: int
    function: Callable[..., Tensor]
    leaves: list[Tensor]
    grads: list[Tensor]
    paths: list[str]
    magnitude: float


def check_differences(
    problem: DifferenceProblem,
    key: Tensor,
    num_directions: int,
    per_coordinate: bool,
    rtol: float,
) -> None:
    """Compares the problem's gradient with differences along random directions.

    Args:
        problem: the function and its gradient.
        key: of the directions.
        num_directions: how many.
        per_coordinate: whether each coordinate is a direction instead.
        rtol: relative tolerance of a directional derivative.

    Raises:
        AssertionError: they differ; names the leaf.
    """
    # a step in proportion to the leaf, as the first step's size supposes; zeros get one of 0.05
    scales = []
    for x in problem.leaves:
        scales.append(max(float(x.square().mean().sqrt()), 0.05) if x.numel() else 0.0)
    if per_coordinate:
        _check_coordinates(problem, scales, rtol)
        return
    for round_key in random.split(key, num_directions):
        directions = {}
        for i, normal in enumerate(normal_like(problem.leaves, round_key)):
            if normal.numel():
                directions[i] = scales[i] * normal
        _check_directions(problem, directions, rtol)


def _check_coordinates(problem: DifferenceProblem, scales: list[float], rtol: float) -> None:
    for i, leaf in enumerate(problem.leaves):
        for flat in range(leaf.numel()):
            direction = torch.zeros_like(leaf).flatten()
            direction[flat] = scales[i]
            element = list(map(int, torch.unravel_index(torch.tensor(flat), leaf.shape)))
            where = f"{problem.paths[i]!r}{element}"
            _raise_if(_compare(problem, {i: direction.view_as(leaf)}, where, rtol))


def _check_directions(
    problem: DifferenceProblem, directions: dict[int, Tensor], rtol: float
) -> None:
    """One direction through all leaves; and alone, each leaf whose own error of 1e-4 would be lost
    among the others.
    """

    def alone(i: int) -> _Result:
        return _compare(problem, {i: directions[i]}, repr(problem.paths[i]), rtol)

    together = _compare(problem, directions, "(all together)", rtol)
    if together.fault:
        # which leaf is wrong is asked only now: each answer costs as much as all together
        failed = [result for result in map(alone, directions) if result.fault]
        _raise_if(max(failed, key=lambda result: result.relative, default=together))
    for i, v in directions.items():
        if 1e-4 * _strength(problem, {i: v}) < together.tolerance:
            _raise_if(alone(i))


class _Result(NamedTuple):
    fault: str
    relative: float
    tolerance: float


def _raise_if(result: _Result) -> None:
    if result.fault:
        raise AssertionError(result.fault)


def _strength(problem: DifferenceProblem, directions: dict[int, Tensor]) -> float:
    """Size of the directional derivative, were its terms of random sign."""
    squares = 0.0
    for i, v in directions.items():
        squares += float((problem.grads[i] * v).square().sum())
    return math.sqrt(squares)


def _compare(
    problem: DifferenceProblem, directions: dict[int, Tensor], where: str, rtol: float
) -> _Result:
    reverse = 0.0
    for i, v in directions.items():
        reverse += float((problem.grads[i] * v).sum())
    strength = _strength(problem, directions)
    # a derivative that is far below the function's own terms is judged by these: it is all rounding
    wanted = rtol * max(0.1 * strength, 1e-6 * problem.magnitude)
    expected, uncertain = _directional_derivative(problem, directions, wanted)
    scale = max(abs(expected), strength, 1e-6 * problem.magnitude)
    tolerance = rtol * scale + 4 * uncertain
    error = abs(reverse - expected)
    relative = error / scale if scale else 0.0
    label = f"check_grads: order {problem.order}, leaf {where}"
    fault = ""
    if not uncertain <= rtol * scale:  # differences less certain than that prove nothing
        fault = (
            f"{label}: finite differences do not settle ({expected:.9g}, uncertain by "
            f"{uncertain:.2g}; reverse mode gives {reverse:.9g}): the function is not smooth here. "
            "A kink, a choice made outside autodiff.decision, or a cast to float32 inside?"
        )
    elif not error <= tolerance:
        fault = (
            f"{label}: reverse mode gives {reverse:.9g}, finite differences {expected:.9g} "
            f"(relative error {relative:.3g}, tolerance {tolerance / scale:.2g})"
        )
    return _Result(fault, relative, tolerance)


def _directional_derivative(
    problem: DifferenceProblem, directions: dict[int, Tensor], wanted: float
) -> tuple[float, float]:
    """Central differences, extrapolated over halved steps (Richardson), and an estimate of their
    error.

    An entry of the table is as uncertain as it is far from the two entries that it came from
    (Ridders 1982, Advances in Engineering Software 4(2)); the most certain one is taken, as soon as
    it is good enough.
    """
    best = math.nan
    best_error = math.inf
    previous: list[float] = []
    for k in range(_MOST_STEPS):
        h = _FIRST_STEP / 2**k
        row = [_central(problem, directions, h)]
        # 2^-50 and not 2^-53: the function rounds more often than in its last sum
        rounding = 2.0**-50 * problem.magnitude / h
        for j, coarse in enumerate(previous):
            row.append(row[j] + (row[j] - coarse) / (4.0 ** (j + 1) - 1))
            error = max(abs(row[-1] - row[j]), abs(row[-1] - coarse)) + rounding
            if error < best_error:
                best = row[-1]
                best_error = error
        previous = row
        if best_error <= wanted:
            break
    return best, best_error


def _central(problem: DifferenceProblem, directions: dict[int, Tensor], h: float) -> float:
    def shifted(step: float) -> list[Tensor]:
        leaves = list(problem.leaves)
        for i, v in directions.items():
            leaves[i] = leaves[i] + step * v
        return leaves

    return float(problem.function(*shifted(h)) - problem.function(*shifted(-h))) / (2 * h)


def normal_like(leaves: Sequence[Any], key: Tensor) -> list[Any]:
    """Standard normal numbers for each floating leaf, None for others."""
    normals: list[Any] = []
    for i, x in enumerate(leaves):
        normal = None
        if is_floating(x):
            # a key for each position: numbers stay the same when another leaf is added behind
            normal = random.normal(random.fold_in(key, i), tuple(x.shape), dtype=torch.float64)
            normal = normal.to(x.device)
        normals.append(normal)
    return normals


def is_floating(x: Any) -> bool:
    """Whether a leaf is a tensor that has a gradient."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
