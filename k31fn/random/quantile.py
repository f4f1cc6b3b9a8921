"""Standard normal numbers from uniform words: the quantile in operations that round alike on every
device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from k31fn._functorch import reinterpret
from k31fn.typing import Tensor

__all__ = ["half_normal"]

# Minimax fits, highest power first; see _log2 and half_normal.
_LOG2 = (
    -0.00908878954,
    0.0147788101,
    -0.0205788113,
    0.0374628985,
    -0.0712997363,
    0.142526375,
    -0.32059683,
    0.961795972,
    0.584962488,
)
_QUANTILE_TOP = (
    4.68616414e-06,
    0.000230702742,
    0.00395470256,
    0.0431594277,
    0.313577222,
    1.25331428,
)
_QUANTILE_BOTTOM = (1.6134581e-07, 3.91924453e-05, 0.000759252041, 0.0156967776, 0.0687348346, 1.0)


def half_normal(words: Tensor, tail: float) -> Tensor:
    """Normal numbers from 32-bit words. The top bit is the sign; the others are p, uniform in
    (tail, 1/2), mapped to the quantile -Phi^-1(p).

    ``-Phi^-1(p) = (1 - 2p) R(w)``, ``w = -log2(4 p (1 - p))``, where R is smooth and positive: a
    5/5 rational minimax fit on 0 <= w <= 31 (all that 31 bits can reach) has relative error 1.1e-7.
    p and 1 - 2p are formed from the integer and its complement, so both ends keep their relative
    precision.
    """
    magnitude = words & 0x7FFFFFFF
    # the half that is added keeps p off 0, where the quantile is infinite
    p = magnitude.to(torch.float32).add_(0.5).mul_((0.5 - tail) * 2**-31).add_(tail)
    centred = (0x7FFFFFFF - magnitude).to(torch.float32).add_(0.5).mul_((1 - 2 * tail) * 2**-31)
    w = _log2((1 - p).mul_(p)).add_(2).neg_()
    # a factor and not another branch: the distribution is symmetric to the last bit
    sign = (words >> 31).to(torch.float32).mul_(-2).add_(1)
    return (
        centred.mul_(sign)
        .mul_(_polynomial(w, _QUANTILE_TOP))
        .div_(_polynomial(w, _QUANTILE_BOTTOM))
    )


def _log2(x: Tensor) -> Tensor:
    """log2 of positive normal float32 numbers: exponent plus a polynomial of the mantissa, error
    1e-7 and roundings.
    """
    # from the bits of the number: the library's log2 differs between devices in the last place
    field = reinterpret(x, torch.int32)
    mantissa = reinterpret((field & 0x7FFFFF) | 0x3F800000, torch.float32)
    return ((field >> 23) - 127).to(torch.float32).add_(_polynomial(mantissa - 1.5, _LOG2))


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """The polynomial's value by Horner's scheme."""
    # separate products and sums: a fused one rounds once, where a device without it rounds twice
    value = x * coefficients[0]
    for c in coefficients[1:-1]:
        value.add_(c).mul_(x)
    return value.add_(coefficients[-1])
