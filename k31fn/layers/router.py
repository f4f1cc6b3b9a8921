"""Router: which experts a token goes to, with which weights (Kimi K3 report, arXiv 2607.24653).

``s = sigmoid(x W_r)`` in float32; the ``G`` experts with the greatest ``s + b``, the lowest number
first among equals; ``p_j = scale s_j / (sum_chosen s + 1e-20)``. Where all logits are below -40
the 1e-20 counts: two chosen experts at -44 have weights that sum to 0.94 scale, at -50 to 0.04 (the
released code's guard, kept so that checkpoints mean the same). The bias ``b`` chooses and never
weighs, so no gradient reaches it. It is state (:mod:`k31fn.balance`): given to the layer, and
renewed from the histogram that the layer returns.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Generic, NamedTuple

import torch

from k31fn import tree
from k31fn.autodiff.replay import decision, report
from k31fn.kernels.expert_choice import choose_experts
from k31fn.kernels.expert_choice.reference import biased_scores
from k31fn.kernels.histogram import required_bias_histogram
from k31fn.layers.linear import linear
from k31fn.parallel.collectives import pslice, pvary
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import Normal, ParamSpec
from k31fn.params import init as init_params
from k31fn.precision import upcast
from k31fn.segments import Segments
from k31fn.typing import Bool, Float, Int, Leaf, Tensor

__all__ = ["NUM_BINS", "Config", "Params", "Routing", "apply", "init", "specs"]


def __dir__() -> list[str]:
    return __all__


NUM_BINS = 1000
"""Bins of the histogram of required biases."""

_TINY = 1e-20  # K3's guard of the renormalisation: scores that all underflow give zeros, not NaN


@dataclass(frozen=True)
class Config:
    """Top ``top_k`` of ``num_experts``.

    Attributes:
        scale: factor of the renormalised weights.
        balanced: whether to count required biases; without, the histogram is zero and the bias
            stays what it is.
    """

    hidden_size: int
    num_experts: int
    top_k: int
    scale: float = 1.0
    balanced: bool = True
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.hidden_size < 1:
            raise ValueError(f"router.Config.hidden_size={self.hidden_size}: a width is at least 1")
        # All experts may not be chosen: `choose_experts` ranks one more than it takes.
        if not 0 < self.top_k < self.num_experts:
            raise ValueError(
                f"router.Config.top_k={self.top_k} must be in 1..num_experts-1 "
                f"(num_experts={self.num_experts}): "
                "balancing compares a token's choices with the next best expert; lower top_k or "
                "add experts"
            )
        if not self.scale > 0:
            raise ValueError(f"router.Config.scale={self.scale}: a factor of weights is positive")
        if self.init_std < 0:
            raise ValueError(f"router.Config.init_std={self.init_std}: must not be negative")


@tree.dataclass
class Params(Generic[Leaf]):
    """``weight [D E]``."""

    weight: Leaf


class Routing(NamedTuple):
    """What the router decided.

    Attributes:
        topk_idx: chosen experts, best first. Padding has weight zero and is dealt out evenly, to
            load no expert.
        weights: of the chosen experts, zero for padding; float32 (float64 in a float64 run).
        load: tokens that chose each expert; padding not counted.
        histogram: counts of required biases, see :mod:`k31fn.kernels.histogram`; padding not
            counted.
    """

    topk_idx: Int[Tensor, "B T G"]
    weights: Float[Tensor, "B T G"]
    load: Int[Tensor, "E"]
    histogram: Int[Tensor, "E num_bins"]


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares the weight, whole on every rank: a token is routed where it lies."""
    shape = (cfg.hidden_size, cfg.num_experts)
    # The experts' axis has no name, so that no rule splits it: top-k needs the scores of all.
    return Params(
        ParamSpec(shape, ("hidden", ""), Normal(cfg.init_std), tags=frozenset({"matrix"}))
    )


