"""QK-Clip: keeps attention logits in bounds by scaling the weights that make queries and keys.

Kimi K2 (arXiv 2507.20534), for attention without positions: after a step, for each head of Gated
MLA or DSA whose largest logit m in that step exceeded tau, with ``g = tau / m``::

    its columns of W_qb:  the N dims that meet the head's own keys  *= sqrt(g),
                           the P dims that meet shared keys  *= g
    its columns of W_kvb: the N dims of its keys                    *= sqrt(g)

so every logit of the head is scaled by g exactly. What heads share (W_qa, W_kva, norms) is left
alone, and so are values and the optimiser's moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k31fn import model, precision, tree
from k31fn.layers import kinds
from k31fn.layers.kind import TokenMixer
from k31fn.model.stages import Part
from k31fn.parallel.collectives import pslice
from k31fn.trainer.layout import RankLayout
from k31fn.typing import Bool, Float

__all__ = ["clip_logits", "reporting"]


def reporting(cfg: model.Config) -> model.Config:
    """The model with attention that reports its logits."""
    changed = {}
    for name, config in cfg.sublayers.items():
        kind = kinds.kind_of(config)
        if isinstance(kind, TokenMixer) and kind.with_logits is not None:
            changed[name] = kind.with_logits(config)
    return cfg.with_sublayers(**changed)


def clip_logits(
    layout: RankLayout,
    params: model.Params[Tensor],
    opt_state: Any,
    logits: Float[Tensor, "layers H"],
    skip: Bool[Tensor, ""],
) -> None:
    """Scales this rank's parts of the weights, and float32 masters of them, in place.

    Args:
        layout: of this rank; its recipe's ``optimizer.qk_clip`` is tau.
        params: after the optimiser's step.
        opt_state: of them.
        logits: the largest of the step, of its local heads: a row for each layer of its stages
            that has them, an MTP layer last.
        skip: true: nothing changes.
    """
    recipe = layout.recipe
    tau = recipe.optimizer.qk_clip
    factors: dict[str, Tensor] = {}
    mixers = _clipped(recipe.model, layout.own)
    for (prefix, config), row in zip(mixers, logits, strict=True):
        # 1.0 where nothing is to do: a multiplication by it changes no bit, and needs no branch
        gamma = torch.where((row > tau) & ~skip, tau / row, 1.0)
        scales = kinds.token_mixer_of(config).logit_scales
        assert scales is not None, "only layers with logits are clipped"
        for path, columns in scales(config, gamma).items():
            factors[f"{prefix}.{path}"] = columns
    places = dict(tree.flatten_with_paths(layout.placements))
    with torch.no_grad():
        for path, factor in factors.items():
            # logits are of the local heads, so over their axis factors are split already; over
            # the others, such as fsdp's, a rank takes those of its columns
            heads = layout.sh.heads
            for axis in places[path].dims[-1]:
                if axis not in (heads if isinstance(heads, tuple) else (heads,)):
                    factor = pslice(factor, axis, 0)
            factors[path] = factor
        for path, x in (*tree.flatten_with_paths(params), *tree.flatten_with_paths(opt_state)):
            # masters too: the next step would bring the old weights back from them
            weight = path.rpartition("master.")[2]
            if weight in factors and ("master." in path or path == weight):
                # in place: the state has been given up to this step
                wide = precision.upcast(x)
                x.copy_(wide * factors[weight].to(wide.dtype))


def _clipped(cfg: model.Config, parts: Sequence[Part]) -> list[tuple[str, Any]]:
    """Paths and configs of the token mixers with logits of these stages, in the order of their
    reports.
    """
    mixers = []
    for part in parts:
        for number in part.layers:
            mixers.append((f"layers.{number}.attn", cfg.sublayers[cfg.layers[number][0]]))
    if cfg.mtp:
        mixers.append(("mtp.layer.attn", cfg.sublayers[cfg.mtp[0]]))
    return [
        (path, config)
        for path, config in mixers
        if kinds.token_mixer_of(config).logit_scales is not None
    ]
