"""Whether two implementations compute the same gradient up to rounding: what a paired run decides,
and on what.

At some steps (probes) both sides differentiate the same loss at the same parameters, those of side
a; with ``g_a`` and ``g_b`` the gradients of one parameter and ``g`` the same gradient by the
references in the next wider dtype,

    scale = < g, g_b - g_a > / < g, g >        error_x = || g_x - g || / || g ||

Rounding errors do not know ``g``: their product with it averages out over the elements of a
parameter and over the probes, so ``scale`` finds a gradient that is 1% too large under noise many
times that. (``g_a`` in the place of ``g`` would not do: its own noise e makes the regression of
``g_b`` on it too small by ``e^2``, 1% for a noise of 10%.) The probes are cut into at most 12
blocks in time, since neighbours share most of their parameters; the medians of the blocks, which a
flipped route in one probe does not move, give a mean and its standard error.

A parameter differs if its scale is off by more than 0.004 and by more than chance makes it once in
40,000 (Student's t: 7 standard errors for 12 blocks, 15 for 6), or if side b's error is more than
0.005 and more than 4 times side a's, and is no rounding of larger gradients that cancelled. If its
noise is larger than its gradient, or 1% is less than 1.5 times what chance allows, it is
``unresolved``: a gradient of 1.01 times its value might not be seen in it.

A gradient or a loss that is not finite, of either side or by the references, in any probe, is a
difference: nothing can be said of it, so the sides do not agree.

A gradient of an operator may be a small part of those that a parameter adds up. So each operator
that the sides compute differently is also compared alone (:mod:`k31fn.pair.operators`), by the same
rule, with its arguments as parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from k31fn import tree

__all__ = [
    "LEAST_PROBES",
    "REVERSED",
    "SMALLEST_SCALE",
    "Leaf",
    "Probes",
    "loss_differs",
    "losses_apart",
    "not_finite",
    "size",
]

LEAST_PROBES = 6
REVERSED = "on side a with the rows reversed"

_BLOCKS = 12  # more would be too short for a median to pass over a flipped route
# the smallest scale and error that count: below half a percent a training run does not care
SMALLEST_SCALE = 0.004
_ERROR = 0.005
# Student's t of one chance in 40,000, by number of blocks
_DEVIATIONS = {6: 14.9, 7: 11.6, 8: 9.8, 9: 8.6, 10: 7.9, 11: 7.3, 12: 6.9}
_POWER = 1.5
_WORSE = 4.0
# two losses are apart by more than so many times the noise between two runs of one side, and nats
_APART = 5.0
_LOSS = 0.05


class Leaf(NamedTuple):
    """The probes' judgement of one parameter (or of all together).

    Attributes:
        path: of the parameter.
        scale: by how much side b's gradient is larger, relative; like the other numbers NaN where
            one is not finite.
        deviation: standard error of ``scale``.
        error_a: side a's relative error, of the median probe.
        error_b: side b's.
        differs: why it counts as different; "" if it does not.
        unresolved: whether 1% would not be seen.
    """

    path: str
    scale: float
    deviation: float
    error_a: float
    error_b: float
    differs: str
    unresolved: bool


@dataclass
class Probes:
    """Gradients of some probes, as their products.

    Attributes:
        rounding: of the sides' dtype, relative.
        rows: by parameter, per probe that has it: ``|g|^2``, ``<g, g_b - g_a>``, ``|g_a - g|^2``,
            ``|g_b - g|^2``, ``|g_b - g_a|^2``, ``|g|^2`` of all parameters of that probe (that are
            finite), ``|g_a|^2`` and ``|g_b|^2``.
    """

    rounding: float
    rows: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def add(self, a: Any, b: Any, exact: Any) -> dict[str, float]:
        """A probe: the gradient trees of side a, side b and the wider dtype.

        Returns:
            By parameter, ``|g_b - g_a| / |g_a|``; and ``""``: of all together.
        """
        products = []
        for leaf in zip(tree.leaves(a), tree.leaves(b), tree.leaves(exact), strict=True):
            products.append(_products(*leaf))
        # one copy to the host for all parameters: a copy for each would wait as often
        sums = torch.stack(products).cpu().numpy()
        whole = sums[np.isfinite(sums[:, 0]), 0].sum()
        apart = {}
        for path, row in zip(tree.paths(a), sums, strict=True):
            self.rows.setdefault(path, []).append(np.insert(row, 5, whole))
            apart[path] = _ratio(row[4], row[0])
        apart[""] = _ratio(sums[:, 4].sum(), sums[:, 0].sum())
        return apart

    def judged(self) -> list[Leaf]:
        """Every parameter that was probed often enough, or was not finite once; the most suspicious
        first.
        """
        leaves = []
        for path, rows in self.rows.items():
            if len(rows) >= LEAST_PROBES or _lost(rows):
                leaves.append(self._judge(path, np.stack(rows)))
        return sorted(
            leaves, key=lambda leaf: (not leaf.differs, leaf.unresolved, -size(leaf.scale))
        )

    def group(self, paths: Sequence[str]) -> Leaf:
        """Some parameters, which every probe has, as one."""
        rows = np.stack([np.stack(self.rows[path]) for path in paths])  # [parameters probes 8]
        with np.errstate(invalid="ignore"):  # inf - inf
            sums = rows.sum(0)
        # this column is that of all parameters in each row already: added up it would count twice
        sums[:, 5] = rows[0, :, 5]
        return self._judge("", sums)

    def _judge(self, path: str, rows: np.ndarray) -> Leaf:
        lost = _lost(rows)
        if lost:
            return Leaf(path, math.nan, math.nan, math.nan, math.nan, lost, unresolved=False)
        if not rows[:, 0].any():
            # nothing to divide by: what side b has is measured by the whole gradient
            moved = math.sqrt(float(np.median(rows[:, 4])))
            differs = (
                "side b has a gradient, side a has none"
                if moved > self.rounding * _median_root(rows[:, 5])
                else ""
            )
            return Leaf(path, 0.0, 0.0, 0.0, 0.0, differs, unresolved=False)
        if (rows[:, 0] > 0).sum() < LEAST_PROBES:
            return Leaf(path, 0.0, math.inf, 0.0, 0.0, "", unresolved=True)
        rows = rows[rows[:, 0] > 0]
        error_a = _median_root(rows[:, 2] / rows[:, 0])
        error_b = _median_root(rows[:, 3] / rows[:, 0])
        blocks = np.array_split(rows[:, 1] / rows[:, 0], min(len(rows), _BLOCKS))
        medians = [float(np.median(block)) for block in blocks]
        scale = float(np.mean(medians))
        deviation = float(np.std(medians, ddof=1)) / math.sqrt(len(medians))
        chance = _DEVIATIONS[len(medians)] * deviation
        # a small gradient can be the sum of large ones: their rounding, not its own, is its error
        cancelled = self.rounding * _median_root(rows[:, 5] / rows[:, 0])
        # noise above the gradient itself decides nothing about its scale
        drowned = error_a > 1.0
        differs = ""
        if error_b > max(_ERROR, _WORSE * error_a, cancelled):
            differs = f"error {error_b:.2g}, side a's is {error_a:.2g}"
        if not drowned and abs(scale) > max(SMALLEST_SCALE, chance):
            differs = f"{1 + scale:.4f} times side a's (standard error {deviation:.1g})"
        return Leaf(
            path, scale, deviation, error_a, error_b, differs, drowned or _POWER * chance > 0.01
        )


def loss_differs(losses: Sequence[tuple[float, float, float]], rounding: float) -> str:
    """Why the losses of a, b and the wider dtype at the same parameters differ; "" if they do
    not.
    """
    lost = not_finite(losses, "probes")
    if lost:
        return f"loss at the same parameters: {lost}"
    a, b, exact = np.array(losses).T
    apart = np.median(np.abs(b - a))
    error = np.median(np.abs(a - exact))
    # side a may be exact by luck; then the rounding of the loss itself is the measure
    bound = _WORSE * max(error, rounding * float(np.median(np.abs(exact))))
    return (
        f"losses at the same parameters are {apart:.2g} apart, at most {bound:.2g}"
        if apart > bound
        else ""
    )


def losses_apart(
    a: Sequence[float], b: Sequence[float], again: Sequence[float]
) -> tuple[float, float, str]:
    """Distance of two runs in their last half, and how far one is from itself with its sums
    in another order.

    Args:
        a: training losses of side a, by step.
        b: of side b.
        again: of side a with the rows of every batch reversed; empty if there is no such run.

    Returns:
        Root mean square of ``b - a``, of ``again - a`` (NaN without such a run), and why the first
        is too much or a loss of any step is not finite, or "".
    """
    lost = not_finite(list(zip(a, b, again or a, strict=True)), "steps", third=REVERSED)
    if lost:
        return math.nan, math.nan, f"training loss: {lost}"
    # the first half shows the transient of the start, where all runs are far apart
    half = len(a) // 2
    apart = _rms(np.array(b[half:]) - np.array(a[half:]))
    noise = _rms(np.array(again[half:]) - np.array(a[half:])) if len(again) else math.nan
    bound = max(_APART * noise, _LOSS) if len(again) else math.inf
    differs = (
        f"training losses are {apart:.2g} nats apart, at most {bound:.2g}" if apart > bound else ""
    )
    return apart, noise, differs


def not_finite(
    rows: Sequence[Sequence[float]] | np.ndarray, of: str, third: str = "by the references"
) -> str:
    """Places where numbers are infinite or NaN, and in how many rows; "" if none is.

    Args:
        rows: a number of side a, of side b and of a third in each.
        of: what the rows are of: probes, steps.
        third: where the last number is from.
    """
    counts = (~np.isfinite(np.array(rows))).sum(0)
    named = zip(("on side a", "on side b", third), counts, strict=True)
    places = ", ".join(f"{where} in {n}" for where, n in named if n)
    return f"not finite {places} of {len(rows)} {of}" if places else ""


def size(x: float) -> float:
    """Distance of a number from 0; NaN is as far as can be."""
    return math.inf if math.isnan(x) else abs(x)


def _lost(rows: Sequence[np.ndarray] | np.ndarray) -> str:
    """Which gradients of a parameter are not finite."""
    return not_finite(np.stack(list(rows))[:, [6, 7, 0]], "probes")


def _products(a: Tensor, b: Tensor, exact: Tensor) -> Tensor:
    """The products of one parameter's gradients that :class:`Probes` keeps, but for that of all."""
    # float64: these are squares of differences of nearly equal numbers
    a = a.detach().to(torch.float64)
    b = b.detach().to(torch.float64)
    exact = exact.detach().to(torch.float64)
    apart = b - a
    products = [(exact * exact).sum(), (exact * apart).sum()]
    for x in (a - exact, b - exact, apart, a, b):
        products.append((x * x).sum())
    return torch.stack(products)


def _median_root(squares: np.ndarray) -> float:
    return math.sqrt(float(np.median(squares)))


def _ratio(top: float, below: float) -> float:
    """Root of the ratio of two squares; 0 of nothing, NaN of NaN or against infinity."""
    if math.isnan(top) or not math.isfinite(below):
        return math.nan
    return math.sqrt(float(top) / float(below)) if below > 0 else (math.inf if top > 0 else 0.0)


def _rms(x: np.ndarray) -> float:
    return math.sqrt(float(np.mean(x * x))) if len(x) else 0.0
