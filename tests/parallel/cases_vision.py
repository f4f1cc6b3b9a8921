"""The vision tower on one rank's arrays; spawned processes import it from here."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from k31fn import tree
from k31fn.layers import projector, vision, vision_block
from k31fn.layers.patches import Patches
from k31fn.parallel import MeshAxes, Sharding, pvary

BLOCK = vision_block.Config(
    hidden_size=8, num_heads=4, head_dim=4, intermediate_size=12, init_std=0.5
)
TOWER = vision.Config(
    BLOCK, num_layers=2, patch_size=2, num_channels=3, table_size=(3, 5), num_frames=2
)
PROJECTOR = projector.Config(TOWER.output_size, 6)


def images_into_text(
    axes: MeshAxes,
    weights: dict[str, Any],
    pixels: Tensor,
    patches: Patches,
    x: Tensor,
    slots: Tensor,
) -> Tensor:
    """Tower, projector, and the features in their places among the embeddings ``x``."""
    sh = Sharding.on(axes)
    weights = tree.map(lambda w: pvary(w, axes.data), weights)
    y = vision.apply(weights["tower"], pixels, TOWER, patches=patches, sh=sh)
    return projector.place(
        x, projector.apply(weights["projector"], y, PROJECTOR, sh=sh), slots, sh=sh
    )
