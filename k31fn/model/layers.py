"""The decoder layers, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from k31fn import balance as quantile
from k31fn import tree
from k31fn.autodiff import remat as rematerialise
from k31fn.layers import block, latent_moe
from k31fn.layers.router import NUM_BINS
from k31fn.model.config import Config, layer_configs
from k31fn.model.params import Params
from k31fn.parallel.collectives import psum
from k31fn.parallel.fsdp import Placements
from k31fn.parallel.scan import Prefetch, Step, scan
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.precision import island
from k31fn.segments import Segments

__all__ = ["Remat", "Reports", "bias_of", "check_remat", "collect", "join", "run_layers", "run_steps"]

Remat = Literal["none", "layer"]
"""What the backward computes again: nothing, or each layer from its input, its routes and its top-k sets."""


class Reports(NamedTuple):
    """What layers report besides their output, of a slice of the context; empty where no layer has the part.

    Attributes:
        kl: indexer KL per full-attention layer, summed over valid queries ``[layers]``.
        load: real tokens per expert ``[M E]``, a row per MoE layer.
        histogram: the routers' required biases ``[M E bins]``.
    """

    kl: Tensor
    load: Tensor
    histogram: Tensor


def run_layers(
    params: Params[Tensor],
    carry: Any,
    cfg: Config,
    *,
    layers: range,
    balance: quantile.State,
    segments: Segments,
    remat: Remat = "none",
    placements: Any = (),
    sh: Sharding = UNSHARDED,
) -> tuple[Any, Reports]:
    """Runs decoder layers on the residual state.

    With ``placements`` the weights of a layer are gathered while the layer before it runs. ``remat="layer"`` then keeps
    none of them and gathers again for the backward (:func:`k31fn.parallel.scan`); derivatives are of first order.

    Args:
        params: of the model, or of a stage that has these layers.
        carry: what the layer before ``layers`` left, or :func:`k31fn.model.start`.
        cfg: of the whole model.
        layers: global numbers, ascending and without gaps.
        balance: the routers' biases, of these layers at least.
        segments: packed documents.
        remat: what the backward computes again.
        placements: of the parameters, a tree like ``params``; ``()``: they are whole over the data axes.
        sh: sharding.

    Returns:
        The next residual state, and what these layers report.
    """
    configs = [layer_configs(cfg)[i] for i in layers]
    steps = [functools.partial(_run_layer, layer, sh) for layer in configs]
    own = [params.layers[i] for i in layers]
    biases = [bias_of(balance, i, layer) for i, layer in zip(layers, configs, strict=True)]
    places = [placements.layers[i] for i in layers] if placements else []
    carry, reports = run_steps(steps, own, places, carry, segments, biases, remat=remat)
    return carry, collect(reports, cfg, segments, tree.leaves(carry)[0].dtype, sh)


def run_steps(
    steps: Sequence[Step],
    params: Sequence[Any],
    placements: Sequence[Placements],
    carry: Any,
    shared: Any,
    own: Sequence[Any],
    *,
    remat: Remat,
) -> tuple[Any, Sequence[Any]]:
    """``carry, aux[i] = steps[i](params[i], carry, shared, own[i])`` one after the other, as :func:`run_layers` does.

    ``placements`` of each step's parameters; none: they are whole. Returns the last carry and each step's ``aux``.
    """
    if placements and remat == "layer":
        return scan(steps, placements, params, carry, shared, own)
    ahead = Prefetch(params, placements, range(len(params))) if placements else None
    reports = []
    for step, layer, mine in zip(steps, params, own, strict=True):
        weights = layer if ahead is None else ahead.take()
        carry, aux = (rematerialise(step) if remat == "layer" else step)(weights, carry, shared, mine)
        reports.append(aux)
    return carry, reports


def _run_layer(cfg: block.Config, sh: Sharding, params: Any, carry: Any, segments: Segments, bias: Any) -> Any:
    """``block.apply`` with every tensor as an argument, as remat needs it."""
    return block.apply(params, carry, cfg, segments=segments, bias=bias, sh=sh)


def bias_of(balance: quantile.State, layer: int, cfg: block.Config) -> Any:
    """The router's bias of a layer by its global number; ``()`` for one that has no router."""
    return quantile.bias_of(balance, layer) if isinstance(cfg.ffn, latent_moe.Config) else ()


def collect(
    reports: Sequence[block.Aux], cfg: Config, segments: Segments, dtype: torch.dtype, sh: Sharding = UNSHARDED
) -> Reports:
    """The layers' reports stacked and summed over ``sh.sequence``, so that they are of all tokens of the slice.

    The empty ones, too, vary over the data axes only, as the segments do; ``dtype`` is that of hidden states.
    """
    kl = [r.kl for r in reports if isinstance(r.kl, Tensor)]
    load = [r.load for r in reports if isinstance(r.load, Tensor)]
    histogram = [r.histogram for r in reports if isinstance(r.histogram, Tensor)]
    none = segments.ids.new_zeros((0, cfg.moe.num_experts), dtype=torch.int32)
    return Reports(
        psum(torch.stack(kl), sh.sequence) if kl else none.new_zeros((0,), dtype=island(dtype)),
        psum(torch.stack(load), sh.sequence) if load else none,
        psum(torch.stack(histogram), sh.sequence) if histogram else none[..., None].expand(-1, -1, NUM_BINS),
    )


def join(*reports: Reports) -> Reports:
    """The reports of layers that follow one another."""
    return Reports(*(torch.cat(parts) for parts in zip(*reports, strict=True)))


def check_remat(remat: str) -> None:
    """Raises ValueError about an unknown ``remat``."""
    if remat not in get_args(Remat):
        raise ValueError(f"remat={remat!r} unknown; use 'none' or 'layer'")
