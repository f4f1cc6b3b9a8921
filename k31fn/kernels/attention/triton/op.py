# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
"""Launches of the attention kernels; masks are intervals, or the sets of
:mod:`k31fn.kernels.sparse_attention`.

First order only. Of a call the output and one number per query and head are kept. Gradients of the
shared dims are made for each head and added by torch: 4 P bytes a key and head for a moment.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.attention.triton.forward import attention_forward
from k31fn.kernels.attention.triton.gradients import (
    attention_backward_keys,
    attention_backward_queries,
)
from k31fn.kernels.attention.triton.masks import bounds, occupied, tile_lists
from k31fn.kernels.launch import INTERPRETED, Build, Tile, grouped, looping_grid

__all__ = ["accepts", "attend", "attention", "builds", "listed", "refused", "sizes"]


class _Tiles(NamedTuple):
    forward: Tile
    queries: Tile
    keys: Tile


# Per kind of device and bytes of a number: ``rows`` queries and ``columns`` keys.
_TILES = {
    ("cuda", 2): _Tiles(
        Tile(warps=8, rows=128, columns=128, stages=2),
        Tile(warps=8, rows=128, columns=64, stages=2),
        Tile(warps=4, rows=32, columns=64, stages=2),
    ),
    ("cuda", 4): _Tiles(*[Tile(warps=8, rows=32, columns=32, stages=1) for _ in range(3)]),
    ("npu", 2): _Tiles(*[Tile(rows=32, columns=32) for _ in range(3)]),
    ("npu", 4): _Tiles(*[Tile(rows=32, columns=32) for _ in range(3)]),
    ("cpu", 2): _Tiles(*[Tile(rows=32, columns=64) for _ in range(3)]),
    ("cpu", 4): _Tiles(*[Tile(rows=32, columns=32) for _ in range(3)]),
}
_WIDEST = 256  # a row of a head is held in registers


def refused(q: Tensor, k: Tensor, k_shared: Tensor, v: Tensor) -> str:
    """What the kernels cannot multiply, or nothing."""
    if k.shape[2] != q.shape[2]:
        return (
            f"it takes keys and values of each head, got {k.shape[2]} for {q.shape[2]} heads (the "
            "absorbed form)"
        )
    dtypes = {x.dtype for x in (q, k, k_shared, v)}
    if len(dtypes) > 1:
        return f"it takes one dtype, got {', '.join(sorted(map(str, dtypes)))}"
    widths = (k.shape[3], k_shared.shape[2], v.shape[3])
    if max(widths) > _WIDEST:
        return f"a head has at most {_WIDEST} dims of a kind, got {widths}"
    return ""


def accepts(
    q: Tensor, k: Tensor, k_shared: Tensor, v: Tensor, start: Tensor, stop: Tensor, scale: float
) -> str:
    """Why :func:`attention` cannot run, or nothing."""
    del start, stop, scale
    return refused(q, k, k_shared, v)


def attention(
    q: Tensor, k: Tensor, k_shared: Tensor, v: Tensor, start: Tensor, stop: Tensor, scale: float
) -> Tensor:
    """The op; contract in :mod:`k31fn.kernels.attention`."""
    seen = bounds(start, stop)
    operands = (q, k, k_shared, v, seen, seen)
    return attend(*(x[None] for x in operands), scale, False)[0].squeeze(0)


def _fwd(*args: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    *operands, scale, sets = args

    def launch(*operands: Tensor) -> tuple[Tensor, ...]:
        return _launch_forward(scale, sets, *operands)

    out, lse = grouped(launch, *operands)
    return (out, lse), (*operands, out, lse)


def _bwd(
    scale: float, sets: bool, residuals: tuple[Tensor, ...], cts: tuple[Tensor, Tensor]
) -> tuple[Tensor | None, ...]:
    # none flows through the statistics: they teach the indexer
    def launch(*operands: Tensor) -> tuple[Tensor, ...]:
        return _launch_backward(scale, sets, *operands)

    return *grouped(launch, *residuals, cts[0]), None, None


attend = custom_vjp(_fwd, _bwd, nondiff_argnums=(6, 7), opaque=True, name="attention (triton)")
"""``(q, k, k_shared, v, seen, seen_by, scale, sets) -> (out, lse [G B H T])``, each tensor with a
leading dimension of groups; ``seen`` are bounds ``[G B 2 T2]`` of intervals, and again ``seen_by``;
of sets they are the words of :mod:`k31fn.kernels.sparse_attention.triton.selection`.
"""


def _fold(operands: tuple[Tensor, ...]) -> tuple[int, list[Tensor]]:
    """The number of groups, and operands with groups and rows in one dimension."""
    groups = max(x.shape[0] for x in operands)
    whole = [x.expand(groups, *x.shape[1:]) for x in operands]
    return groups, [x.flatten(0, 1).contiguous() for x in whole]


def sizes(q: Tensor, k: Tensor, k_shared: Tensor, v: Tensor, tile: Tile) -> dict[str, Any]:
    """Constants of a launch on operands like these."""
    widths = {"N": k.shape[-1], "P": k_shared.shape[-1], "V": v.shape[-1]}
    padded = {f"{n}_PADDED": max(16, triton.next_power_of_2(w)) for n, w in widths.items()}
    cut = {"ROWS": tile.rows, "COLUMNS": tile.columns, "WIDE": INTERPRETED}
    return {"H": q.shape[-2], **widths, **padded, **cut}


def _options(tile: Tile) -> dict[str, int]:
    return {"num_warps": tile.warps, "num_stages": tile.stages}


def _launch_forward(scale: float, sets: bool, *operands: Tensor) -> tuple[Tensor, ...]:
    groups, (q, k, k_shared, v, seen, _) = _fold(operands)
    lines, queries, heads, _ = q.shape
    _, width, seen_rows = seen.shape
    tile = _TILES[q.device.type, q.itemsize].forward
    out = q.new_empty((lines, queries, heads, v.shape[-1]), dtype=torch.float32)
    lse = q.new_empty((lines, heads, queries), dtype=torch.float32)
    tiles, counts = tile_lists(occupied(seen, k.shape[1], sets), tile.rows, tile.columns)
    pieces = lines * heads * triton.cdiv(queries, tile.rows)
    attention_forward[looping_grid(pieces)](
        q,
        k,
        k_shared,
        v,
        seen,
        tiles,
        counts,
        out,
        lse,
        queries,
        k.shape[1],
        seen_rows,
        width,
        tiles.shape[2],
        pieces,
        scale * math.log2(math.e),
        **sizes(q, k, k_shared, v, tile),
        SETS=sets,
        **_options(tile),
    )
    return tuple(x.unflatten(0, (groups, -1)) for x in (out, lse))


def _launch_backward(scale: float, sets: bool, *operands: Tensor) -> tuple[Tensor, ...]:
    groups, (q, k, k_shared, v, seen, seen_by, out, lse, ct) = _fold(operands)
    lines, queries, heads, _ = q.shape
    _, width, seen_rows = seen.shape
    keys = k.shape[1]
    blocks = occupied(seen, keys, sets)
    d_q, d_k, d_v = (torch.empty_like(x) for x in (q, k, v))
    delta = torch.empty_like(lse)
    # the products take it in the operands' dtype: half the bytes in a loop over all queries
    low = torch.empty_like(ct, dtype=q.dtype)
    # of each head: to add them at once, two programs would write to one place
    parts = q.new_empty((lines, keys, heads, k_shared.shape[-1]), dtype=torch.float32)
    of_queries, of_keys = _TILES[q.device.type, q.itemsize][1:]
    tiles, counts = tile_lists(blocks, of_queries.rows, of_queries.columns)
    pieces = lines * heads * triton.cdiv(queries, of_queries.rows)
    attention_backward_queries[looping_grid(pieces)](
        q,
        k,
        k_shared,
        v,
        seen,
        tiles,
        counts,
        out,
        lse,
        ct,
        low,
        delta,
        d_q,
        queries,
        keys,
        seen_rows,
        width,
        tiles.shape[2],
        pieces,
        scale,
        **sizes(q, k, k_shared, v, of_queries),
        SETS=sets,
        **_options(of_queries),
    )
    tiles, counts = tile_lists(blocks.mT, of_keys.columns, of_keys.rows)
    pieces = lines * heads * triton.cdiv(keys, of_keys.columns)
    attention_backward_keys[looping_grid(pieces)](
        q,
        k,
        k_shared,
        v,
        seen_by,
        tiles,
        counts,
        lse,
        delta,
        low,
        d_k,
        parts,
        d_v,
        queries,
        keys,
        seen_rows,
        width,
        tiles.shape[2],
        tiles.shape[1],
        pieces,
        scale,
        **sizes(q, k, k_shared, v, of_keys),
        SETS=sets,
        **_options(of_keys),
    )
    # heads in torch's fixed order, rounded once
    d_shared = parts.sum(2).to(k_shared.dtype)
    return tuple(x.unflatten(0, (groups, -1)) for x in (d_q, d_k, d_shared, d_v))


def listed(
    kind: str,
    mask: str,
    *,
    sets: bool = False,
    widths: tuple[int, int, int] = (128, 64, 128),
    dtypes: tuple[str, ...] = ("bf16",),
) -> list[Build]:
    """What is compiled for 96 heads whose own and shared keys and values have these widths."""
    found = []
    sizes = dict(zip(("N", "P", "V"), widths, strict=True))
    sizes |= {f"{n}_PADDED": max(16, triton.next_power_of_2(w)) for n, w in sizes.items()}
    for dtype in dtypes:
        tensors = (
            "q_ptr",
            "k_ptr",
            "shared_ptr",
            "v_ptr",
            "d_q_ptr",
            "d_k_ptr",
            "d_v_ptr",
            "low_ptr",
        )
        types = dict.fromkeys(tensors, f"*{dtype}")
        types |= dict.fromkeys(("out_ptr", "lse_ptr", "ct_ptr", "delta_ptr"), "*fp32")
        types |= dict.fromkeys(("seen_ptr", "tiles_ptr", "counts_ptr"), "*i32")
        integers = ("queries", "keys", "seen_rows", "width", "most", "listed_keys", "pieces")
        types |= dict.fromkeys(integers, "i32") | {"d_shared_ptr": "*fp32", "scale": "fp32"}
        kernels = (attention_forward, attention_backward_queries, attention_backward_keys)
        for kernel, tile in zip(kernels, _TILES[kind, 2 if dtype == "bf16" else 4], strict=True):
            known = types | ({"ct_ptr": f"*{dtype}"} if kernel is attention_backward_keys else {})
            constants = {"H": 96, **sizes, "ROWS": tile.rows, "COLUMNS": tile.columns}
            constants |= {"SETS": sets, "WIDE": False}
            signature = {n: known[n] for n in kernel.arg_names if n in known}
            direction = "forward" if kernel is attention_forward else "backward"
            label = f"{kernel.__name__} {mask} {dtype}"
            found.append(Build(label, kernel, signature, constants, direction, tile))
    return found


def builds(kind: str) -> list[Build]:
    """What is compiled for intervals; float32 for one of the kinds, since it takes long."""
    return listed(kind, "intervals", dtypes=("bf16",) if kind == "cuda" else ("bf16", "fp32"))
