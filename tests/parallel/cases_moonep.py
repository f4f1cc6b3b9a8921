"""MoonEP's LatentMoE on one rank of a mesh, as the tests run it on every backend."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from k31fn import params, random, tree
from k31fn.autodiff import remat
from k31fn.layers import latent_moe
from k31fn.parallel import MeshAxes, Sharding
from tests.parallel import cases_moe

PLAIN = dataclasses.replace(cases_moe.CFG, num_experts=16)
CFG = dataclasses.replace(PLAIN, placement="moonep")


def layer(cfg: latent_moe.Config, axes: MeshAxes, weights: Any, x: Tensor, bias: Tensor) -> Tensor:
    weights = cases_moe.placed(axes, weights)
    return latent_moe.apply(weights, x, cfg, bias=bias, sh=Sharding.on(axes)).y


def moe(axes: MeshAxes, weights: Any, x: Tensor, bias: Tensor) -> Tensor:
    return layer(CFG, axes, weights, x, bias)


def plain_moe(axes: MeshAxes, weights: Any, x: Tensor, bias: Tensor) -> Tensor:
    return layer(PLAIN, axes, weights, x, bias)


def remat_moe(axes: MeshAxes, weights: Any, x: Tensor, bias: Tensor) -> Tensor:
    def run(weights: Any, x: Tensor, bias: Tensor) -> Tensor:
        return latent_moe.apply(weights, x, CFG, bias=bias, sh=Sharding.on(axes)).y

    return remat(run)(cases_moe.placed(axes, weights), x, bias)


def three_layers(
    cfg: latent_moe.Config, axes: MeshAxes, weights: Any, x: Tensor, bias: Tensor
) -> Tensor:
    """Each likes other experts, so each has replicas of its own."""
    for i in range(3):
        x = x + layer(cfg, axes, weights, x, bias.roll(5 * i, -1))
    return x


def stack(axes: MeshAxes, weights: Any, x: Tensor, bias: Tensor) -> Tensor:
    return three_layers(CFG, axes, weights, x, bias)


def arguments(bias: Tensor, batch: int = 4, length: int = 8) -> tuple[Any, Tensor, Tensor]:
    """Weights of order one, tokens, and what the router adds to its scores."""
    weights = params.init(latent_moe.specs(CFG), random.key(3), dtype=torch.float64)
    weights = tree.map(
        lambda w: 25 * w if w.ndim > 1 else w + 0.1 * torch.linspace(-1, 1, len(w)), weights
    )
    x = random.normal(random.key(4), (batch, length, CFG.hidden_size)).double()
    return weights, x, bias
