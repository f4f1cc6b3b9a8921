"""One layer as the conformance suite sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A layer under test.

    Attributes:
        name: shown in the test id.
        make: ``(key, dtype) -> (f, args)``: ``f(*args, segments=Segments)`` returns tensors;
            ``args`` are trees of floating tensors. ``segments`` is optional for the caller.
        packed: whether ``f`` takes ``segments`` at all.
        shape: ``(B, T)`` of the inputs, for making packings.
    """

    name: str
    make: Callable[[Tensor, torch.dtype], tuple[Callable[..., Any], tuple[Any, ...]]]
    packed: bool = True
    shape: tuple[int, int] = (2, 5)
