"""A recipe's model with a layer or two of each kind, for forecasts that add up.

What a hundred layers hold or send follows from one layer of each kind and from what another layer
of that kind adds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from k31fn import model
from k31fn.config import Recipe
from k31fn.layers import kda, latent_moe

__all__ = ["LayerKind", "layer_kinds", "with_layers"]

LayerKind = tuple[Any, Any]
"""Configs of a layer's attention and of its feed-forward."""


def layer_kinds(cfg: model.Config) -> list[LayerKind]:
    """What each layer is."""
    return [(layer.attention, layer.ffn) for layer in model.layer_configs(cfg)]


def with_layers(recipe: Recipe, kinds: Sequence[LayerKind]) -> Recipe:
    """The recipe with a model of layers of these kinds; dense ones come first."""
    dense = [k for k in kinds if not isinstance(k[1], latent_moe.Config)]
    layers = dense + [k for k in kinds if isinstance(k[1], latent_moe.Config)]
    full = tuple(
        i for i, (attention, _) in enumerate(layers) if not isinstance(attention, kda.Config)
    )
    cfg = dataclasses.replace(
        recipe.model,
        num_layers=len(layers),
        full_attention_layers=full,
        num_dense_layers=len(dense),
    )
    return dataclasses.replace(recipe, model=cfg)
