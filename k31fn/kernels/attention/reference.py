"""Plain torch form, tiled over queries."""

from __future__ import annotations

import torch

from k31fn.kernels.tiling import map_query_tiles, visible_keys
from k31fn.precision import upcast
from k31fn.typing import Bool, Float, Int, Tensor

__all__ = ["attention", "by_head", "heads_first", "masked_scores"]

# finite: a row without keys gives no NaN; absorbs any score, so exp gives exactly 0
_MASKED = -1e30


def attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S Hk N"],
    k_shared: Float[Tensor, "B S P"],
    v: Float[Tensor, "B S Hk V"],
    start: Int[Tensor, "B T"],
    stop: Int[Tensor, "B T"],
    scale: float,
) -> Float[Tensor, "B T H V"]:
    """``softmax(scale q [k ; k_shared]^T) v`` over the keys ``start <= s < stop`` of each query."""
    queries, keys = heads_first(q, k, k_shared, scale)
    values = upcast(v).transpose(1, 2).contiguous()
    bounds = start[..., None], stop[..., None]
    tiles = map_query_tiles(
        _tile, (queries, *bounds), (keys, values), width=q.shape[0] * q.shape[2]
    )
    out = torch.cat(tiles, dim=-2).transpose(1, 2)
    # a query without keys has uniform probabilities, and a mean of values that is no result
    return torch.where((start < stop)[..., None, None], out, 0.0)


def _tile(q: Tensor, start: Tensor, stop: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = masked_scores(q, k, visible_keys(start, stop, k.shape[-2]))
    return by_head(torch.softmax(scores, dim=-1), v)


def heads_first(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S Hk N"],
    k_shared: Float[Tensor, "B S P"],
    scale: float,
) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B Hk S K"]]:
    """Scaled queries and whole keys with heads before tokens, in the softmax's dtype."""
    k = upcast(k).transpose(1, 2)
    k_shared = upcast(k_shared)[:, None]
    keys = torch.cat([k, k_shared.expand(-1, k.shape[1], -1, -1)], dim=-1)
    # the queries are scaled and not the scores, of which there are T times as many
    return upcast(q).transpose(1, 2) * scale, keys


def masked_scores(
    q: Float[Tensor, "B H t K"], k: Float[Tensor, "B Hk S K"], attended: Bool[Tensor, "B t S"]
) -> Float[Tensor, "B H t S"]:
    """``q k^T`` at the attended keys, -1e30 elsewhere: the softmax is exactly 0 there, unless a
    row attends to none.
    """
    # added and not filled in: the bias [t, S] is shared by all heads
    bias = torch.where(attended, 0.0, _MASKED).to(q.dtype)
    return by_head(q, k.transpose(-1, -2)) + bias[:, None]


def by_head(a: Float[Tensor, "B H t n"], b: Float[Tensor, "B Hk n m"]) -> Float[Tensor, "B H t m"]:
    """``a @ b``; one head of ``b`` for all is one product of all rows (``@`` would copy it to each
    head).
    """
    if b.shape[1] == a.shape[1]:
        return a @ b
    return (a.flatten(1, 2) @ b[:, 0]).unflatten(1, a.shape[1:3])
