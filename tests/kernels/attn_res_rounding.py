"""What gradients of the residual attention may be off by where the backward takes the rounded
result, and no more.

The result is ``o_d (1 + e_d)``, ``|e_d| <= u``. A gradient's error is then a sum ``sum_k a_k e_k``
over features and tokens with known ``a``. At worst that is ``u sum |a|``, but the ``e_k``, or with
them the signs of random cotangents, are independent: the sum exceeds ``6 u sqrt(sum a^2)`` with a
probability of ``2 exp(-18) = 3e-8`` (Hoeffding). ``u`` is 2^-9 for bfloat16, and 2^-8 in Triton's
interpreter, which cuts instead of rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.kernels.fused import DEVICE

ROUNDING = 2**-7
"""For a result or gradient in bfloat16: cut (2^-8), and as much again for a gradient's own cast."""

_LIMIT = 6 * (2**-9 if DEVICE == "cuda" else 2**-8)


def of_one_pass(
    sources: Sequence[Tensor], query: Tensor, norm: Tensor, eps: float, ct: Tensor
) -> list[Tensor]:
    """Per gradient of the sources, the query and the norm weight, which the backward corrects."""
    v, ct, key = (
        torch.stack([s.double() for s in sources]),
        ct.double(),
        query.double() * norm.double(),
    )
    rrms = torch.rsqrt(v.square().mean(-1) + eps)
    scores = (v @ key) * rrms
    probs = torch.softmax(scores, 0)
    out = (probs[..., None] * v).sum(0)
    return [*_of_value(probs * _of_product(ct, out), rrms, scores, key, v), 0 * key, 0 * key]


def _of_product(ct: Tensor, out: Tensor) -> Tensor:
    return _LIMIT * (ct * out).square().sum(-1).sqrt()


def _of_value(d_score: Tensor, rrms: Tensor, score: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (d_score * rrms)[..., None] * (
        key - (score * rrms)[..., None] * value / value.shape[-1]
    ).abs()


def assert_within(
    found: Sequence[Tensor], exact: Sequence[Tensor], bounds: Sequence[Tensor], own: float
) -> None:
    """Each gradient within its bound, and its own rounding: ``own`` for one in float32."""
    for i, (ours, theirs, bound) in enumerate(zip(found, exact, bounds, strict=True)):
        own_rounding = ROUNDING if ours.dtype == torch.bfloat16 else own
        limit = bound + own_rounding * (theirs.abs() + theirs.abs().max())
        over = ((ours.double() - theirs).abs() - limit).max()
        assert over <= 0, f"gradient {i}: {over:.2e} over its bound"
