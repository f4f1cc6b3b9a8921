"""MXFP4: how released checkpoints hold the weights of routed experts (OCP Microscaling v1.0, groups of 32).

A weight ``[rows, columns]`` is stored as ``packed [rows, columns / 2]`` and ``scale [rows, columns / 32]``, both bytes.
A nibble is E2M1: bit 3 the sign, the others one of 0, 0.5, 1, 1.5, 2, 3, 4, 6; the low nibble is the even column. A
scale byte b is the factor ``2^(b - 127)`` of 32 neighbouring columns (E8M0; 255 means not a number)::

    w[r, c] = e2m1(nibble[r, c]) * 2^(scale[r, c // 32] - 127)

:func:`decode` is exact in bfloat16 and wider. :func:`encode` rounds to nearest, ties to the even code, and saturates at
6; what MXFP4 can hold comes back bit for bit, so decoding and encoding again changes no weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import UInt8

from k31fn.precision import upcast
from k31fn.typing import Float, Tensor

__all__ = ["GROUP", "decode", "encode"]

GROUP = 32  # columns that share a scale

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbours
_BIAS, _NAN = 127, 255


def decode(
    packed: UInt8[Tensor, "*E R C2"], scale: UInt8[Tensor, "*E R G"], dtype: torch.dtype
) -> Float[Tensor, "*E R C"]:
    """The weights, exactly.

    Raises:
        ValueError: the shapes do not fit, a scale is not a number, or a weight is too large for ``dtype``.
    """
    groups = scale.shape[-1]
    if packed.shape[:-1] != scale.shape[:-1] or 2 * packed.shape[-1] != GROUP * groups:
        raise ValueError(
            f"MXFP4: packed {list(packed.shape)} and scale {list(scale.shape)} do not fit: one scale byte is needed "
            f"per {GROUP // 2} packed bytes of a row"
        )
    if bool((scale == _NAN).any()):
        raise ValueError(f"MXFP4: {int((scale == _NAN).sum())} of {scale.numel()} scales are 255, which is no number")
    wide = torch.promote_types(dtype, torch.float32)  # holds every product exactly, or overflows
    values = torch.tensor([*_VALUES, *(-v for v in _VALUES)], dtype=wide, device=packed.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)  # of each byte, low nibble first
    decoded = F.embedding(packed.int(), pairs).flatten(-2).unflatten(-1, (groups, GROUP))
    weights = (decoded * _powers(scale, wide)[..., None]).flatten(-2).to(dtype)
    if not bool(torch.isfinite(weights).all()):
        raise ValueError(f"MXFP4: weights with scales up to {int(scale.max())} are too large for {dtype}")
    return weights


def encode(weight: Float[Tensor, "*E R C"]) -> tuple[UInt8[Tensor, "*E R C2"], UInt8[Tensor, "*E R G"]]:
    """``(packed, scale)`` of the nearest weights that MXFP4 can hold; the scale is that of the OCP specification.

    Raises:
        ValueError: the columns are no whole groups, or a weight is not finite.
    """
    columns = weight.shape[-1]
    if columns % GROUP:
        raise ValueError(f"MXFP4: {columns} columns are no whole groups of {GROUP}; keep this weight unquantised")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(f"MXFP4: {int((~torch.isfinite(weight)).sum())} weights are not finite")
    groups = upcast(weight.contiguous()).unflatten(-1, (-1, GROUP))
    exponent = torch.frexp(groups.abs().amax(-1)).exponent - 1  # floor(log2) of the largest
    scale = (exponent - 2 + _BIAS).clamp(0, _NAN - 1).to(torch.uint8)  # 4 = 2^2 is E2M1's highest power of two
    scaled = groups / _powers(scale, groups.dtype)[..., None]
    codes = _nearest(scaled.abs()) | (torch.signbit(scaled).to(torch.uint8) << 3)
    pairs = codes.flatten(-2).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4), scale


def _nearest(size: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """The code of the nearest value, of the even code between two; 7 above all."""
    middle = torch.tensor(_MIDPOINTS, dtype=size.dtype, device=size.device)
    low, high = torch.bucketize(size, middle), torch.bucketize(size, middle, right=True)
    return torch.where(low % 2 == 0, low, high).to(torch.uint8)


def _powers(scale: UInt8[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """``2^(scale - 127)``, exactly."""
    table = torch.tensor([2.0 ** (b - _BIAS) for b in range(_NAN)], dtype=dtype, device=scale.device)
    return table[scale.int()]
