"""A layer of a scan, and the plan of what is kept of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from k31fn.parallel.fsdp.fused_gather import start_gather, wait_gather
from k31fn.parallel.fsdp.placement import Placements

__all__ = ["GatheringStep", "RematPlan", "Step"]

Step = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""``(weights, carry, shared, per_layer) -> (carry, aux)``: one layer."""


@dataclass(frozen=True)
class RematPlan:
    """The choice of what a scan keeps for its backward besides decisions.

    Attributes:
        keep: names of functions that do not run again (:func:`~k31fn.autodiff.keep`).
        every: carries are kept at layers 0, ``every``, 2 ``every``, ...
        light: of a layer's weights (or their placements) what it needs where ``keep`` holds.
    """

    keep: frozenset[str] = frozenset()
    every: int = 1
    light: Callable[[Any], Any] = lambda weights: weights


@dataclass(frozen=True)
class GatheringStep:
    """A layer that gathers its weights itself."""

    step: Step
    placements: Placements

    def __call__(self, params: Any, *args: Any) -> tuple[Any, Any]:
        """Runs the layer on the parts of its weights."""
        return self.step(wait_gather(start_gather(params, self.placements)), *args)
