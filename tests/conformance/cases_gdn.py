"""Gated DeltaNet, its operators and its decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k31fn import params, random, segments, tree
from k31fn.kernels.gdn import gdn as gdn_op
from k31fn.kernels.gdn import gdn_fragment
from k31fn.kernels.kda import KdaFragment, KdaOut
from k31fn.layers import gdn
from k31fn.segments import Segments
from tests.conformance.case import Case
from tests.conformance.cases_kda import draw

B, T, D, H, K, V = 2, 5, 6, 2, 3, 2
CFG = gdn.Config(D, H, K, V, conv_width=3, init_std=0.5)


def operator(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    """K and V unlike, an initial state, both results."""
    shapes = [(B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H), (B, T, H), (B, H, K, V)]
    one = segments.whole(B, T)

    def f(inputs: tuple[Tensor, ...], state: Tensor, segments: Segments = one) -> KdaOut:
        q, k, v, g, beta = inputs
        q, k = (x / (x.square().sum(-1, keepdim=True) + 0.1).sqrt() for x in (q, k))
        return gdn_op(q, k, v, -2 * torch.sigmoid(g), torch.sigmoid(beta), segments.ids, state)

    *inputs, state = draw(key, dtype, *shapes)
    return f, (tuple(inputs), state)


def fragment(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    """Decays that leave a transition to differentiate."""
    one = segments.whole(B, T)

    def f(inputs: tuple[Tensor, ...], segments: Segments = one) -> KdaFragment:
        k, v, g, beta = inputs
        k = k / (k.square().sum(-1, keepdim=True) + 0.1).sqrt()
        return gdn_fragment(k, v, -0.2 * torch.sigmoid(g), torch.sigmoid(beta), segments.ids)

    return f, (tuple(draw(key, dtype, (B, T, H, K), (B, T, H, V), (B, T, H), (B, T, H))),)


def layer(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    x = random.normal(random.fold_in(key, 1), (B, T, D), dtype=dtype)
    weights = params.init(gdn.specs(CFG), key, dtype=dtype)
    return lambda p, x, segments=None: gdn.apply(p, x, CFG, segments=segments).y, (weights, x)


def decoding(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    """From a state that is not zero, in two steps; the last state as well."""
    x = random.normal(random.fold_in(key, 1), (B, 3, D), dtype=dtype)
    weights = params.init(gdn.specs(CFG), key, dtype=dtype)
    zero = gdn.init_state(CFG, B, dtype=dtype)
    state = tree.map(
        lambda s: random.normal(random.fold_in(key, 2), tuple(s.shape), dtype=dtype), zero
    )

    def f(p: Any, x: Tensor, state: gdn.State) -> Any:
        first, state = gdn.extend(p, x[:, :2], CFG, state)
        second, state = gdn.extend(p, x[:, 2:], CFG, state)
        return first, second, state

    return f, (weights, x, state)


CASES = [
    Case("gdn.operator", operator, shape=(B, T)),
    Case("gdn.fragment", fragment, shape=(B, T)),
    Case("gdn.layer", layer, shape=(B, T)),
    Case("gdn.decoding", decoding, packed=False),
]
