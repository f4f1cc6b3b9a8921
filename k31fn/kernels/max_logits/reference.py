"""Plain torch form, tiled over queries."""

from __future__ import annotations

from collections.abc import Callable

import torch

from k31fn.kernels.attention.reference import by_head, heads_first
from k31fn.kernels.sparse_attention.reference import as_mask
from k31fn.kernels.tiling import map_query_tiles, visible_keys
from k31fn.typing import Bool, Float, Int, Tensor

__all__ = ["max_chosen_logits", "max_logits"]

_NONE = -1e30  # of a head without any key: finite, and below every logit


@torch.no_grad()
def max_logits(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S Hk N"],
    k_shared: Float[Tensor, "B S P"],
    start: Int[Tensor, "B T"],
    stop: Int[Tensor, "B T"],
    scale: float,
) -> Float[Tensor, "H"]:
    """Largest logit of each head over the keys ``start <= s < stop`` of each query."""

    def tile(q: Tensor, start: Tensor, stop: Tensor, k: Tensor) -> Tensor:
        return _largest(q, k, visible_keys(start, stop, k.shape[-2]))

    return _over_tiles(tile, q, (start[..., None], stop[..., None]), k, k_shared, scale)


@torch.no_grad()
def max_chosen_logits(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S Hk N"],
    k_shared: Float[Tensor, "B S P"],
    topk_idx: Int[Tensor, "B T M"],
    scale: float,
) -> Float[Tensor, "H"]:
    """Largest logit of each head over the keys ``topk_idx[t]`` of each query."""

    def tile(q: Tensor, topk_idx: Tensor, k: Tensor) -> Tensor:
        return _largest(q, k, as_mask(topk_idx, k.shape[-2]))

    return _over_tiles(tile, q, (topk_idx,), k, k_shared, scale)


def _over_tiles(
    tile: Callable[..., Tensor],
    q: Float[Tensor, "B T H K"],
    of_queries: tuple[Tensor, ...],
    k: Float[Tensor, "B S Hk N"],
    k_shared: Float[Tensor, "B S P"],
    scale: float,
) -> Float[Tensor, "H"]:
    queries, keys = heads_first(q, k, k_shared, scale)
    # tiled as the attention is: all logits at once are what the attention avoids too
    width = q.shape[0] * q.shape[2]
    largest = map_query_tiles(tile, (queries, *of_queries), (keys,), width=width, gradient=False)
    return torch.stack(largest).amax(0)


def _largest(
    q: Float[Tensor, "B H t K"], k: Float[Tensor, "B Hk S K"], attended: Bool[Tensor, "B t S"]
) -> Float[Tensor, "H"]:
    scores = torch.where(attended[:, None], by_head(q, k.transpose(-1, -2)), _NONE)
    if not scores.numel():
        return scores.new_full((scores.shape[1],), _NONE)
    return scores.amax(dim=(0, 2, 3))
