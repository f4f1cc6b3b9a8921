"""Plain torch form of the FP8 encoder."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch

from k31fn.autodiff.custom_vjp import detached
from k31fn.kernels.formats.fp8 import BLOCK, scale_of
from k31fn.typing import Float, Tensor

__all__ = ["E4M3", "Codes", "Groups", "check", "fp8_encode"]

Groups = Literal["rows", "blocks", "tiles"]
E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(E4M3).max
_SMALLEST = torch.finfo(torch.float32).tiny


class Codes(NamedTuple):
    """A matrix ``[R, K]``: codes in E4M3, and scales ``[R, groups]`` along K, or ``[R / 128, K /
    128]``.
    """

    codes: Tensor
    scales: Float[Tensor, "R G"]


def check(x: Float[Tensor, "R K"], scaling: Groups) -> None:
    """Refuses sizes.

    Raises:
        ValueError: an empty matrix, or one that groups do not divide.
    """
    rows, columns = x.shape
    if not x.numel():
        raise ValueError(
            f"fp8_encode: x {[rows, columns]} is empty; at least one row and column are needed"
        )
    if (scaling != "rows" and columns % BLOCK) or (scaling == "tiles" and rows % BLOCK):
        what = "columns" if scaling == "blocks" else "rows and columns"
        raise ValueError(
            f"fp8_encode: x {[rows, columns]} with scaling={scaling!r}: {what} must be multiples "
            f"of {BLOCK}"
        )


def fp8_encode(x: Float[Tensor, "R K"], scaling: Groups = "rows") -> Codes:
    """Codes and scales.

    Raises:
        ValueError: sizes that the scaling does not take.
    """
    check(x, scaling)
    # rows and columns that share a scale
    size = (BLOCK if scaling == "tiles" else 1, x.shape[1] if scaling == "rows" else BLOCK)
    # rounding has no derivative: the product's rule treats codes as the numbers themselves
    groups = detached(x).unflatten(1, (-1, size[1])).unflatten(0, (-1, size[0]))
    largest = torch.linalg.vector_norm(groups, float("inf"), (1, 3))  # [R / size, K / size]
    # a group with an infinity or a NaN becomes NaN as a whole: the step is then skipped
    finite = largest.isfinite()
    scales = scale_of(torch.where(finite, largest, _LARGEST).clamp_min(_SMALLEST), E4M3)
    # a power of two, so bfloat16 holds it, and a product with it rounds nothing
    inverse = torch.where(finite, scales.reciprocal(), math.nan).to(x.dtype)
    codes = (groups * inverse[:, None, :, None]).to(E4M3)  # exact but for the last rounding
    return Codes(codes.flatten(2, 3).flatten(0, 1).contiguous(), scales)
