"""Kimi Delta Attention, its operators and its decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k31fn import params, random, segments, tree
from k31fn.kernels.gated_norm import gated_norm
from k31fn.kernels.kda import KdaFragment, KdaOut, kda_fragment
from k31fn.kernels.kda import kda as kda_op
from k31fn.layers import kda, short_conv
from k31fn.segments import Segments
from tests.conformance.case import Case

B, T, D, H, K, V = 2, 5, 6, 2, 3, 2
LONG = 18  # more than one tile
CFG = kda.Config(D, H, K, decay_rank=2, conv_width=3, init_std=0.5)


def draw(key: Tensor, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [
        random.normal(k, s, dtype=dtype)
        for k, s in zip(random.split(key, len(shapes)), shapes, strict=True)
    ]


def operator(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    """Two tiles, K and V unlike, an initial state, both results."""
    shapes = [
        (B, LONG, H, K),
        (B, LONG, H, K),
        (B, LONG, H, V),
        (B, LONG, H, K),
        (B, LONG, H),
        (B, H, K, V),
    ]
    one = segments.whole(B, LONG)

    def f(inputs: tuple[Tensor, ...], state: Tensor, segments: Segments = one) -> KdaOut:
        q, k, v, g, beta = inputs
        q, k = (x / (x.square().sum(-1, keepdim=True) + 0.1).sqrt() for x in (q, k))
        return kda_op(q, k, v, -5 * torch.sigmoid(g), torch.sigmoid(beta), segments.ids, state)

    *inputs, state = draw(key, dtype, *shapes)
    return f, (tuple(inputs), state)


def fragment(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    """Two tiles; decays that leave a transition to differentiate."""
    one = segments.whole(B, LONG)

    def f(inputs: tuple[Tensor, ...], segments: Segments = one) -> KdaFragment:
        k, v, g, beta = inputs
        k = k / (k.square().sum(-1, keepdim=True) + 0.1).sqrt()
        return kda_fragment(k, v, -0.2 * torch.sigmoid(g), torch.sigmoid(beta), segments.ids)

    return f, (
        tuple(draw(key, dtype, (B, LONG, H, K), (B, LONG, H, V), (B, LONG, H, K), (B, LONG, H))),
    )


def norm(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    weight, o, gate = draw(key, dtype, (V,), (B, T, H, V), (B, T, H, V))
    return lambda weight, o, gate: gated_norm(o, gate, weight, 1e-2), (weight, o, gate)


def convolution(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    cfg = short_conv.Config(D, 3)
    x = random.normal(random.fold_in(key, 1), (B, T, D), dtype=dtype)
    return (
        lambda p, x, segments=None: short_conv.apply(p, x, cfg, segments=segments),
        (params.init(short_conv.specs(cfg), key, dtype=dtype), x),
    )


def layer(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    x = random.normal(random.fold_in(key, 1), (B, T, D), dtype=dtype)
    weights = params.init(kda.specs(CFG), key, dtype=dtype)
    return lambda p, x, segments=None: kda.apply(p, x, CFG, segments=segments).y, (weights, x)


def decoding(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    """From a state that is not zero, in two steps; the last state as well."""
    x = random.normal(random.fold_in(key, 1), (B, 3, D), dtype=dtype)
    weights = params.init(kda.specs(CFG), key, dtype=dtype)
    zero = kda.init_state(CFG, B, dtype=dtype)
    state = tree.map(
        lambda s: random.normal(random.fold_in(key, 2), tuple(s.shape), dtype=dtype), zero
    )

    def f(p: Any, x: Tensor, state: kda.State) -> Any:
        first, state = kda.extend(p, x[:, :2], CFG, state)
        second, state = kda.extend(p, x[:, 2:], CFG, state)
        return first, second, state

    return f, (weights, x, state)


CASES = [
    Case("kda.operator", operator, shape=(B, LONG)),
    Case("kda.fragment", fragment, shape=(B, LONG)),
    Case("kda.gated_norm", norm, packed=False),
    Case("kda.short_conv", convolution, shape=(B, T)),
    Case("kda.layer", layer, shape=(B, T)),
    Case("kda.decoding", decoding, packed=False),
]
