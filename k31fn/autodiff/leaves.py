"""Leaves of a flattened tree, and those of them that gradients flow to.

A derivative works on lists: the values of all leaves, and the positions (``index``) of those that
it differentiates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["differentiable", "differentiable_leaves", "pick"]


def differentiable(x: Tensor) -> bool:
    """Whether gradients can flow to a tensor of this dtype."""
    return x.is_floating_point() or x.is_complex()


def differentiable_leaves(values: Sequence[Any]) -> list[int]:
    """Positions of the tensors that gradients can flow to."""
    return [i for i, v in enumerate(values) if isinstance(v, Tensor) and differentiable(v)]


def pick(values: Sequence[Any], index: Iterable[int]) -> list[Any]:
    """The values at these positions."""
    return [values[i] for i in index]
