# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The teacher of the indexer: probabilities of all heads on tiles that hold a chosen key, added
head by head, for a strip of queries at a time; then those of each set.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff.custom_vjp import detached
from k31fn.kernels.attention.triton.arithmetic import chosen, product, rows_of
from k31fn.kernels.attention.triton.masks import occupied, tile_lists
from k31fn.kernels.attention.triton.op import refused, sizes
from k31fn.kernels.launch import Build, Tile, grouped, looping_grid
from k31fn.kernels.sparse_attention.triton.selection import selection

__all__ = ["accepts", "builds", "head_probs"]

# Per kind of device and bytes of a number: ``rows`` queries and ``columns`` keys.
_TILES = {
    ("cuda", 2): Tile(warps=8, rows=128, columns=64, stages=3),
    ("cuda", 4): Tile(warps=8, rows=32, columns=32, stages=1),
    ("npu", 2): Tile(rows=32, columns=32),
    ("npu", 4): Tile(rows=32, columns=32),
    ("cpu", 2): Tile(rows=32, columns=32),
    ("cpu", 4): Tile(rows=32, columns=64),
}
_STRIP = 2**25  # probabilities that are held at once, of a row of the batch
_SLOTS = 1024  # of a set, read in one step
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def head_probs_tiles(
    q_ptr,
    k_ptr,
    shared_ptr,
    lse_ptr,
    seen_ptr,
    tiles_ptr,
    counts_ptr,
    sums_ptr,
    first,
    queries,
    keys,
    seen_rows,
    most,
    pieces,
    scale,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    N_PADDED: tl.constexpr,
    P_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One tile of queries and keys of the strip from the query ``first`` on, all heads."""
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        t = first + (piece // most) * ROWS
        tile = t // ROWS
        if piece % most < tl.load(counts_ptr + tile):
            key = tl.load(tiles_ptr + tile * most + piece % most) * COLUMNS
            there = queries - t
            row = (queries * 0 + t).to(tl.int64) * H  # 64 bits: all heads pass 2^31 numbers
            from_key = (keys * 0 + key).to(tl.int64)
            ks = rows_of(shared_ptr + from_key * P, c, keys - key, P, P, P_PADDED)
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            for h in range(H):
                at = q_ptr + (row + h) * (N + P)
                q = rows_of(at, r, there, H * (N + P), N, N_PADDED)
                k = rows_of(k_ptr + (from_key * H + h) * N, c, keys - key, H * N, N, N_PADDED)
                scores = tl.zeros((ROWS, COLUMNS), tl.float32)
                scores = product(q, tl.trans(k), scores, WIDE)
                if P > 0:
                    qs = rows_of(at + N, r, there, H * (N + P), P, P_PADDED)
                    scores = product(qs, tl.trans(ks), scores, WIDE)
                lse = tl.load(lse_ptr + h * queries + t + r, mask=r < there, other=1e30)
                sums += tl.exp2(scores * (scale * _LOG2E) - lse[:, None] * _LOG2E)
            words = seen_ptr + (keys * 0 + key).to(tl.int64) // 32 * seen_rows + t
            seen = chosen(words, seen_rows, ROWS, COLUMNS)
            at = sums_ptr + (keys * 0 + (t - first)).to(tl.int64) * keys + key
            here = (r < there)[:, None] & (c < keys - key)[None, :]
            at += r[:, None] * keys + c[None, :]
            tl.store(at, tl.where(seen, sums, 0.0), mask=here)


@triton.jit
def head_probs_sets(
    sums_ptr,
    seen_ptr,
    topk_ptr,
    out_ptr,
    first,
    rows,
    keys,
    width,
    seen_rows,
    slots,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """What each set's keys have; NaN in a row with a position that is there twice."""
    m = tl.arange(0, SLOTS)
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        strip = (rows * 0 + i).to(tl.int64)
        row = strip + first
        words = tl.arange(0, WORDS)
        at = seen_ptr + words.to(tl.int64) * seen_rows + row
        bits = tl.load(at, mask=words < width, other=0)
        set_bits = (bits[:, None] >> tl.arange(0, 32)[None, :]) & 1
        different = tl.sum(tl.sum(set_bits, 1), 0)
        number = different * 0
        for j in range(0, slots, SLOTS):
            key = tl.load(topk_ptr + row * slots + j + m, mask=m < slots - j, other=-1)
            number += tl.sum((key >= 0).to(tl.int32), 0)
        # Without a wait for the device nothing else can say that the contract was not kept.
        unlike = tl.where(number == different, 0.0, float("nan"))
        for j in range(0, slots, SLOTS):
            key = tl.load(topk_ptr + row * slots + j + m, mask=m < slots - j, other=-1)
            probs = tl.load(sums_ptr + strip * keys + key, mask=key >= 0, other=0.0) + unlike
            tl.store(out_ptr + row * slots + j + m, probs, mask=m < slots - j)


def accepts(
    q: Tensor, k: Tensor, k_shared: Tensor, lse: Tensor, topk_idx: Tensor, scale: float
) -> str:
    """Why :func:`head_probs` cannot run, or nothing."""
    del lse, topk_idx, scale
    return refused(q, k, k_shared, k)


def head_probs(
    q: Tensor, k: Tensor, k_shared: Tensor, lse: Tensor, topk_idx: Tensor, scale: float
) -> Tensor:
    """The op; contract in :mod:`k31fn.kernels.sparse_attention`, with each position once."""

    def launch(*operands: Tensor) -> tuple[Tensor, ...]:
        return (_launch(scale, *operands),)

    seen, _ = selection(topk_idx, k.shape[1])
    # of a head together: as the attention made them
    operands = detached((q, k, k_shared, lse.mT, topk_idx, seen))
    return grouped(launch, *(x[None] for x in operands))[0].squeeze(0)


def _launch(scale: float, *operands: Tensor) -> Tensor:
    groups = max(x.shape[0] for x in operands)
    whole = [x.expand(groups, *x.shape[1:]).flatten(0, 1).contiguous() for x in operands]
    keys = whole[1].shape[1]
    tile = _TILES[whole[0].device.type, whole[0].itemsize]
    lists = tile_lists(occupied(whole[-1], keys, True), tile.rows, tile.columns)
    out = torch.empty_like(whole[4], dtype=torch.float32)
    for line in zip(*whole, *lists, out, strict=True):
        _one_row(scale, tile, *line)
    return out.unflatten(0, (groups, -1))


def _one_row(
    scale: float,
    tile: Tile,
    q: Tensor,
    k: Tensor,
    k_shared: Tensor,
    lse: Tensor,
    topk_idx: Tensor,
    seen: Tensor,
    tiles: Tensor,
    counts: Tensor,
    out: Tensor,
) -> None:
    """Fills ``out [T M]``, strip by strip."""
    queries, slots = topk_idx.shape
    keys = len(k)
    strip = max(1, _STRIP // max(1, keys * tile.rows)) * tile.rows
    sums = q.new_empty((min(strip, queries), keys), dtype=torch.float32)
    given = sizes(q, k, k_shared, k, tile)
    del given["V"], given["V_PADDED"]
    words = triton.next_power_of_2(seen.shape[0])
    for first in range(0, queries, strip):
        rows = min(strip, queries - first)
        pieces = triton.cdiv(rows, tile.rows) * tiles.shape[1]
        head_probs_tiles[looping_grid(pieces)](
            q,
            k,
            k_shared,
            lse,
            seen,
            tiles,
            counts,
            sums,
            first,
            queries,
            keys,
            seen.shape[1],
            tiles.shape[1],
            pieces,
            scale,
            **given,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        head_probs_sets[looping_grid(rows)](
            sums,
            seen,
            topk_idx,
            out,
            first,
            rows,
            keys,
            *seen.shape,
            slots,
            SLOTS=_SLOTS,
            WORDS=words,
            num_warps=4,
        )


def builds(kind: str) -> list[Build]:
    """What is compiled for heads of 128 + 64 dims on a kind of device."""
    integers = ("first", "queries", "keys", "width", "seen_rows", "most", "pieces", "rows", "slots")
    types = dict.fromkeys(integers, "i32") | {"scale": "fp32"}
    types |= dict.fromkeys(("lse_ptr", "sums_ptr", "out_ptr"), "*fp32")
    types |= dict.fromkeys(("seen_ptr", "tiles_ptr", "counts_ptr", "topk_ptr"), "*i32")
    found = []
    for dtype, itemsize in (("bf16", 2), ("fp32", 4)):
        tile = _TILES[kind, itemsize]
        known = types | dict.fromkeys(("q_ptr", "k_ptr", "shared_ptr"), f"*{dtype}")
        signature = {n: known[n] for n in head_probs_tiles.arg_names if n in known}
        constants = {"H": 96, "N": 128, "P": 64, "N_PADDED": 128, "P_PADDED": 64, "WIDE": False}
        constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns}
        label = f"head_probs_tiles {dtype}"
        found.append(Build(label, head_probs_tiles, signature, constants, "forward", tile))
    signature = {n: types[n] for n in head_probs_sets.arg_names if n in types}
    constants = {"SLOTS": _SLOTS, "WORDS": 256}
    found.append(Build("head_probs_sets", head_probs_sets, signature, constants, "forward", Tile()))
    return found
