"""A decoder layer and the multi-token-prediction layer: the parts of the other cases, put
together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from k31fn import params, random, tree
from k31fn.layers import attn_res, block, embedding, kinds, mlp, mtp, plain_residual
from k31fn.segments import Segments
from tests.conformance import cases_attention, cases_kda, cases_moe
from tests.conformance.case import Case

B, T, D, Z = 2, 5, 6, 9
Made = tuple[Callable[..., Any], tuple[Any, ...]]

LAYERS = {
    "block.kda_moe": block.Config(
        cases_kda.CFG, cases_moe.MOE, attn_res.Config(query_std=1.0), opens_block=True
    ),
    "block.mla_dense": block.Config(cases_attention.MLA, mlp.Config(D, 4), plain_residual.Config()),
}
"""Gated DSA is not here: a check without pinned values would see through its stop_gradient."""


def _drawn(specs: Any, key: Tensor, dtype: torch.dtype) -> Any:
    """Matrices of order one."""
    drawn = params.init(specs, random.fold_in(key, 0), dtype=dtype)
    return tree.map(lambda w: 25 * w if w.ndim > 1 and float(w.std()) < 0.1 else w, drawn)


def _x(key: Tensor, dtype: torch.dtype) -> Tensor:
    return random.normal(random.fold_in(key, 1), (B, T, D)).to(dtype)


def _block(cfg: block.Config) -> Callable[[Tensor, torch.dtype], Made]:
    def make(key: Tensor, dtype: torch.dtype) -> Made:
        scheme = kinds.residual_of(cfg.residual)

        def f(p: tuple[Any, Any], x: Tensor, segments: Segments | None = None) -> Tensor:
            bias = torch.linspace(-0.2, 0.2, 4)
            carry, _ = block.apply(
                p[0], scheme.start(x, cfg.residual), cfg, segments=segments, bias=bias
            )
            return scheme.finish(p[1], carry, cfg.residual)

        specs = (block.specs(cfg), scheme.specs_out(cfg.residual, D))
        return f, (_drawn(specs, key, dtype), _x(key, dtype))

    return make


def _mtp(key: Tensor, dtype: torch.dtype) -> Made:
    cfg = mtp.Config(LAYERS["block.mla_dense"])
    tokens = random.bits(random.fold_in(key, 2), (B, T)) % Z

    def f(p: tuple[Any, Any], h: Tensor, segments: Segments | None = None) -> Tensor:
        return mtp.apply(p[0], h, tokens, cfg, embed=p[1], segments=segments).hidden

    specs = (mtp.specs(cfg), embedding.specs(embedding.Config(Z, D, init_std=1.0)))
    return f, (_drawn(specs, key, dtype), _x(key, dtype))


CASES = [*(Case(name, _block(cfg)) for name, cfg in LAYERS.items()), Case("mtp", _mtp)]
