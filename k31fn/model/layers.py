"""Layers one after the other: what the backward computes again of them, and what they report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from k31fn import balance as quantile
from k31fn.autodiff.remat import remat as rematerialise
from k31fn.layers import block, kinds
from k31fn.layers.kind import Aux
from k31fn.layers.router import NUM_BINS
from k31fn.model.config import Config, experts
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
    "collect",
    "recomputed",
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
        placement: of MoonEP's plan on this rank, violations and replicas, a row per MoE layer
            ``[M 2]``; ``()`` with another placement.
    """

    kl: Tensor
    load: Tensor
    histogram: Tensor
    logits: Any = ()
    placement: Any = ()


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
        # Each layer's weights are gathered again for its backward, while the one before it runs,
        # and inputs of runs of layers are made again: no remat of one layer can know of the next.
        plan = RematPlan(_kept(remat))
        if remat == "cross_layer":
            plan = dataclasses.replace(plan, every=RUN, light=light)
        return scan(steps, placements, params, carry, shared, own, plan)
    ahead = Prefetch(params, placements, range(len(params))) if placements else None
    reports = []
    for step, layer, of_layer in zip(steps, params, own, strict=True):
        # What is taken was gathered while the step before ran; the next gather starts now.
        weights = layer if ahead is None else ahead.take()
        carry, aux = recomputed(step, remat)(weights, carry, shared, of_layer)
        reports.append(aux)
    return carry, reports


def recomputed(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """One layer by itself, whose weights are whole: the same with or without ``cross_layer``."""
    # Of a single layer there is no run of layers to make again: cross_layer is intra_layer.
    return layer if remat == "none" else rematerialise(layer, keep=tuple(_kept(remat)))


def _kept(remat: Remat) -> frozenset[str]:
    return frozenset(block.BRANCHES if remat in ("intra_layer", "cross_layer") else ())


def bias_of(balance: quantile.State, layer: int, cfg: block.Config) -> Any:
    """The router's bias of a layer by its global number; ``()`` for one that has no router."""
    # A state of a pipeline stage has rows of its own layers only, hence by the global number.
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
    # Empty tensors and not (): what a stage of a pipeline reports has the same structure with or
    # without such layers. Made from the ids, so that they vary over what the reports vary over.
    counts = segments.ids.new_zeros((0, experts(cfg).num_experts), dtype=torch.int32)
    no_kl = counts.new_zeros((0,), dtype=island(dtype))
    no_histogram = counts[..., None].expand(-1, -1, NUM_BINS)
    # Logits are of this rank's heads, so there is nothing to sum.
    logits = [r.logits for r in reports if isinstance(r.logits, Tensor)]
    # Plans, too, are of this rank: whoever ends the run for one names it.
    plans = [r.placement for r in reports if isinstance(r.placement, Tensor)]
    no_plans: Any = () if experts(cfg).placement == "plain" else counts.new_zeros((0, 2))
    return Reports(
        _summed("kl", reports, no_kl, sh),
        _summed("load", reports, counts, sh),
        _summed("histogram", reports, no_histogram, sh),
        torch.stack(logits) if logits else (),
        torch.stack(plans) if plans else no_plans,
    )


def _summed(part: str, reports: Sequence[Aux], none: Tensor, sh: Sharding) -> Tensor:
    """The part of those layers that report it, summed over the ranks of a sequence, of which each
    counted its own tokens.
    """
    reported = []
    for aux in reports:
        value = getattr(aux, part)
        if isinstance(value, Tensor):
            reported.append(value)
    # Stacked first: one collective for all layers.
    return psum(torch.stack(reported), sh.sequence) if reported else none
