"""Exact powers of two, which no library's ``exp2`` promises on every device."""

from __future__ import annotations

import torch
from jaxtyping import Int

from k31fn._functorch import reinterpret
from k31fn.typing import Float, Tensor

__all__ = ["LARGEST", "SMALLEST", "power_of_two"]

SMALLEST, LARGEST = -126, 127
"""Exponents of float32's normal numbers."""


def power_of_two(exponent: Int[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """``2^exponent`` for exponents from -126 to 127, made from float32's bits."""
    # the exponent alone, in its field: the mantissa of a power of two is zero
    return reinterpret((exponent.to(torch.int32) + LARGEST) << 23, torch.float32).to(dtype)
