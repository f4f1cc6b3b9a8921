"""Balancing of the routed experts, by quantiles (Kimi K3 report, arXiv 2607.24653, eq. 14 and
appendices C, D).

The bias that is added to the router's scores when experts are chosen is state, not a parameter: the
step takes it, returns histograms of required biases, and :func:`update` turns their sum into the
bias of the next step. With ``m`` tokens and top ``k`` of ``n`` experts each expert should get ``m k
/ n`` of them. Expert ``j`` is taken by the tokens whose required bias ``r_ij = alpha_i - s_ij`` is
at most ``b_j``, so the bias that balances is the ``k / n`` quantile of ``r_:j``. There is no step
size and no auxiliary loss. Only differences between biases matter: their mean is removed.

The alternative, :func:`update_by_sign` (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), knows the
loads alone: the bias of an expert with more tokens than the mean falls by a fixed step, that of one
with fewer rises by it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from k31fn import tree
from k31fn.kernels.histogram.reference import bin_range
from k31fn.typing import Float, Int, Tensor

__all__ = ["State", "bias_of", "init", "update", "update_by_sign"]


def __dir__() -> list[str]:
    return __all__


@tree.dataclass
class State:
    """Biases of the MoE layers of a model, or of a pipeline stage (then possibly of none).

    Attributes:
        bias: one row per layer.
        layers: global numbers of these layers, in the order of the rows.
    """

    bias: Float[Tensor, "M E"]
    layers: tuple[int, ...] = tree.static()


def init(
    layers: Sequence[int], num_experts: int, *, device: torch.device | str | None = None
) -> State:
    """Zero biases for the MoE layers with these global numbers.

    Raises:
        ValueError: a layer is named twice.
    """
    if len(set(layers)) != len(layers):
        raise ValueError(
            f"balance.init: layers={list(layers)} names a layer twice; every row is one layer"
        )
    # float32 in any model: bfloat16 would round the changes of a step away.
    return State(
        torch.zeros(len(layers), num_experts, dtype=torch.float32, device=device), tuple(layers)
    )


def bias_of(state: State, layer: int) -> Float[Tensor, "E"]:
    """The bias of the layer with this global number.

    Raises:
        ValueError: the state has no such layer.
    """
    if layer not in state.layers:
        raise ValueError(
            f"balance: layer {layer} has no bias; the state holds layers {list(state.layers)}"
        )
    return state.bias[state.layers.index(layer)]


def update(state: State, histogram: Int[Tensor, "M E num_bins"], *, top_k: int) -> State:
    """The biases for the next step.

    The number of tokens is what the histogram counts. A layer without any count (balancing off, or
    a step without a token) keeps its bias.

    Args:
        state: the biases that the step used: they fix the range of the bins.
        histogram: the routers' histograms, summed over micro-batches and over all ranks that hold
            tokens.
        top_k: experts per token.

    Raises:
        ValueError: the histogram does not fit the state, or ``top_k`` is not below the number of
            experts.
    """
    num_experts = state.bias.shape[1]
    if histogram.shape[:2] != state.bias.shape:
        raise ValueError(
            f"balance.update: histogram {list(histogram.shape)} for biases {list(state.bias.shape)}"
        )
    if not 0 < top_k < num_experts:
        raise ValueError(
            f"balance.update: top_k={top_k} must be in 1..{num_experts - 1}: the cutoff is the "
            f"(top_k+1)-th best of {num_experts} experts"
        )
    low, width = bin_range(state.bias, histogram.shape[-1])
    bias = _quantile(histogram, low, width, top_k=top_k)
    # Only differences choose; without this all biases could drift away together.
    bias = bias - bias.mean(-1, keepdim=True)
    # Selected on the device: the step waits for no histogram.
    counted = (histogram > 0).any(-1).all(-1, keepdim=True)
    return State(torch.where(counted, bias, state.bias).to(state.bias.dtype), state.layers)


def update_by_sign(state: State, load: Int[Tensor, "M E"], *, step: float) -> State:
    """The biases for the next step: ``b + step sign(mean load - load)``, less their mean.

    A layer without a token keeps its bias.

    Args:
        state: the biases that the step used.
        load: real tokens per expert, summed over micro-batches and over all ranks that hold tokens.
        step: of each bias; the scores that they are added to lie between 0 and 1.

    Raises:
        ValueError: the load does not fit the state.
    """
    if load.shape != state.bias.shape:
        raise ValueError(
            f"balance.update_by_sign: load {list(load.shape)} for biases {list(state.bias.shape)}"
        )
    # In integers: the mean need not be one.
    below = load.sum(-1, keepdim=True) - load * load.shape[-1]
    bias = state.bias + step * below.sign()
    return State(bias - bias.mean(-1, keepdim=True), state.layers)


def _quantile(
    histogram: Int[Tensor, "M E num_bins"],
    low: Float[Tensor, "M 1"],
    width: Float[Tensor, "M 1"],
    *,
    top_k: int,
) -> Float[Tensor, "M E"]:
    """The ``top_k / E`` quantile of each expert's required biases, off by less than a bin.

    With ``q = m top_k / E``: the first bin where the cumulative count reaches ``ceil(q)``, plus the
    share of that bin's counts that is needed to come to ``q``.
    """
    num_experts, num_bins = histogram.shape[-2:]
    cumulative = histogram.cumsum(-1, dtype=torch.int32)
    # q num_experts: integers stay exact at any token count.
    scaled = cumulative[..., -1:].to(torch.int64) * top_k
    # The bins whose count stays below ceil(q) lie before the one that is looked for.
    reached = (scaled + num_experts - 1) // num_experts
    index = (cumulative < reached).sum(-1, keepdim=True).clamp(max=num_bins - 1)
    inside = histogram.gather(-1, index)
    before = cumulative.gather(-1, index) - inside
    missing = (scaled - before.to(torch.int64) * num_experts).to(low.dtype) / num_experts
    # An empty bin has no share to give: 0 / 1.
    share = (missing / inside.clamp(min=1)).clamp(0, 1)
    return (low[..., None] + (index + share) * width[..., None]).squeeze(-1)
