"""LatentMoE on one rank of a mesh, as the tests run it on every backend."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from k31fn import params, random, tree
from k31fn.autodiff import decision, remat
from k31fn.kernels.experts import grouped_matmul, permute
from k31fn.layers import latent_moe
from k31fn.parallel import (
    AxisRules,
    Mesh,
    MeshAxes,
    P,
    Sharding,
    all_gather,
    axis_index,
    fsdp,
    partition,
    pslice,
    psum,
    pvary,
    wait,
)
from k31fn.parallel.collectives import axis_size
from k31fn.parallel.expert import plan_exchange, receive_back, send_back, send_rows
from k31fn.segments import Segments

CFG = latent_moe.Config(
    hidden_size=8, latent_size=8, expert_size=8, shared_size=8, num_experts=8, top_k=2
)
WHOLE = AxisRules(spread=(), expert_spread=())
TOKENS = P(("dp", "fsdp"), ("cp", "tp"))


def mesh_of(axes: MeshAxes) -> Mesh:
    views = ("pp", "dp", "fsdp", "cp", "tp", "ep")
    return Mesh(**{v: math.prod(a.size for a in axes.view(v)) for v in views})


def placed(axes: MeshAxes, weights: Any, rules: AxisRules = WHOLE) -> Any:
    """The weights as the model hands them to a layer."""
    specs = latent_moe.specs(CFG)
    return fsdp.gather(
        weights, fsdp.placements(specs, partition(specs, rules, mesh_of(axes)), axes)
    )


def moe(axes: MeshAxes, weights: Any, x: Tensor, bias: Tensor) -> Tensor:
    return latent_moe.apply(placed(axes, weights), x, CFG, bias=bias, sh=Sharding.on(axes)).y


def spread_moe(axes: MeshAxes, weights: Any, x: Tensor, bias: Tensor) -> Tensor:
    """With the weights spread over the data axes too."""
    return latent_moe.apply(
        placed(axes, weights, AxisRules()), x, CFG, bias=bias, sh=Sharding.on(axes)
    ).y


def counted_moe(axes: MeshAxes, weights: Any, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """And how many tokens of all ranks chose each expert."""
    out = latent_moe.apply(placed(axes, weights), x, CFG, bias=bias, sh=Sharding.on(axes))
    return out.y, psum(out.aux.load, axes.atoms)


def remat_moe(axes: MeshAxes, weights: Any, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    def layer(weights: Any, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        out = latent_moe.apply(weights, x, CFG, bias=bias, sh=Sharding.on(axes))
        return out.y, out.aux.load

    y, load = remat(layer)(placed(axes, weights), x, bias)
    return y, psum(load, axes.atoms)


def remat_moe_output(axes: MeshAxes, weights: Any, x: Tensor, bias: Tensor) -> Tensor:
    return remat_moe(axes, weights, x, bias)[0]


def padded_moe(axes: MeshAxes, weights: Any, x: Tensor, bias: Tensor, segments: Segments) -> Tensor:
    """What padding gives is of no use to anyone, and zero here."""
    sh = Sharding.on(axes)
    y = latent_moe.apply(placed(axes, weights), x, CFG, bias=bias, segments=segments, sh=sh).y
    return torch.where(pslice(segments.ids, sh.sequence, 1)[..., None] > 0, y, 0)


def moe_with_other_leaves(axes: MeshAxes, weights: Any, x: Tensor, bias: Tensor) -> Tensor:
    """Weights that hold quantised or low-rank experts; floating ones vary over the data axes where
    they are whole.
    """

    def vary(path: str, w: Tensor) -> Tensor:
        return pvary(w, axes.view("dp", "efsdp") if path.startswith("experts") else axes.data)

    return latent_moe.apply(
        tree.map_with_path(vary, weights), x, CFG, bias=bias, sh=Sharding.on(axes)
    ).y


def moe_with_all_experts(axes: MeshAxes, weights: Any, x: Tensor, bias: Tensor) -> Tensor:
    """Every rank gets all experts and computes its own tokens."""
    weights = placed(axes, weights)
    whole = dataclasses.replace(
        weights, experts=tree.map(lambda w: all_gather(w, axes.ep), weights.experts)
    )
    return latent_moe.apply(whole, x, CFG, bias=bias).y


def moe_of_all_tokens(axes: MeshAxes, weights: Any, x: Tensor, bias: Tensor) -> Tensor:
    """Every rank gets all experts and all tokens, and keeps its own share of the result."""
    y = moe_with_all_experts(axes, weights, all_gather(x, axes.ep), bias)
    share = y.shape[0] // axis_size(axes.ep)
    return y[int(axis_index(axes.ep)) * share :][:share]


def arguments(batch: int = 4, length: int = 8) -> tuple[Any, Tensor, Tensor]:
    """Weights of order one, tokens and a bias that prefers some experts."""
    weights = params.init(latent_moe.specs(CFG), random.key(3), dtype=torch.float64)
    weights = tree.map(
        lambda w: 25 * w if w.ndim > 1 else w + 0.1 * torch.linspace(-1, 1, len(w)), weights
    )
    x = random.normal(random.key(4), (batch, length, CFG.hidden_size)).double()
    return weights, x, 0.1 * random.normal(random.key(5), (CFG.num_experts,)).float()


# ------------------------------------------------------------------------------------- the exchange
def exchanged(axes: MeshAxes, rows: Tensor, sizes: Tensor, w: Tensor) -> Tensor:
    """Each rank's rows, sorted by expert, times the matrix of their expert, on the rank that has
    it.
    """
    exchange = decision("exchange", plan_exchange, sizes[0], axes.ep, rows.shape[1])
    came = permute(wait(send_rows(rows[0], exchange, axes.ep)), exchange.order, exchange.inverse)
    y = permute(
        grouped_matmul(came, pvary(w, axes.efsdp), exchange.sizes), exchange.inverse, exchange.order
    )
    return receive_back(send_back(y, exchange, axes.ep), exchange, axes.ep)[None]


def exchanged_twice(axes: MeshAxes, rows: Tensor, sizes: Tensor, w: Tensor) -> Tensor:
    """In remat, which runs it again."""
    return remat(lambda rows, sizes, w: exchanged(axes, rows, sizes, w))(rows, sizes, w)


def by_hand(axes: MeshAxes, rows: Tensor, sizes: Tensor, w: Tensor) -> Tensor:
    """The same on one device, a rank and an expert at a time."""
    parts = [
        [x @ m for x, m in zip(r.split(n.tolist()), w, strict=True)]
        for r, n in zip(rows, sizes, strict=True)
    ]
    return torch.stack([torch.cat(p) for p in parts])
