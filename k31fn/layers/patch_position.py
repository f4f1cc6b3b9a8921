"""Positions of patches: the learned table, stretched over each image, the fixed time table, and the
2D rotation.

The table ``[64 64 D]`` is resized to an image's height and width as
``torch.nn.functional.interpolate(mode="bilinear", align_corners=False)`` does, here per patch: with
table height S and image height h, row r reads the table at ``y = max((r + 1/2) S / h - 1/2, 0)``,
between rows ``floor(y)`` and ``floor(y) + 1``. All of this is integer arithmetic up to one
division, so an image of the table's size reads the table exactly.
"""

from __future__ import annotations

import torch
from einops import rearrange

from k31fn.layers.patches import Patches
from k31fn.precision import upcast
from k31fn.typing import Float, Int, Tensor

__all__ = ["angles", "table_rows", "time_rows"]


def __dir__() -> list[str]:
    return __all__


def table_rows(table: Float[Tensor, "S1 S2 D"], patches: Patches) -> Float[Tensor, "B N D"]:
    """The bilinearly resized table at each patch, in the table's island dtype.

    ``sum over the four table cells around the patch of weight * table[cell]``.
    """
    num_columns = table.shape[1]
    # Wide before the look-up and not after: the look-up's gradient sums many patches.
    flat = rearrange(upcast(table), "row column d -> (row column) d")
    y = _between(patches.row, patches.height, table.shape[0], flat.dtype)
    x = _between(patches.column, patches.width, num_columns, flat.dtype)
    out = torch.zeros((), dtype=flat.dtype, device=flat.device)
    # One corner at a time: all four together would be four times the activations.
    for row, row_weight in y:
        for column, column_weight in x:
            out = out + (row_weight * column_weight)[..., None] * flat[row * num_columns + column]
    return out


def time_rows(
    patches: Patches, num_frames: int, dim: int, dtype: torch.dtype
) -> Float[Tensor, "B N D"]:
    """``[sin(t w) | cos(t w)]`` with ``w_i = 10000^(-2i / dim)`` for frame t = 0, 1, ... of a clip;
    0 in an image.
    """
    device = patches.frame.device
    t = torch.arange(num_frames, dtype=dtype, device=device)
    exponent = torch.arange(dim // 2, dtype=dtype, device=device) / (dim / 2)
    angle = t[:, None] * 10000.0**-exponent
    table = torch.cat([angle.sin(), angle.cos()], dim=-1)
    # `patches.frame` is 0 in an image and counts a clip's frames from 1: row 0 is the image's.
    return torch.cat([torch.zeros_like(table[:1]), table])[patches.frame]


def angles(
    patches: Patches, head_dim: int, theta: float, dtype: torch.dtype
) -> Float[Tensor, "B N K2"]:
    """The angle by which each pair of adjacent query and key dims turns.

    Pair 2i turns by ``column * f_i`` and pair 2i + 1 by ``row * f_i``, ``f_i = theta^(-4i /
    head_dim)``.
    """
    i = torch.arange(head_dim // 4, dtype=dtype, device=patches.row.device)
    frequency = theta ** (-4 * i / head_dim)
    by_column = patches.column[..., None] * frequency
    by_row = patches.row[..., None] * frequency
    # In turn, column first: the released weights were trained with the pairs so.
    both = torch.stack([by_column, by_row], dim=-1)
    return rearrange(both, "b n frequency two -> b n (frequency two)")


def _between(
    index: Int[Tensor, "B N"], size: Int[Tensor, "B N"], table_size: int, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The two table rows that a patch lies between, each with its weight."""
    # In units of 1 / (2 size) of a table row, where the module's y is an integer. Above the first
    # row's middle and below the last one's, the clamps read that row alone.
    place = ((2 * index + 1) * table_size - size).clamp(min=0)
    below = place.div(2 * size, rounding_mode="floor")
    weight = (place - 2 * size * below).to(dtype) / (2 * size).to(dtype)
    return (below, 1 - weight), ((below + 1).clamp(max=table_size - 1), weight)
