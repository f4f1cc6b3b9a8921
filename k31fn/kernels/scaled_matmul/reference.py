"""FP8 products of decoded operands, and the rule that every implementation shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.formats.fp8 import BLOCK
from k31fn.kernels.fp8_encode import fp8_encode
from k31fn.kernels.fp8_encode.reference import Codes
from k31fn.typing import Float, Tensor

__all__ = ["Scaling", "product_rule", "refusal", "scaled_matmul"]

Scaling = Literal["rows", "blocks"]
_LEAST = 16  # sizes that the library's products by rows take are multiples of it


def refusal(rows: int, features: int, columns: int, scaling: Scaling) -> str:
    """Why the product ``[rows, features] x [features, columns]``, or one of its gradients, has no
    sizes for FP8; ``""`` if all have.
    """
    sizes = rows, features, columns
    if not all(sizes):
        return f"M, K, N={sizes} is empty; at least one row, feature and column are needed"
    multiple = _LEAST if scaling == "rows" else BLOCK
    if any(size % multiple for size in sizes):
        return f"M, K, N={sizes} with scaling={scaling!r} must be multiples of {multiple}"
    return ""


def _decode(x: Codes) -> Float[Tensor, "R K"]:
    per_row = x.codes.shape[0] // x.scales.shape[0]
    per_column = x.codes.shape[1] // x.scales.shape[1]
    each = x.scales.repeat_interleave(per_row, 0).repeat_interleave(per_column, 1)
    return x.codes.to(each.dtype) * each


def _multiply(a: Codes, b: Codes, scaling: Scaling, dtype: torch.dtype) -> Float[Tensor, "M N"]:
    del scaling
    return (_decode(a) @ _decode(b).mT).to(dtype)


Multiply = Callable[[Codes, Codes, Scaling, torch.dtype], Tensor]
"""``(a [M, K], b [N, K], scaling, dtype) -> [M, N]``: the second operand is transposed."""


def product_rule(multiply: Multiply, name: str) -> Callable[..., Tensor]:
    """The op whose three products are ``multiply`` of encoded operands."""

    def fwd(scaling: Scaling, b_blocks: bool, a: Tensor, b: Tensor) -> tuple[Tensor, Any]:
        of_b = fp8_encode(b.mT, "tiles" if b_blocks and scaling == "blocks" else scaling)
        # kept unencoded: the backward contracts over other dims, whose scales are others
        return multiply(fp8_encode(a, scaling), of_b, scaling, a.dtype), (a, b)

    def bwd(
        scaling: Scaling, b_blocks: bool, needs: Any, residuals: Any, ct: Tensor
    ) -> tuple[Any, Any]:
        a, b = residuals
        # the rule again, not multiply: its gradients are FP8 products with gradients of their own
        d_a = rule(scaling, b_blocks, ct, b.mT) if needs[0] else None
        # the second operand is now a cotangent: blocks are for weights
        d_b = rule(scaling, False, a.mT, ct) if needs[1] else None
        return d_a, d_b

    rule = custom_vjp(fwd, bwd, nondiff_argnums=(0, 1), needs=True, name=name)
    return lambda a, b, scaling, b_blocks: rule(scaling, b_blocks, a, b)


_reference = product_rule(_multiply, "scaled_matmul")


def scaled_matmul(
    a: Float[Tensor, "M K"],
    b: Float[Tensor, "K N"],
    scaling: Scaling = "rows",
    b_blocks: bool = False,
) -> Float[Tensor, "M N"]:
    """The product of both operands in FP8, summed in float32.

    Raises:
        ValueError: sizes that the scaling does not take.
    """
    reason = refusal(a.shape[0], a.shape[1], b.shape[1], scaling)
    if reason:
        raise ValueError(f"scaled_matmul: {reason}")
    return _reference(a, b, scaling, b_blocks)
