"""``scaled_matmul`` by torch's scaled product (``torch.nn.functional.scaled_mm``; torch 2.11 and
2.13).

Layouts are those that the CUDA library asks for: codes of both operands with the contracted
dimension innermost; scales of rows by 128 with the rows innermost, of 128 x 128 with the contracted
dimension innermost, padded to a multiple of four blocks.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from k31fn.kernels.fp8_encode.reference import Codes
from k31fn.kernels.scaled_matmul.reference import Scaling, product_rule, refusal
from k31fn.kernels.scaled_matmul.reference import scaled_matmul as reference
from k31fn.typing import Float, Tensor

__all__ = ["accepts", "missing", "scaled_mm"]

_CAPABILITY = (9, 0)
_BLOCKS_A_ROW = 4  # scales of 128 x 128 come in multiples of so many


def missing() -> str:
    """Why this machine cannot run it, or nothing."""
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    if not torch.cuda.is_available():
        return ""  # which device it needs is said by what it is registered for
    capability = torch.cuda.get_device_capability()
    if capability < _CAPABILITY:
        return f"capability {_CAPABILITY} is needed, the device has {capability}"
    return ""


def accepts(a: Tensor, b: Tensor, scaling: Scaling = "rows", b_blocks: bool = False) -> str:
    """Why it cannot compute these arguments, or nothing."""
    del b_blocks
    reason = refusal(a.shape[0], a.shape[1], b.shape[1], scaling)
    return reason or _trial(scaling, a.device.index or 0)


@functools.cache
def _trial(scaling: Scaling, index: int) -> str:
    """Whether a small product of each kind is right here: older libraries refuse, or misread
    scales.
    """
    where = torch.device("cuda", index)
    # 640 features are five blocks of 128: the padding to a multiple of four is tried too
    a = torch.randn(256, 640, device=where).bfloat16()
    b = torch.randn(640, 384, device=where).bfloat16()
    for b_blocks in (False, True):
        try:
            got = scaled_mm(a, b, scaling, b_blocks).float()
        except RuntimeError as error:
            return f"the library refuses scaling={scaling!r}: {str(error).splitlines()[0]}"
        want = reference(a, b, scaling, b_blocks).float()
        # sums differ by roundings, misread scales by factors of two
        if float((got - want).abs().max()) > 0.02 * float(want.abs().max()):
            return f"the library's result with scaling={scaling!r} is wrong"
    return ""


def _multiply(a: Codes, b: Codes, scaling: Scaling, dtype: torch.dtype) -> Float[Tensor, "M N"]:
    codes = a.codes, b.codes.mT
    rows = F.ScalingType.RowWise  # pyright: ignore[reportAttributeAccessIssue]
    if scaling == "rows":
        how = {
            "scale_a": a.scales,
            "scale_recipe_a": rows,
            "scale_b": b.scales.mT,
            "scale_recipe_b": rows,
        }
        return F.scaled_mm(*codes, **how, output_dtype=dtype)
    fine = F.ScalingType.BlockWise1x128  # pyright: ignore[reportAttributeAccessIssue]
    coarse = F.ScalingType.BlockWise128x128  # pyright: ignore[reportAttributeAccessIssue]
    in_blocks = b.scales.shape[0] != b.codes.shape[0]
    return F.scaled_mm(
        *codes,
        scale_a=_columns_first(a.scales),
        scale_recipe_a=fine,
        scale_b=_padded(b.scales) if in_blocks else _columns_first(b.scales),
        scale_recipe_b=coarse if in_blocks else fine,
        output_dtype=dtype,
    )


def _columns_first(scales: Float[Tensor, "R G"]) -> Float[Tensor, "R G"]:
    """The same numbers, with the rows innermost, where the encoder has not put them so."""
    return scales.mT.contiguous().mT


def _padded(scales: Float[Tensor, "NB KB"]) -> Float[Tensor, "L NB"]:
    """``[K / 128 rounded up to fours, N / 128]``, with the first dimension innermost."""
    blocks = scales.shape[1]
    return F.pad(scales, (0, -blocks % _BLOCKS_A_ROW)).contiguous().mT


scaled_mm = product_rule(_multiply, "scaled_matmul (scaled_mm)")
"""The op's signature, with positional arguments ``(a, b, scaling, b_blocks)``."""
