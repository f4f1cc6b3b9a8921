"""What layers are made of: weight leaves, operators, decisions, custom rules, remat, packing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k31fn import autodiff, random, segments
from k31fn.kernels.norm import rms_norm
from k31fn.layers.linear import linear
from k31fn.params import LowRank, Quantized
from k31fn.segments import Segments, same_document
from tests.conformance.case import Case

B, T, D, R = 2, 5, 6, 2


def draw(key: Tensor, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [
        random.normal(k, s, dtype=dtype)
        for k, s in zip(random.split(key, len(shapes)), shapes, strict=True)
    ]


def low_rank(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    base, a, b, x = draw(key, dtype, (D, 4), (D, R), (R, 4), (B, T, D))
    return lambda w, x: torch.tanh(linear(x, w)), (LowRank(base, a, b), x)


def quantized(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    scales, x = draw(key, dtype, (D // 2, 4), (B, T, D))
    codes = random.bits(key, (D, 4)) % 7 - 3
    return lambda w, x: torch.tanh(linear(x, w)), (Quantized(codes, scales), x)


def mixer(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    """A causal softmax over the earlier tokens of the same document, in a remat."""
    w, x = draw(key, dtype, (D, D), (B, T, D))

    def mix(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        scores = torch.where(mask, linear(x, w) @ x.mT, -1e30)
        return torch.softmax(scores, -1) @ x

    one = segments.whole(B, T)

    def f(w: Tensor, x: Tensor, segments: Segments = one) -> Tensor:
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        mask = same_document(segments.ids, segments.ids) & causal
        return autodiff.remat(mix)(x, w, mask) * (segments.ids > 0)[..., None]

    return f, (w, x)


def routed(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    """The two largest scores of each token, chosen once; several outputs, one of them integer."""
    w, norm, x = draw(key, dtype, (D, 4), (D,), (B, T, D))

    def f(w: Tensor, norm: Tensor, x: Tensor) -> dict[str, Tensor]:
        scores = linear(rms_norm(x, norm, 1e-6), w)
        chosen = autodiff.decision("routed", lambda s: s.topk(2).indices, scores)
        return {
            "weights": torch.softmax(scores.gather(-1, chosen), -1),
            "chosen": chosen,
            "mean": scores.mean(),
        }

    return f, (w, norm, x)


cube = autodiff.custom_vjp(
    lambda x, y: (x**3 * y, (x, y)),
    lambda res, ct: (3 * ct * res[0] ** 2 * res[1], ct * res[0] ** 3),
    name="cube",
)


def rule(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    x, y = draw(key, dtype, (B, T, D), (D,))
    return lambda y, x: cube(x, y.expand_as(x)), (y, x)


CASES = [
    Case("core.low_rank", low_rank, packed=False),
    Case("core.quantized", quantized, packed=False),
    Case("core.mixer", mixer, shape=(B, T)),
    Case("core.routed", routed, packed=False),
    Case("core.rule", rule, packed=False),
]
