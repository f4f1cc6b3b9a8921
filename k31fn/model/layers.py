"""The decoder layers, one after the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from k31fn import balance as quantile
from k31fn import scopes, tree
from k31fn.autodiff.remat import remat as rematerialise
from k31fn.layers import block, kinds
from k31fn.layers.kind import Aux
from k31fn.layers.router import NUM_BINS
from k31fn.model.config import Config, experts, layer_configs
from k31fn.model.params import Params
from k31fn.parallel.collectives import psum
from k31fn.parallel.fsdp.placement import Placements
from k31fn.parallel.scan.forward import scan
from k31fn.parallel.scan.plan import RematPlan, Step
from k31fn.parallel.scan.prefetch import Prefetch
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.precision import island
from k31fn.segments import Segments

__all__ = [
    "RUN",
    "Remat",
    "Reports",
    "bias_of",
    "check_remat",
    "collect",
    "join",
    "recomputed",
    "run_layers",
    "run_steps",
]

Remat = Literal["none", "layer", "intra_layer", "cross_layer"]
"""What the backward computes again. Kept are, besides routes and top-k sets:

* ``none``: everything.
* ``layer``: each layer's input.
* ``intra_layer``: each layer's input, and of both its sublayers the output and what is inside; what
  joins them to the residual state, and the norms, run again.
* ``cross_layer``: the same, with the input of every :data:`RUN`-th layer only, in a pipeline of the
  layers of a stage. Those of the others are made again from it, in a pipeline while the cotangent
  travels.
"""

RUN = 8
"""Layers of a run in ``remat="cross_layer"``: as many inputs are there at once in the backward."""


class Reports(NamedTuple):
    """What layers report besides their output, of a slice of the context; empty where no layer has
    the part.

    Attributes:
        kl: indexer KL per layer with one, summed over valid queries ``[layers]``.
        load: real tokens per expert ``[M E]``, a row per MoE layer.
        histogram: the routers' required biases ``[M E bins]``.
        logits: the largest attention logit of each local head of each layer that reports them
            ``[layers H]``; ``()`` if none does.
    """

    kl: Tensor
    load: Tensor
    histogram: Tensor
    logits: Any = ()


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

    With ``placements`` the weights of a layer are gathered while the layer before it runs. With any
    ``remat`` but "none" none of them are kept, and they are gathered again for the backward
    (:func:`k31fn.parallel.scan`); derivatives are of first order then, as with ``intra_layer`` and
    ``cross_layer`` outside of ``torch.func``.

    Args:
        params: of the model, or of a stage that has these layers.
        carry: what the layer before ``layers`` left, or :func:`k31fn.model.start`.
        cfg: of the whole model.
        layers: global numbers, ascending and without gaps.
        balance: the routers' biases, of these layers at least.
        segments: packed documents.
        remat: what the backward computes again.
        placements: of the parameters, a tree like ``params``; ``()``: they are whole over the data
            axes.
        sh: sharding.

    Returns:
        The next residual state, and what these layers report.
    """
    configs = [layer_configs(cfg)[i] for i in layers]
    steps = [
        scopes.of_layer(block.title(layer), functools.partial(_run_layer, layer, sh))
        for layer in configs
    ]
    own = [params.layers[i] for i in layers]
    biases = [bias_of(balance, i, layer) for i, layer in zip(layers, configs, strict=True)]
    places = [placements.layers[i] for i in layers] if placements else []
    light = block.without_branches
    carry, reports = run_steps(
        steps, own, places, carry, segments, biases, remat=remat, light=light
    )
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
    light: Callable[[Any], Any],
) -> tuple[Any, Sequence[Any]]:
    """``carry, aux[i] = steps[i](params[i], carry, shared, own[i])`` one after the other, as
    :func:`run_layers` does.

    ``placements`` of each step's parameters; none: they are whole. ``light`` of them is what a step
    needs whose sublayers are kept. Returns the last carry and each step's ``aux``.
    """
    if remat == "cross_layer" or (placements and remat != "none"):
        plan = RematPlan(_kept(remat))
        if remat == "cross_layer":
            plan = dataclasses.replace(plan, every=RUN, light=light)
        return scan(steps, placements, params, carry, shared, own, plan)
    ahead = Prefetch(params, placements, range(len(params))) if placements else None
    reports = []
    for step, layer, mine in zip(steps, params, own, strict=True):
        weights = layer if ahead is None else ahead.take()
        carry, aux = recomputed(step, remat)(weights, carry, shared, mine)
        reports.append(aux)
    return carry, reports


def recomputed(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """One layer by itself, whose weights are whole: the same with or without ``cross_layer``."""
    return layer if remat == "none" else rematerialise(layer, keep=tuple(_kept(remat)))


def _kept(remat: Remat) -> frozenset[str]:
    return frozenset(block.BRANCHES if remat in ("intra_layer", "cross_layer") else ())


def _run_layer(
    cfg: block.Config, sh: Sharding, params: Any, carry: Any, segments: Segments, bias: Any
) -> Any:
    """``block.apply`` with every tensor as an argument, as remat needs it."""
    return block.apply(params, carry, cfg, segments=segments, bias=bias, sh=sh)


def bias_of(balance: quantile.State, layer: int, cfg: block.Config) -> Any:
    """The router's bias of a layer by its global number; ``()`` for one that has no router."""
    routed = kinds.channel_mixer_of(cfg.ffn).experts is not None
    return quantile.bias_of(balance, layer) if routed else ()


def collect(
    reports: Sequence[Aux],
    cfg: Config,
    segments: Segments,
    dtype: torch.dtype,
    sh: Sharding = UNSHARDED,
) -> Reports:
    """The layers' reports stacked and summed over ``sh.sequence``, so that they are of all tokens
    of the slice.

    The empty ones, too, vary over the data axes only, as the segments do; ``dtype`` is that of
    hidden states.
    """
    kl = [r.kl for r in reports if isinstance(r.kl, Tensor)]
    load = [r.load for r in reports if isinstance(r.load, Tensor)]
    histogram = [r.histogram for r in reports if isinstance(r.histogram, Tensor)]
    logits = [r.logits for r in reports if isinstance(r.logits, Tensor)]
    none = segments.ids.new_zeros((0, experts(cfg).num_experts), dtype=torch.int32)
    return Reports(
        psum(torch.stack(kl), sh.sequence) if kl else none.new_zeros((0,), dtype=island(dtype)),
        psum(torch.stack(load), sh.sequence) if load else none,
        psum(torch.stack(histogram), sh.sequence)
        if histogram
        else none[..., None].expand(-1, -1, NUM_BINS),
        torch.stack(logits) if logits else (),
    )


def join(*reports: Reports) -> Reports:
    """The reports of layers that follow one another."""
    joined = []
    for parts in zip(*reports, strict=True):
        there = [part for part in parts if isinstance(part, Tensor)]
        joined.append(torch.cat(there) if there else ())
    return Reports(*joined)


def check_remat(remat: str) -> None:
    """Raises ValueError about an unknown ``remat``."""
    if remat not in get_args(Remat):
        raise ValueError(f"remat={remat!r} unknown; use one of {', '.join(get_args(Remat))}")
