"""Plain torch form, tiled over queries."""

from __future__ import annotations

import functools

import torch

from k31fn.kernels.tiling import map_query_tiles, visible_keys
from k31fn.kernels.topk import topk as best
from k31fn.precision import upcast
from k31fn.typing import Float, Int, Tensor

__all__ = ["index_scores", "index_topk"]


def index_scores(
    q: Float[Tensor, "B T J I"], k: Float[Tensor, "B S I"], w: Float[Tensor, "B T J"], scale: float
) -> Float[Tensor, "B T S"]:
    """``sum_j w[t, j] relu(scale <q[t, j], k[s]>)`` of all pairs, without a mask.

    Differentiable to any order.
    """
    return head_weighted_scores(upcast(q).flatten(-2) * scale, upcast(w), upcast(k))


def head_weighted_scores(
    q: Float[Tensor, "B t JI"], w: Float[Tensor, "B t J"], k: Float[Tensor, "B S I"]
) -> Float[Tensor, "B t S"]:
    """:func:`index_scores` on scaled queries with their heads flattened."""
    # one product for all heads, then relu: the sum over heads cannot be taken before it
    per_head = q.unflatten(-1, (w.shape[-1], -1)).flatten(-3, -2) @ k.transpose(-1, -2)
    opened = torch.relu(per_head).unflatten(-2, (-1, w.shape[-1]))
    return (w[..., None, :] @ opened).squeeze(-2)


@torch.no_grad()
def index_topk(
    q: Float[Tensor, "B T J I"],
    k: Float[Tensor, "B S I"],
    w: Float[Tensor, "B T J"],
    start: Int[Tensor, "B T"],
    stop: Int[Tensor, "B T"],
    topk: int,
    scale: float,
) -> Int[Tensor, "B T M"]:
    """The ``min(topk, visible)`` best keys of each query by position, then -1."""
    queries = upcast(q).flatten(-2) * scale, upcast(w), start[..., None], stop[..., None]
    choose = functools.partial(_tile, num=min(topk, k.shape[-2]))
    width = w.shape[0] * w.shape[-1]
    return torch.cat(
        map_query_tiles(choose, queries, (upcast(k),), width=width, gradient=False), dim=-2
    )


def _tile(q: Tensor, w: Tensor, start: Tensor, stop: Tensor, k: Tensor, *, num: int) -> Tensor:
    eligible = visible_keys(start, stop, k.shape[-2])
    if k.shape[-2] <= num:  # all of them; no need to know the scores
        chosen = torch.where(eligible, torch.arange(k.shape[-2], device=k.device), -1)
        chosen = torch.nn.functional.pad(chosen, (0, num - k.shape[-2]), value=-1)
    else:
        chosen = best(head_weighted_scores(q, w, k), num, eligible=eligible, ordered=False)
    # by position, with -1 at the end: neighbouring keys are read together
    last = torch.iinfo(torch.int32).max
    chosen = torch.where(chosen < 0, last, chosen).to(torch.int32).sort(dim=-1).values
    # int32 is half the memory of int64; kept between forward and backward
    return torch.where(chosen == last, -1, chosen)
