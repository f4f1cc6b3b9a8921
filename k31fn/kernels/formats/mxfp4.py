"""MXFP4 (OCP Microscaling v1.0): groups of 32 numbers of 4 bits that share a power of two.

A weight ``[rows, columns]`` is stored as ``packed [rows, columns / 2]`` and ``scale [rows, columns
/ 32]``, both bytes. A nibble is E2M1: bit 3 the sign, the others one of 0, 0.5, 1, 1.5, 2, 3, 4, 6;
the low nibble is the even column. A scale byte b is the factor ``2^(b - 127)`` of 32 neighbouring
columns (E8M0; 255 means not a number)::

    w[r, c] = e2m1(nibble[r, c]) * 2^(scale[r, c // 32] - 127)

:func:`decode` is exact in bfloat16 and wider. :func:`encode` rounds to nearest, ties to the even
code, and saturates at 6. The scale is ``floor(log2(largest)) - 2``, and one more where the largest
is 1.75 powers of two or above, as the package compressed-tensors has it, whose format a checkpoint
declares. The specification's example always takes the first: 7.9 would be held as 6, 24% off, and
with the larger scale it is 8. The largest weight of a group is then at most 20% off (5 as 4). What
MXFP4 can hold comes back bit for bit, under either rule. Neither looks at values on the host:
infinities, NaN and what is too large for a dtype are the caller's to refuse.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import UInt8

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.precision import upcast
from k31fn.typing import Float, Tensor

__all__ = ["GROUP", "check_columns", "decode", "encode", "fake_quantise"]

GROUP = 32  # columns that share a scale

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
_LARGEST_SCALE = 254  # 255 is not a number


def decode(
    packed: UInt8[Tensor, "*E R C2"], scale: UInt8[Tensor, "*E R G"], dtype: torch.dtype
) -> Float[Tensor, "*E R C"]:
    """The weights, exactly.

    Raises:
        ValueError: the shapes do not fit.
    """
    groups = scale.shape[-1]
    if packed.shape[:-1] != scale.shape[:-1] or 2 * packed.shape[-1] != GROUP * groups:
        raise ValueError(
            f"MXFP4: packed {list(packed.shape)} and scale {list(scale.shape)} do not fit: one "
            f"scale byte is needed per {GROUP // 2} packed bytes of a row"
        )
    values = torch.tensor([*_VALUES, *(-v for v in _VALUES)], dtype=dtype, device=packed.device)
    # a table of both numbers of each byte, low nibble first: one look-up in place of shifts
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)
    decoded = F.embedding(packed.int(), pairs).flatten(-2).unflatten(-1, (groups, GROUP))
    return (decoded * _powers(scale, dtype)[..., None]).flatten(-2)


def encode(
    weight: Float[Tensor, "*E R C"],
) -> tuple[UInt8[Tensor, "*E R C2"], UInt8[Tensor, "*E R G"]]:
    """``(packed, scale)`` of the nearest weights that MXFP4 can hold.

    Raises:
        ValueError: the columns are no whole groups.
    """
    scaled, scale = _scaled(weight)
    size = scaled.abs()
    # codes count halves up to 2, ones up to 4 and twos to 6; round() takes ties to the even code
    code = torch.where(
        size < 2,
        (2 * size).round(),
        torch.where(size < 4, 2 + size.round(), 4 + (size / 2).round()),
    )
    codes = code.clamp(max=7).to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)
    pairs = codes.flatten(-2).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4), (scale + _BIAS).to(torch.uint8)


def fake_quantise(weight: Float[Tensor, "*rows C"]) -> Float[Tensor, "*rows C"]:
    """Values that MXFP4 holds of ``weight`` in bfloat16, as checkpoints are written, in the dtype
    that ``weight`` has.

    ``decode(*encode(weight.to(bfloat16)))``; the gradient is that of the identity.

    Raises:
        ValueError: the columns are no whole groups.
    """
    return _fake_quantise(weight)


def check_columns(columns: int) -> None:
    """Raises ValueError if so many columns are no whole groups."""
    if columns % GROUP:
        raise ValueError(
            f"MXFP4: {columns} columns are no whole groups of {GROUP}; keep this weight unquantised"
        )


def _rounded(weight: Tensor) -> Tensor:
    scaled, scale = _scaled(weight.to(torch.bfloat16))
    size = scaled.abs()
    # between neighbours: halves up to 2, ones up to 4, then 4 and 6
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(scaled.dtype)
    nearest = torch.copysign(((size / step).round() * step).clamp(max=_VALUES[-1]), scaled)
    return (nearest * _powers(scale + _BIAS, scaled.dtype)[..., None]).flatten(-2).to(weight.dtype)


def _fake_fwd(weight: Tensor) -> tuple[Tensor, tuple[()]]:
    return _rounded(weight), ()


def _fake_bwd(residuals: tuple[()], ct: Tensor) -> tuple[Tensor]:
    return (ct,)


_fake_quantise = custom_vjp(_fake_fwd, _fake_bwd, name="mxfp4.fake_quantise")


def _scaled(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Groups ``[..., G, 32]`` over their power of two, and its exponent ``[..., G]``."""
    check_columns(weight.shape[-1])
    groups = upcast(weight).unflatten(-1, (-1, GROUP))
    mantissa, exponent = torch.frexp(groups.abs().amax(-1))  # of the largest, in [0.5, 1)
    # 4 = 2^2 is E2M1's highest power of two. From 7 on the next one is nearer than 6.
    above = (mantissa >= 0.875).to(exponent.dtype)
    scale = (exponent - 3 + above).clamp(-_BIAS, _LARGEST_SCALE - _BIAS)
    return groups / _powers(scale + _BIAS, groups.dtype)[..., None], scale


def _powers(scale: Tensor, dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """``2^(scale - 127)``, exactly; not a number for a scale byte of 255."""
    # a table: exp2 of a device need not be exact
    powers = [*(2.0 ** (b - _BIAS) for b in range(_LARGEST_SCALE + 1)), float("nan")]
    return torch.tensor(powers, dtype=dtype, device=scale.device)[scale.int()]
