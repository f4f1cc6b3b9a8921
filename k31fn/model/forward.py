"""From tokens and images to hidden states: embedding, decoder layers, final mix and norm; and the
head.

The model is ``finish(run_layers(start(tokens)))``. A pipeline stage runs :func:`start` if it is the
first, its part of the layers with :func:`run_layers`, and :func:`finish` if it is the last.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, get_args

from torch import Tensor

from k31fn import balance as quantile
from k31fn import scopes, tree
from k31fn import segments as seg
from k31fn.layers import block, embedding, kinds, norm
from k31fn.layers.linear import linear
from k31fn.layers.patches import Images
from k31fn.model.config import Config, embedding_config, final_norm_config, layer_configs
from k31fn.model.images import check_images, see
from k31fn.model.layers import Remat, Reports, bias_of, collect, run_steps
from k31fn.model.params import Params, whole
from k31fn.parallel.context import whole_slice
from k31fn.parallel.fsdp.placement import Placements
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.segments import Segments
from k31fn.typing import Float, Int

__all__ = [
    "Final",
    "Output",
    "apply",
    "check_layers",
    "finish",
    "logits",
    "run_layers",
    "start",
]


class Final(NamedTuple):
    """What the last stage makes of the residual state.

    Attributes:
        hidden: ``[B T D]`` after the final norm, before the head.
        residual: ``[B T D]`` after the final mix, before the final norm (input of an MTP layer).

    On a mesh these are the rank's own tokens.
    """

    hidden: Float[Tensor, "B T D"]
    residual: Float[Tensor, "B T D"]


class Output(NamedTuple):
    """What :func:`apply` computes.

    Attributes:
        hidden, residual: as in :class:`Final`.
        kl: indexer KL per layer with one, summed over valid queries ``[layers]``.
        load: real tokens per expert ``[M E]``, M as in :func:`moe_layers` without the MTP layer.
        histogram: the router's required biases ``[M E bins]``.
        logits: the largest attention logit of each local head of each layer that reports them, over
            the rank's own queries ``[layers H]``; ``()`` if none does.
        placement: of MoonEP's plan on this rank, violations and replicas ``[M 2]``; ``()`` with
            another placement.
    """

    hidden: Float[Tensor, "B T D"]
    residual: Float[Tensor, "B T D"]
    kl: Tensor
    load: Tensor
    histogram: Tensor
    logits: Any = ()
    placement: Any = ()


def apply(
    params: Params[Tensor],
    tokens: Int[Tensor, "B T"],
    cfg: Config,
    *,
    balance: quantile.State,
    segments: Segments | None = None,
    images: Images | tuple[()] = (),
    remat: Remat = "none",
    placements: Placements = (),
    sh: Sharding = UNSHARDED,
) -> Output:
    """The hidden states of ``tokens``.

    On a mesh ``tokens`` and ``segments`` are those of the rank's slice of the context, equal over
    ``sh.sequence``, and hidden states are split by token over both. Nothing is summed over the
    context or over rows.

    Args:
        params: as :func:`specs` declares.
        tokens: ids below ``vocab_size``, checked where the batch is made.
        cfg: the model's config.
        balance: the routers' biases, from :func:`init_balance` or the step before.
        segments: packed documents; None: one document per row.
        images: of the rows, whose features take the places of their placeholders; ``()``: none on
            any rank.
        remat: what the backward computes again (:data:`~k31fn.model.layers.Remat`).
        placements: of the parameters over the data axes, a tree like ``params``
            (:mod:`k31fn.parallel.fsdp`); ``()``: they are whole.
        sh: sharding.

    Raises:
        ValueError: parameters of another number of layers, a None leaf, segments of another shape
            than the tokens, a bias of another number of experts, an unknown ``remat``, images that
            are not of these tokens or that the model cannot see.
    """
    check_layers(params, cfg)
    _check_remat(remat)
    # Always segments from here on: one code path for packed rows and for whole ones.
    if segments is None:
        segments = whole_slice(tokens.shape[0], tokens.shape[1], sh.context, device=tokens.device)
    seg.check_shape(segments, tokens)
    how: Any = {"placements": placements, "sh": sh}
    carry = start(params, tokens, cfg, images=images, remat=remat, **how)
    carry, reports = run_layers(
        params,
        carry,
        cfg,
        layers=range(cfg.num_layers),
        balance=balance,
        segments=segments,
        remat=remat,
        **how,
    )
    final = finish(params, carry, cfg, **how)
    return Output(*final, *reports)


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
    configs = layer_configs(cfg)
    steps, weights, biases, places = [], [], [], []
    for number in layers:
        layer = configs[number]
        run = functools.partial(_run_layer, layer, sh)
        steps.append(scopes.of_layer(block.title(layer), run))  # its name in a profiler's trace
        weights.append(params.layers[number])
        biases.append(bias_of(balance, number, layer))
        if placements:
            places.append(placements.layers[number])
    # for step in steps: carry, aux = step(weights, carry, segments, bias)
    carry, reports = run_steps(
        steps,
        weights,
        places,
        carry,
        segments,
        biases,
        remat=remat,
        light=block.without_branches,
    )
    # The carry's dtype and not the embedding's: a float64 run reports in float64.
    return carry, collect(reports, cfg, segments, tree.leaves(carry)[0].dtype, sh)


def _run_layer(
    cfg: block.Config, sh: Sharding, params: Any, carry: Any, segments: Segments, bias: Any
) -> Any:
    """``block.apply`` with every tensor as an argument: a remat gives no gradient to what a
    function captures.
    """
    return block.apply(params, carry, cfg, segments=segments, bias=bias, sh=sh)


def start(
    params: Params[Tensor],
    tokens: Int[Tensor, "B T"],
    cfg: Config,
    *,
    images: Images | tuple[()] = (),
    remat: Remat = "none",
    placements: Placements = (),
    sh: Sharding = UNSHARDED,
) -> Any:
    """The residual state before the first layer, from the embedding and the images."""
    table = whole(params, "embedding", placements)
    x = embedding.apply(table, tokens, embedding_config(cfg), sh=sh)
    # Every rank has images or none has: their tower issues collectives.
    if not isinstance(images, tuple):
        check_images(images, tokens, cfg)
        x = see(params, x, images, cfg, remat=remat, placements=placements, sh=sh)
    return kinds.residual_of(cfg.residual).start(x, cfg.residual)


def finish(
    params: Params[Tensor],
    carry: Any,
    cfg: Config,
    *,
    placements: Placements = (),
    sh: Sharding = UNSHARDED,
) -> Final:
    """The final mix and norm of the residual state after the last layer."""
    mix = whole(params, "final_mix", placements)
    weight = whole(params, "final_norm", placements)
    residual = kinds.residual_of(cfg.residual).finish(mix, carry, cfg.residual, sh=sh)
    return Final(norm.apply(weight, residual, final_norm_config(cfg), sh=sh), residual)


def logits(params: Params[Tensor], hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T Z"]:
    """Scores of the vocabulary, for sampling.

    Training uses :func:`loss`, which never holds them all.
    """
    # Whole weights, unlike all else here: sampling runs on one device.
    return linear(hidden, params.head)


def check_layers(params: Params[Tensor], cfg: Config) -> None:
    """Raises ValueError about parameters of another number of layers, or with a None leaf."""
    tree.leaves(params)  # refuses None
    given = len(params.layers)
    # Fewer would run, and give the loss of another model.
    if given != cfg.num_layers:
        raise ValueError(
            f"model.Config.num_layers={cfg.num_layers}, but params has {given} layers; use their "
            "config"
        )


def _check_remat(remat: str) -> None:
    """Raises ValueError about an unknown ``remat``."""
    # A wrong name would compute the right numbers with another memory.
    if remat not in get_args(Remat):
        raise ValueError(f"remat={remat!r} unknown; use one of {', '.join(get_args(Remat))}")
