"""A recipe's model with a layer or two of each kind, for forecasts that add up.

What a hundred layers hold or send follows from one layer of each kind and from what another layer
of that kind adds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from k31fn import model
from k31fn.config.recipe import Recipe
from k31fn.layers import kinds

__all__ = ["LayerKind", "layer_kinds", "with_layers"]

LayerKind = tuple[str, str]
"""Names of a layer's token mixer and of its channel mixer, as in the model's ``layers``."""


def layer_kinds(cfg: model.Config) -> list[LayerKind]:
    """What each layer is."""
    return list(cfg.layers)


def with_layers(recipe: Recipe, layers: Sequence[LayerKind]) -> Recipe:
    """The recipe with a model of layers of these kinds; those without experts come first."""

    def has_experts(layer: LayerKind) -> bool:
        config = recipe.model.sublayers[layer[1]]
        return kinds.channel_mixer_of(config).experts is not None

    cfg = dataclasses.replace(recipe.model, layers=tuple(sorted(layers, key=has_experts)))
    return dataclasses.replace(recipe, model=cfg)
