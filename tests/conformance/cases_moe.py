"""Norm, MLP, router and LatentMoE for the conformance suite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k31fn import params, random, tree
from k31fn.layers import latent_moe, mlp, norm, router
from k31fn.params import LowRank
from tests.conformance.case import Case

B, T, D = 2, 5, 6


def _weights(specs: Any, key: Tensor, dtype: torch.dtype) -> Any:
    """Matrices of order one, so that no activation sits at zero; norms about one."""
    drawn = params.init(specs, random.fold_in(key, 0), dtype=dtype)
    return tree.map(
        lambda w: 25 * w if w.ndim > 1 else w + 0.1 * torch.linspace(-1, 1, len(w), dtype=dtype),
        drawn,
    )


def _tokens(key: Tensor, dtype: torch.dtype) -> Tensor:
    return random.normal(random.fold_in(key, 1), (B, T, D)).to(dtype)


def _norm(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    cfg = norm.Config(D)
    return lambda p, x: norm.apply(p, x, cfg), (
        _weights(norm.specs(cfg), key, dtype),
        _tokens(key, dtype),
    )


def _mlp(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    cfg = mlp.Config(D, 4)
    return lambda p, x: mlp.apply(p, x, cfg).y, (
        _weights(mlp.specs(cfg), key, dtype),
        _tokens(key, dtype),
    )


def _bias(num_experts: int) -> Tensor:
    return torch.linspace(-0.2, 0.2, num_experts)


def _router(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    cfg = router.Config(D, 4, 2)

    def f(p: Any, x: Any, segments: Any = None) -> Tensor:
        return router.apply(p, x, cfg, bias=_bias(4), segments=segments).weights

    return f, (_weights(router.specs(cfg), key, dtype), _tokens(key, dtype))


MOE = latent_moe.Config(D, latent_size=3, expert_size=3, shared_size=2, num_experts=4, top_k=2)


def _moe(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    def f(p: Any, x: Any, segments: Any = None) -> Tensor:
        return latent_moe.apply(p, x, MOE, bias=_bias(4), segments=segments).y

    return f, (_weights(latent_moe.specs(MOE), key, dtype), _tokens(key, dtype))


def _adapted_moe(key: Tensor, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    """Only the adapters of the experts are differentiated; the base is frozen."""
    base = _weights(latent_moe.specs(MOE), key, dtype)

    def f(adapters: Any, x: Any, segments: Any = None) -> Tensor:
        experts = mlp.Params(
            *(LowRank(w, *ab) for w, ab in zip(tree.leaves(base.experts), adapters, strict=True))
        )
        p = latent_moe.Params(
            base.router, base.latent_down, experts, base.norm, base.latent_up, base.shared
        )
        return latent_moe.apply(p, x, MOE, bias=_bias(4), segments=segments).y

    shapes = [w.shape for w in tree.leaves(base.experts)]
    draw = lambda i, *s: random.normal(random.fold_in(key, i), s).to(dtype)  # noqa: E731
    adapters = tuple(
        (draw(10 + i, e, n, 1), draw(20 + i, e, 1, m)) for i, (e, n, m) in enumerate(shapes)
    )
    return f, (adapters, _tokens(key, dtype))


CASES = [
    Case("norm", _norm, packed=False),
    Case("mlp", _mlp, packed=False),
    Case("router", _router),
    Case("latent_moe", _moe),
    Case("latent_moe_low_rank", _adapted_moe),
]
