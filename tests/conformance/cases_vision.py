"""The vision tower, one of its layers and the projector as the conformance suite sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from k31fn import params, random
from k31fn.layers import projector, vision, vision_block
from k31fn.layers.patches import Grid, from_grids
from tests.conformance.case import Case

BLOCK = vision_block.Config(
    hidden_size=4, num_heads=2, head_dim=4, intermediate_size=3, init_std=0.5
)
TOWER = vision.Config(
    BLOCK, num_layers=1, patch_size=1, num_channels=2, table_size=(2, 3), num_frames=2
)
PROJECTOR = projector.Config(3, 4)
Made = tuple[Callable[..., Any], tuple[Any, ...]]
IMAGES: list[list[Grid]] = [[(1, 2, 2)], []]
CLIPS: list[list[Grid]] = [[(2, 2, 2)], [(1, 2, 4)]]


def _tower(rows: list[list[Grid]], max_frames: int) -> Callable[[Tensor, torch.dtype], Made]:
    def make(key: Tensor, dtype: torch.dtype) -> Made:
        patches = from_grids(rows, 8, max_frames=max_frames)
        pixels = random.normal(random.fold_in(key, 1), (2, 8, 2)).to(dtype)
        slots = torch.tensor([[0, -1], [-1, 1]])

        def f(p: vision.Params[Tensor], pixels: Tensor) -> Tensor:
            y = vision.apply(p, pixels, TOWER, patches=patches)
            return projector.place(torch.zeros(2, 2, TOWER.output_size, dtype=dtype), y, slots)

        return f, (params.init(vision.specs(TOWER), key, dtype=dtype), pixels)

    return make


def _projector(key: Tensor, dtype: torch.dtype) -> Made:
    x = random.normal(random.fold_in(key, 1), (2, 3, 3)).to(dtype)
    return lambda p, x: projector.apply(p, x, PROJECTOR), (
        params.init(projector.specs(PROJECTOR), key, dtype=dtype),
        x,
    )


CASES = [
    Case("vision_images", _tower(IMAGES, 1), packed=False, shape=(2, 8)),
    Case("vision_clips", _tower(CLIPS, 2), packed=False, shape=(2, 8)),
    Case("projector", _projector, packed=False, shape=(2, 3)),
]
