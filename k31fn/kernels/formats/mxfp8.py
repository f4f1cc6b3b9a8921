"""MXFP8 (OCP Microscaling v1.0): groups of 32 numbers in E4M3 that share a power of two.

Of a group whose largest magnitude is m, the shared factor is ``2^(floor(log2 m) - 8)``, as 2^8 is
E4M3's highest power of two; the numbers are rounded to nearest, ties to even, and saturate at 448
times that factor. Factors below 2^-126 are not used.
"""

from __future__ import annotations

import torch

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.formats.powers import LARGEST, SMALLEST, power_of_two
from k31fn.precision import upcast
from k31fn.typing import Float, Tensor

__all__ = ["GROUP", "fake_quantise"]

GROUP = 32
# of E4M3
_MAX = 448.0
_HIGHEST_POWER = 8


def fake_quantise(x: Float[Tensor, "*rows C"]) -> Float[Tensor, "*rows C"]:
    """``x`` rounded to MXFP8 along its last dimension, in its own dtype; the gradient is that of
    the identity.

    Raises:
        ValueError: the columns are no whole groups.
    """
    if x.shape[-1] % GROUP:
        raise ValueError(
            f"MXFP8: {x.shape[-1]} features are no whole groups of {GROUP}; choose a multiple of "
            f"{GROUP}"
        )
    return _fake_quantise(x)


def _fake_fwd(x: Tensor) -> tuple[Tensor, tuple[()]]:
    groups = upcast(x).unflatten(-1, (-1, GROUP))
    exponent = torch.frexp(groups.abs().amax(-1)).exponent - 1
    powers = (exponent - _HIGHEST_POWER).clamp(SMALLEST, LARGEST)
    factor = power_of_two(powers, groups.dtype)[..., None]
    # clamped first: a cast to E4M3 makes NaN of what is too large
    codes = (groups / factor).clamp(-_MAX, _MAX).to(torch.float8_e4m3fn)
    return (codes.to(groups.dtype) * factor).flatten(-2).to(x.dtype), ()


def _fake_bwd(residuals: tuple[()], ct: Tensor) -> tuple[Tensor]:
    return (ct,)


_fake_quantise = custom_vjp(_fake_fwd, _fake_bwd, name="mxfp8.fake_quantise")