def init(cfg: Config, key: Tensor, *, dtype: torch.dtype | None = None) -> Params[Tensor]:
    """Draws the initial values on the key's device; ``dtype`` as :func:`k31fn.params.init` says."""
    return init_params(specs(cfg), key, dtype=dtype)


def apply(
    params: Params[Tensor],
    x: Float[Tensor, "B T D"],
    cfg: Config,
    *,
    bias: Float[Tensor, "E"],
    segments: Segments | None = None,
    sh: Sharding = UNSHARDED,
) -> Routing:
    """Routes each token by itself; on a mesh, this rank's tokens, which its ``load`` and
    ``histogram`` count.

    ``p_j = scale s_j / (sum_chosen s + 1e-20)``, ``s = sigmoid(x W_r)``. Gradients: of the weights
    to ``params`` and ``x``; the choice and the counts have none.

    The choice, and the next best expert, are one :func:`~k31fn.autodiff.decision`: made once, kept
    by every remat. The counts are a :func:`~k31fn.autodiff.report`: made once, and not kept.

    Args:
        bias: of each expert, added for the choice only.
        segments: of all tokens of the slice of the context; None: no padding.

    Raises:
        ValueError: the bias is of another number of experts.
    """
    if bias.shape[-1] != cfg.num_experts:
        raise ValueError(
            f"router: bias {list(bias.shape)} for num_experts={cfg.num_experts}; it is the "
            "balance state of another "
            "config: take that of model.init_balance(cfg) or of the checkpoint of this model"
        )
    # Whole on every rank, for this rank's tokens: pvary sums its gradient over the ranks.
    weight = tree.map(lambda w: pvary(w, sh.sequence), params.weight)
    # The product too is an island: scores rounded to bfloat16 tie often, and choose otherwise.
    scores = torch.sigmoid(linear(upcast(x), weight))
    valid = torch.ones_like(x[..., 0], dtype=torch.bool)
    if segments is not None:
        # Segments are those of the slice of the context, tokens are split once more.
        valid = pslice(segments.ids, sh.sequence, 1) > 0
    topk_idx, next_best = decision("router", choose_experts, scores, bias, valid, cfg.top_k)
    shapes = (cfg.num_experts,), (cfg.num_experts, NUM_BINS)
    # No gradient reads counts, so a remat need neither keep them nor count again.
    load, histogram = report(
        functools.partial(_count, cfg), shapes, scores, bias, valid, topk_idx, next_best
    )
    # Without the bias, which only chooses: a weight that it moved would train it.
    chosen = scores.gather(-1, topk_idx)
    weights = chosen / (chosen.sum(-1, keepdim=True) + _TINY) * cfg.scale
    return Routing(topk_idx, torch.where(valid[..., None], weights, 0), load, histogram)


def _count(
    cfg: Config,
    scores: Float[Tensor, "B T E"],
    bias: Float[Tensor, "E"],
    valid: Bool[Tensor, "B T"],
    topk_idx: Int[Tensor, "B T G"],
    next_best: Int[Tensor, "B T 1"],
) -> tuple[Int[Tensor, "E"], Int[Tensor, "E num_bins"]]:
    """Load and histogram (:class:`Routing`)."""
    # 32 bits are what `report` takes, and enough for the tokens of a step.
    counts = torch.zeros(cfg.num_experts, dtype=torch.int32, device=scores.device)
    real = valid.to(torch.int32)[..., None].expand(topk_idx.shape)
    load = counts.scatter_add(0, topk_idx.flatten(), real.flatten())
    if not cfg.balanced:
        # Expanded: zeros that nobody counts take no memory.
        return load, torch.zeros_like(load)[:, None].expand(-1, NUM_BINS)
    cutoff = biased_scores(scores, bias).gather(-1, next_best).flatten()
    return load, required_bias_histogram(
        scores.flatten(0, 1), cutoff, valid.flatten(), bias, NUM_BINS
    )
