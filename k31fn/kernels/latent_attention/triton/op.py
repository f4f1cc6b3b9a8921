# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
"""Launches of the gathered kernels, a strip of queries at a time. First order only.

A forward makes the weights of a strip and then their sums; what is kept is the output and one
number per query and head. A backward makes probabilities and gradients of scores of a strip, from
them those of its queries, and one row for each slot: rows are then added to their keys in the order
of the queries, so that no two programs write to one place.

Beside inputs and results a strip holds at most ``2 H`` (forward: ``H``) numbers for each slot, and
in the backward ``K`` more and a position: 1.6 GiB at 96 heads, 576 dims and bfloat16, of any
length; and ``4 S K`` bytes of the keys' gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp, detached
from k31fn.kernels.latent_attention.triton.scores import (
    latent_score_gradients,
    latent_scores,
)
from k31fn.kernels.latent_attention.triton.strips import (
    HEADS,
    TILES,
    Strip,
    Tiles,
    accepts,
    at_once,
    fold,
    options,
    sizes_of,
    strips,
)
from k31fn.kernels.latent_attention.triton.sums import (
    latent_delta,
    latent_key_sums,
    latent_rows,
    latent_sums,
)
from k31fn.kernels.launch import Build, Tile, grouped, looping_grid
from k31fn.kernels.sparse_attention.reference import SparseAttentionOut

__all__ = ["accepts", "builds", "latent_attention"]


def latent_attention(
    q: Tensor, kv: Tensor, topk_idx: Tensor, scale: float, rank: int
) -> SparseAttentionOut:
    """The op; contract in :mod:`k31fn.kernels.latent_attention`."""
    parts = []
    for some in q.split(HEADS, dim=2):
        parts.append(_attend(*(x[None] for x in (some, kv, topk_idx)), scale, rank))
    outs, statistics = zip(*parts, strict=True)
    out, lse = (x[0] if len(x) == 1 else torch.cat(x, dim=3) for x in (outs, statistics))
    return SparseAttentionOut(out.squeeze(0), detached(lse.squeeze(0)))


def _fwd(*args: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    *operands, scale, rank = args

    def launch(*operands: Tensor) -> tuple[Tensor, ...]:
        return _launch_forward(scale, rank, *operands)

    out, lse = grouped(launch, *operands)
    return (out, lse), (*operands, out, lse)


def _bwd(
    scale: float, rank: int, residuals: tuple[Tensor, ...], cts: tuple[Tensor, Tensor]
) -> tuple[Tensor | None, ...]:
    # none flows through the statistics: they teach the indexer
    def launch(*operands: Tensor) -> tuple[Tensor, ...]:
        return _launch_backward(scale, *operands)

    del rank  # that of the output
    return *grouped(launch, *residuals, cts[0]), None


_attend = custom_vjp(
    _fwd, _bwd, nondiff_argnums=(3, 4), opaque=True, name="latent_attention (triton)"
)


def _split(rank: int, shared: int, tile: Tile) -> dict[str, int]:
    """Constants that say how the dims of a sum are split over programs."""
    columns = min(tile.columns, max(16, triton.next_power_of_2(rank)))
    splits = triton.cdiv(rank, columns)
    each = max(16, triton.next_power_of_2(triton.cdiv(shared, splits))) if shared else 0
    return {"DIMS": columns, "SHARED": each, "SPLITS": splits}


def _launch_forward(scale: float, rank: int, *operands: Tensor) -> tuple[Tensor, ...]:
    groups, tiles, (q, kv, sets) = fold(*operands)
    out = q.new_empty((*q.shape[:3], rank))
    lse = q.new_full(q.shape[:3], 1e30, dtype=torch.float32)
    if not sets.shape[2]:
        out.zero_()
    tile = tiles.scores
    weights = q.new_empty((at_once(sets), q.shape[2], sets.shape[2]))
    statistics = (at_once(sets), sets.shape[2] // tile.rows, q.shape[2])
    largest = q.new_empty(statistics, dtype=torch.float32)
    total = torch.empty_like(largest)
    for strip, _, results in strips(q, kv, sets, out, lse):
        pieces = strip.pieces(tile)
        latent_scores[looping_grid(pieces)](
            *strip,
            weights,
            largest,
            total,
            sets.shape[2],
            pieces,
            scale * math.log2(math.e),
            **strip.sizes(tile),
            **options(tile),
        )
        _sum(tiles, strip, weights, largest, total, *results, rank, softmax=True)
    return tuple(x.unflatten(0, (groups, -1)) for x in (out, lse))


def _sum(
    tiles: Tiles,
    strip: Strip,
    weights: Tensor,
    largest: Tensor,
    total: Tensor,
    out: Tensor,
    lse: Tensor,
    rank: int,
    *,
    softmax: bool,
) -> None:
    """Fills ``out`` with sums over the keys of a strip; with ``softmax`` also ``lse``."""
    tile = tiles.sums
    shared = strip.kv.shape[1] - rank
    sizes = strip.sizes(tile) | _split(rank, 0 if softmax else shared, tile)
    del sizes["K"]
    pieces = len(strip.sets) * sizes["SPLITS"]
    tiles_of_set = strip.sets.shape[1] // tiles.scores.rows
    latent_sums[looping_grid(pieces)](
        weights,
        strip.kv,
        strip.sets,
        largest,
        total,
        out,
        lse,
        strip.sets.shape[1],
        pieces,
        **sizes,
        R=rank,
        P=shared,
        SCORED=tiles.scores.rows,
        TILES=triton.next_power_of_2(tiles_of_set),
        SOFTMAX=softmax,
        **options(tile),
    )


def _launch_backward(scale: float, *operands: Tensor) -> tuple[Tensor, ...]:
    groups, tiles, (q, kv, sets, out, lse, ct) = fold(*operands)
    d_q = torch.zeros_like(q)
    d_kv = torch.zeros_like(kv, dtype=torch.float32)
    probs = q.new_empty((at_once(sets), q.shape[2], sets.shape[2]))
    d_scores = torch.empty_like(probs)
    rows = q.new_empty((at_once(sets), sets.shape[2], q.shape[3]))
    for strip, line, of_strip in strips(q, kv, sets, out, lse, ct, d_q):
        *residuals, d_q_strip = of_strip
        _score_gradients(scale, tiles, strip, *residuals, probs, d_scores)
        lse_strip = residuals[1]
        unused = (lse_strip, lse_strip)
        results = (d_q_strip, lse_strip, out.shape[3])
        _sum(tiles, strip, d_scores, *unused, *results, softmax=False)
        _add_by_key(tiles, strip, residuals[2], probs, d_scores, rows, d_kv[line])
    grads = (d_q, d_kv.to(kv.dtype))
    return tuple(x.unflatten(0, (groups, -1)) for x in grads)


def _score_gradients(
    scale: float,
    tiles: Tiles,
    strip: Strip,
    out: Tensor,
    lse: Tensor,
    ct: Tensor,
    probs: Tensor,
    d_scores: Tensor,
) -> None:
    """Fills probabilities and gradients of the scores of a strip."""
    rank = out.shape[2]
    delta = torch.empty_like(lse)
    latent_delta[looping_grid(triton.cdiv(delta.numel(), tiles.delta.rows))](
        out,
        ct,
        delta,
        delta.numel(),
        R=rank,
        ROWS=tiles.delta.rows,
        WIDTH=triton.next_power_of_2(rank),
        num_warps=tiles.delta.warps,
    )
    tile = tiles.gradients
    pieces = strip.pieces(tile)
    latent_score_gradients[looping_grid(pieces)](
        *strip,
        ct,
        lse,
        delta,
        probs,
        d_scores,
        strip.sets.shape[1],
        pieces,
        scale,
        R=rank,
        **strip.sizes(tile),
        **options(tile),
    )


def _add_by_key(
    tiles: Tiles,
    strip: Strip,
    ct: Tensor,
    probs: Tensor,
    d_scores: Tensor,
    rows: Tensor,
    d_kv: Tensor,
) -> None:
    """Adds to ``d_kv`` what the queries of a strip give their keys, by way of a row each."""
    keys, width = strip.kv.shape
    rank = ct.shape[2]
    tile = tiles.rows
    pieces = strip.pieces(tile)
    latent_rows[looping_grid(pieces)](
        strip.q,
        ct,
        probs,
        d_scores,
        rows,
        strip.sets.shape[1],
        pieces,
        R=rank,
        **strip.sizes(tile),
        **options(tile),
    )
    # stable: rows of a key stay in the order of their queries; slots of -1 come before key 0
    by_key, order = torch.sort(strip.sets.flatten(), stable=True)
    first = torch.arange(keys + 1, dtype=by_key.dtype, device=by_key.device)
    starts = torch.searchsorted(by_key, first)
    shared = width - rank
    latent_key_sums[looping_grid(keys)](
        rows,
        order,
        starts,
        d_kv,
        keys,
        R=rank,
        P=shared,
        ROWS=tiles.keys.rows,
        WIDTH=triton.next_power_of_2(rank),
        SHARED=triton.next_power_of_2(max(1, shared)),
        num_warps=tiles.keys.warps,
    )


def builds(kind: str) -> list[Build]:
    """What is compiled for 96 heads over latents of 512 + 64 dims on a kind of device."""
    rank, shared = 512, 64
    wide = ("largest_ptr", "total_ptr", "lse_ptr", "delta_ptr", "d_kv_ptr")
    types = dict.fromkeys(("slots", "pieces", "rows", "keys"), "i32") | {"scale": "fp32"}
    types |= dict.fromkeys(wide, "*fp32") | {"topk_ptr": "*i32"}
    types |= dict.fromkeys(("order_ptr", "starts_ptr"), "*i64")
    found = []
    # float32 for one of the kinds: it takes CUDA's compiler long
    for dtype, itemsize in (("bf16", 2),) if kind == "cuda" else (("bf16", 2), ("fp32", 4)):
        tiles = TILES[kind, itemsize]
        tensors = ("q_ptr", "kv_ptr", "ct_ptr", "out_ptr", "weights_ptr", "probs_ptr")
        known = types | dict.fromkeys((*tensors, "d_scores_ptr", "rows_ptr"), f"*{dtype}")
        of_sums = {"SCORED": tiles.scores.rows, "TILES": 2048 // tiles.scores.rows}
        softmax = {**_split(rank, 0, tiles.sums), **of_sums, "SOFTMAX": True}
        plain = {**_split(rank, shared, tiles.sums), **of_sums, "SOFTMAX": False}
        of_rows = {"WIDTH": rank, "SHARED": shared}
        for kernel, tile, direction, constants in (
            (latent_scores, tiles.scores, "forward", {}),
            (latent_sums, tiles.sums, "forward", softmax),
            (latent_score_gradients, tiles.gradients, "backward", {}),
            (latent_sums, tiles.sums, "backward", plain),
            (latent_delta, tiles.delta, "backward", of_rows),
            (latent_rows, tiles.rows, "backward", {}),
            (latent_key_sums, tiles.keys, "backward", of_rows),
        ):
            given = {**sizes_of(96, rank + shared, tile), "WIDE": False, "R": rank, "P": shared}
            given |= {"ROWS": tile.rows, **constants}
            signature = {n: known[n] for n in kernel.arg_names if n in known}
            needed = {n: given[n] for n in kernel.arg_names if n in given}
            name = f"{kernel.__name__} {direction} {dtype}"
            found.append(Build(name, kernel, signature, needed, direction, tile))
    return found
