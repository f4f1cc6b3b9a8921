"""The layers that K3's format has places for, and what a config from it calls them."""

from __future__ import annotations

import dataclasses

from k31fn import model
from k31fn.layers import attn_res, kinds, plain_residual

__all__ = ["block_size", "with_k3_names"]

# What we call the layers of K3, by kind; a model has one of each name.
_NAMES = {
    "kda": "kda",
    "mla": "full_attention",
    "dsa": "full_attention",
    "mlp": "dense",
    "latent_moe": "moe",
}


def with_k3_names(cfg: model.Config) -> model.Config:
    """The model with its layers under the names that :func:`config_from_hf` gives them.

    Raises:
        ValueError: layers that K3's format has no name for, or no config of one that it states.
    """
    used = cfg.used()
    named: dict[str, str] = {}  # K3's name of a layer: ours
    # Used ones first. Of the others K3's file may state one all the same, as a model without dense
    # layers states their size.
    for name in (*used, *cfg.sublayers):
        kind = kinds.kind_of(cfg.sublayers[name]).name
        k3_name = _NAMES.get(kind)
        taken = k3_name is not None and named.get(k3_name, name) != name
        if name in used and (k3_name is None or taken):
            raise ValueError(
                f"K3's config.json has no place for layers of kind {kind} (model.{name}): it has "
                "one KDA, one MLA or DSA, one dense MLP and one LatentMoE; such a model cannot be "
                "exported"
            )
        if k3_name is not None:
            named.setdefault(k3_name, name)
    absent = sorted(set(_NAMES.values()) - named.keys())
    if absent:
        raise ValueError(
            f"K3's config.json states the sizes of {', '.join(absent)} too, which model.Config."
            "sublayers does not have; add them, used or not"
        )
    k3_names = {name: k3_name for k3_name, name in named.items()}
    layers = tuple((k3_names[mixer], k3_names[ffn]) for mixer, ffn in cfg.layers)
    mtp = tuple(k3_names[name] for name in cfg.mtp)
    # In the order of config_from_hf, so that the two can be compared field by field.
    sublayers = model.Sublayers(
        kda=cfg.sublayers[named["kda"]],
        full_attention=cfg.sublayers[named["full_attention"]],
        dense=cfg.sublayers[named["dense"]],
        moe=cfg.sublayers[named["moe"]],
    )
    return dataclasses.replace(cfg, sublayers=sublayers, layers=layers, mtp=mtp)


def block_size(cfg: model.Config) -> int | None:
    """The block size of AttnRes; None: the residual is plain."""
    scheme = kinds.kind_of(cfg.residual)
    if scheme not in (attn_res.KIND, plain_residual.KIND):
        raise ValueError(
            f"model.Config.residual is an {scheme.name}.Config, which K3's format has no name for; "
            "export AttnRes or plain"
        )
    return cfg.residual.block_size if scheme is attn_res.KIND else None
