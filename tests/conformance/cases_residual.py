"""Residual schemes, embedding and losses as the conformance suite sees them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from k31fn import random, tree
from k31fn.kernels.attn_res import attn_res as attn_res_op
from k31fn.kernels.norm import rms_norm
from k31fn.layers import attn_res, embedding, losses, mhc, plain_residual
from tests.conformance.case import Case

B, T, D, Z = 2, 5, 6, 9
EPS = 1e-5
Made = tuple[Callable[..., Any], tuple[Any, ...]]


def _normal(key: Tensor, name: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return random.normal(random.fold_in(key, name), shape, dtype=dtype)


def _mix(key: Tensor, dtype: torch.dtype) -> Made:
    sources = tuple(_normal(key, i, B, T, D, dtype=dtype) for i in range(3))
    query, norm = (_normal(key, i, D, dtype=dtype) for i in (3, 4))
    return (lambda sources, query, norm: attn_res_op(sources, query, norm, EPS)), (
        sources,
        query,
        norm,
    )


def _scheme(module: ModuleType, cfg: Any) -> Callable[[Tensor, torch.dtype], Made]:
    """Three sublayers ``tanh(RMSNorm(h))``, the first and third of which open a block, and the last
    read.

    The first reads without a mix, so the first two share parameters: a leaf of gradient zero is
    slow to check.
    """

    def make(key: Tensor, dtype: torch.dtype) -> Made:
        mixes = [module.specs(cfg, D)] * 2 + [module.specs_out(cfg, D)]
        params = []
        for i, mix in enumerate(mixes):
            shapes = [spec.shape for spec in tree.leaves(mix)]
            leaves = [
                _normal(key, 10 * i + j, *shape, dtype=dtype) for j, shape in enumerate(shapes)
            ]
            params.append(type(mix)(*leaves))

        def f(trees: tuple[tuple[Any, ...], tuple[Tensor, ...]], x: Tensor) -> Tensor:
            params, weights = trees  # in one argument: torch.func.jacrev refuses one without leaves
            carry = module.start(x, cfg)
            for i, weight in enumerate(weights):
                mix = params[max(i - 1, 0)]
                carry, _ = module.connect(
                    mix,
                    carry,
                    cfg,
                    lambda h, w=weight: (torch.tanh(rms_norm(h, w, EPS)), ()),
                    opens_block=i % 2 == 0,
                )
            return module.finish(params[-1], carry, cfg)

        weights = tuple(_normal(key, 100 + i, D, dtype=dtype) for i in range(3))
        return f, ((tuple(params), weights), _normal(key, 200, 1, 3, D, dtype=dtype))

    return make


def _embedding(key: Tensor, dtype: torch.dtype) -> Made:
    cfg = embedding.Config(Z, D)
    tokens = random.bits(random.fold_in(key, 1), (B, T)) % Z
    params = embedding.Params(_normal(key, 0, Z, D, dtype=dtype))
    return (lambda params: embedding.apply(params, tokens, cfg).sin()), (params,)


def _loss(columns: int) -> Callable[[Tensor, torch.dtype], Made]:
    """The head in pieces of at most so many columns."""

    def make(key: Tensor, dtype: torch.dtype) -> Made:
        labels = random.bits(random.fold_in(key, 2), (B, T)) % Z
        labels = torch.where(labels == 0, losses.IGNORED, labels)

        def f(hidden: Tensor, head: Tensor) -> Tensor:
            total, num_tokens = losses.linear_cross_entropy(
                hidden, head, labels, logits_bytes=columns * B * T * dtype.itemsize
            )
            return losses.mean(total, num_tokens)

        return f, (_normal(key, 0, B, T, D, dtype=dtype), _normal(key, 1, D, Z, dtype=dtype))

    return make


CASES = [
    Case("attn_res_op", _mix, packed=False),
    Case("attn_res", _scheme(attn_res, attn_res.Config()), packed=False),
    Case("mhc", _scheme(mhc, mhc.Config(num_streams=2, iterations=2)), packed=False),
    Case("plain_residual", _scheme(plain_residual, plain_residual.Config()), packed=False),
    Case("embedding", _embedding, packed=False),
    Case("loss_whole", _loss(Z), packed=False),
    Case("loss_in_pieces", _loss(5), packed=False),
]
