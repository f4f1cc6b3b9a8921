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

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k31fn import model, precision, tree
from k31fn.config import Recipe
from k31fn.layers import dsa, mla
from k31fn.model.stages import Part
from k31fn.parallel.collectives import pslice
from k31fn.trainer.layout import Layout
from k31fn.typing import Bool, Float

__all__ = ["clip_logits", "reporting"]


def reporting(cfg: model.Config) -> model.Config:
    """The model with attention that reports its logits."""
    full = cfg.full_attention
    attn = full.attn if isinstance(full, dsa.Config) else full
    attn = dataclasses.replace(attn, report_logits=True)
    full = dataclasses.replace(full, attn=attn) if isinstance(full, dsa.Config) else attn
    return dataclasses.replace(cfg, full_attention=full)


def clip_logits(
    recipe: Recipe,
    layout: Layout,
    params: model.Params[Tensor],
    opt_state: Any,
    logits: Float[Tensor, "layers H"],
    skip: Bool[Tensor, ""],
) -> None:
    """Scales this rank's parts of the weights, and float32 masters of them, in place.

    Args:
        recipe: the run; its ``optimizer.qk_clip`` is tau.
        layout: of this rank.
        params: after the optimiser's step.
        opt_state: of them.
        logits: the largest of the step, of its local heads: a row for each full-attention layer of
            its stages, an MTP layer last.
        skip: true: nothing changes.
    """
    tau, cfg = recipe.optimizer.qk_clip, _attention(recipe.model)
    factors: dict[str, Tensor] = {}
    for prefix, row in zip(_prefixes(recipe.model, layout.own), logits, strict=True):
        gamma = torch.where((row > tau) & ~skip, tau / row, 1.0)
        factors[f"{prefix}.w_qb"], factors[f"{prefix}.w_kvb"] = _columns(gamma, cfg)
    places = dict(tree.flatten_with_paths(layout.placements))
    with torch.no_grad():
        for path, factor in factors.items():
            heads = layout.sh.heads
            for axis in places[path].dims[-1]:
                if axis not in (heads if isinstance(heads, tuple) else (heads,)):
                    factor = pslice(factor, axis, 0)
            factors[path] = factor
        for path, x in (*tree.flatten_with_paths(params), *tree.flatten_with_paths(opt_state)):
            own = path.rpartition("master.")[2]
            if own in factors and ("master." in path or path == own):
                wide = precision.upcast(x)
                x.copy_(wide * factors[own].to(wide.dtype))


def _columns(
    gamma: Float[Tensor, "H"], cfg: mla.Config
) -> tuple[Float[Tensor, "HK"], Float[Tensor, "HNV"]]:
    """What the columns of ``w_qb`` and of ``w_kvb`` are multiplied with."""
    root, N, P, V = (
        gamma.sqrt()[:, None],
        cfg.qk_nope_head_dim,
        cfg.qk_rope_head_dim,
        cfg.v_head_dim,
    )
    query = torch.cat([root.expand(-1, N), gamma[:, None].expand(-1, P)], dim=1)
    key = torch.cat([root.expand(-1, N), torch.ones_like(root).expand(-1, V)], dim=1)
    return query.flatten(), key.flatten()


def _attention(cfg: model.Config) -> mla.Config:
    return (
        cfg.full_attention.attn
        if isinstance(cfg.full_attention, dsa.Config)
        else cfg.full_attention
    )


def _prefixes(cfg: model.Config, parts: Sequence[Part]) -> list[str]:
    """Paths of the attention of these stages' full-attention layers, in the order of their
    reports.
    """
    inner = "attn.attn" if isinstance(cfg.full_attention, dsa.Config) else "attn"
    found = [
        f"layers.{i}.{inner}"
        for part in parts
        for i in part.layers
        if i in cfg.full_attention_layers
    ]
    return found + ([f"mtp.layer.{inner}"] if cfg.num_mtp_layers else [])
