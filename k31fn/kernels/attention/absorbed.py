"""The absorbed form on a device whose kernels take the keys of each head.

Its few queries, the next tokens in decoding, read one head of keys for all: two plain products of
all heads at once, which no tile of a kernel would make faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from k31fn.kernels.registry import Implementation

__all__ = ["absorbed"]


def absorbed(reference: Callable[..., Any]) -> Implementation:
    """The implementation of that name: the reference, for one head of keys and values only."""
    return Implementation("absorbed", ("cuda",), reference, _accepts, dtypes=(torch.bfloat16,))


def _accepts(q: Tensor, k: Tensor, *others: Any, **named: Any) -> str:
    del others, named
    if k.shape[2] == 1 and q.shape[2] > 1:
        return ""
    return f"it is for one head of keys for all, got {k.shape[2]} for {q.shape[2]} heads"
