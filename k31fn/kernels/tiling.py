"""Query tiles: how attention-like ops in plain torch avoid a tensor of queries x keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from k31fn.autodiff.remat import remat
from k31fn.typing import Bool, Int, Tensor

__all__ = ["map_query_tiles", "visible_keys"]

# measured on CPU: the scores of a tile stay in cache, and a causal run skips almost half the keys
TILE_QUERIES = 64
TILE_ELEMENTS = 2**23  # scores in one tile; fewer queries per tile above
# scores of a whole call that its backward may keep; recomputed tile by tile above
KEPT_ELEMENTS = 2**20
# distinct lengths to which keys are cut: each costs the backward one padded copy of their gradient
_PREFIXES = 8


def map_query_tiles(
    f: Callable[..., Any],
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    *,
    width: int,
    dim: int = -2,
    causal: bool = True,
    gradient: bool = True,
    tile: int = 0,
) -> list[Any]:
    """``f(*queries, *keys)`` on one tile of queries after the other.

    Tiles are rematerialised unless all scores together are few, so a backward holds one tile. If
    ``causal`` and there are as many queries as keys, they are the same tokens in order, no query
    sees a later key, and a tile gets a prefix of the keys.

    Args:
        f: pure; called with each query tensor cut to a tile and each key tensor to a prefix.
        queries: tensors of T queries.
        keys: tensors of S keys.
        width: scores per pair of query and key (batch times heads).
        dim: the dim of the tokens in all of them.
        causal: whether equally many keys are the same tokens, none seen from before it.
        gradient: whether a backward may come. Whether gradients are enabled now does not tell: in
            the first run of an enclosing remat they are not.
        tile: queries of a tile, for an ``f`` that holds no scores; 0: as many as keep scores few.

    Returns:
        The results of ``f``, one per tile in order.
    """
    T = queries[0].shape[dim]
    S = keys[0].shape[dim]
    tile = tile or max(1, min(TILE_QUERIES, TILE_ELEMENTS // max(1, width * S)))
    few = tile >= T or width * T * S <= KEPT_ELEMENTS
    run = remat(f) if gradient and not few else f
    unit = max(1, -(-S // (_PREFIXES * tile)) * tile)
    lengths = []
    # without a query there is one tile, of none: its results have the others' shapes
    for begin in range(0, max(T, 1), tile):
        # up to the tile's last query, rounded up so that there are few distinct lengths
        reach = min(S, -(-(begin + tile) // unit) * unit)
        lengths.append(reach if causal and T == S else S)
    # one cut for each length, not for each tile: its gradient is padded once
    prefixes: dict[int, list[Tensor]] = {}
    for length in dict.fromkeys(lengths):
        prefixes[length] = [k if length == S else k.narrow(dim, 0, length) for k in keys]
    parts = zip(*[q.split(tile, dim=dim) for q in queries], strict=True)
    return [run(*part, *prefixes[length]) for part, length in zip(parts, lengths, strict=True)]


def visible_keys(
    start: Int[Tensor, "*B t 1"], stop: Int[Tensor, "*B t 1"], num_keys: int
) -> Bool[Tensor, "*B t S"]:
    """True at keys ``start <= s < stop`` of each query; a row with ``start == stop`` sees none."""
    index = torch.arange(num_keys, device=start.device)
    return (index >= start) & (index < stop)
