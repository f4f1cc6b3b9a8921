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
    named: dict[str, str] = {}
    for name in (*cfg.used(), *cfg.sublayers):  # unused ones only where K3 states one all the same
        kind = kinds.kind_of(cfg.sublayers[name]).name
        if name in cfg.used() and (kind not in _NAMES or named.get(_NAMES[kind], name) != name):
            raise ValueError(
                f"K3's config.json has no place for layers of kind {kind} (model.{name}): it has "
                "one KDA, one MLA or DSA, one dense MLP and one LatentMoE; such a model cannot be "
                "exported"
            )
        if kind in _NAMES:
            named.setdefault(_NAMES[kind], name)
    if absent := sorted(set(_NAMES.values()) - named.keys()):
        raise ValueError(
            f"K3's config.json states the sizes of {', '.join(absent)} too, which model.Config."
            "sublayers does not have; add them, used or not"
        )
    ours = {name: k3 for k3, name in named.items()}
    layers = tuple((ours[mixer], ours[ffn]) for mixer, ffn in cfg.layers)
    mtp = tuple(ours[name] for name in cfg.mtp)
    sublayers = {k3: cfg.sublayers[named[k3]] for k3 in ("kda", "full_attention", "dense", "moe")}
    return dataclasses.replace(cfg, sublayers=model.Sublayers(**sublayers), layers=layers, mtp=mtp)


def block_size(cfg: model.Config) -> int | None:
    """Of AttnRes; None: the residual is plain."""
    scheme = kinds.kind_of(cfg.residual)
    if scheme not in (attn_res.KIND, plain_residual.KIND):
        raise ValueError(
            f"model.Config.residual is an {scheme.name}.Config, which K3's format has no name for; "
            "export AttnRes or plain"
        )
    return cfg.residual.block_size if scheme is attn_res.KIND else None
