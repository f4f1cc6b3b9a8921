"""Plain torch form, tiled over queries."""

from __future__ import annotations

import torch

from k31fn.kernels.tiling import map_query_tiles, visible_keys
from k31fn.precision import upcast
from k31fn.typing import Float, Int, Tensor

__all__ = ["interval_attention"]

# finite: a row without keys gives no NaN; absorbs any score, so exp gives exactly 0
_MASKED = -1e30


def interval_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S H K"],
    v: Float[Tensor, "B S H V"],
    start: Int[Tensor, "B T"],
    stop: Int[Tensor, "B T"],
    scale: float,
) -> Float[Tensor, "B T H V"]:
    """``softmax(scale q k^T) v`` over the keys ``start <= s < stop`` of each query."""
    queries = upcast(q).transpose(1, 2) * scale, start[..., None], stop[..., None]
    keys = upcast(k).transpose(1, 2), upcast(v).transpose(1, 2)
    # not causal: a query sees later tokens of its own image, so no tile may cut the keys
    tiles = map_query_tiles(_tile, queries, keys, width=q.shape[0] * q.shape[2], causal=False)
    out = torch.cat(tiles, dim=-2).transpose(1, 2)
    return torch.where((start < stop)[..., None, None], out, 0.0)


def _tile(q: Tensor, start: Tensor, stop: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.where(visible_keys(start, stop, k.shape[-2]), 0.0, _MASKED).to(q.dtype)
    return torch.softmax(q @ k.transpose(-1, -2) + bias[:, None], dim=-1) @ v
