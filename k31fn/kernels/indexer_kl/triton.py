# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The indexer's loss with its gradients in one go: the backward only scales them.

In dense tiles, a strip of queries at a time, and the index scores are multiplied once: of each
query and key the score is kept, and a word that says of which heads the product is above 0. From
the scores of a set come loss and gradients of its scores; from those and the words the gradients of
queries, weights and keys, ``g[t, j] = sum_s open[t, j, s] dI[t, s] k[s]``::

    dq[t, j] = scale w[t, j] g[t, j]                    dw[t, j] = scale <q[t, j], g[t, j]>

Each tile of keys adds up its own gradient, from parts of the queries in order. First order only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.attention.triton.arithmetic import product, rows_of
from k31fn.kernels.indexer.triton import heads_of
from k31fn.kernels.launch import INTERPRETED, Build, Tile, grouped, looping_grid

__all__ = ["accepts", "builds", "indexer_kl"]

# Per kind of device and bytes of a number, of the scores, the gradients of queries and those of
# keys: ``rows`` pairs of a query and a head, and ``columns`` keys.
_TILES = {
    ("cuda", 2): (
        Tile(warps=8, rows=256, columns=128, stages=3),
        Tile(warps=4, rows=128, columns=64, stages=3),
        Tile(warps=4, rows=128, columns=64, stages=2),
    ),
    ("cuda", 4): (Tile(rows=32, columns=32, stages=1),) * 3,
    ("npu", 2): (Tile(rows=32, columns=32),) * 3,
    ("npu", 4): (Tile(rows=32, columns=32),) * 3,
    ("cpu", 2): (Tile(rows=32, columns=32),) * 3,
    ("cpu", 4): (Tile(rows=32, columns=32),) * 3,
}
_STRIP = 2**25  # scores that are held at once, of a row of the batch
_CHUNK = 8  # tiles of keys to which one program's queries stay loaded
_PART = 512  # queries whose gradients of keys one program adds up
_SLOTS = 2048  # of a set, read in one step


@triton.jit
def indexer_kl_spans(topk_ptr, spans_ptr, rows, slots, keys, SLOTS: tl.constexpr):
    """The first key of each set and one past the last; of an empty set ``keys`` and 0."""
    m = tl.arange(0, SLOTS)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        wide = (rows * 0 + row).to(tl.int64)
        first = keys
        last = 0
        for s in range(0, slots, SLOTS):
            at = topk_ptr + wide * slots + s + m
            key = tl.load(at, mask=m < slots - s, other=-1).to(tl.int32)
            first = tl.minimum(first, tl.min(tl.where(key < 0, keys, key), 0))
            last = tl.maximum(last, tl.max(key, 0) + 1)
        tl.store(spans_ptr + wide * 2, first)
        tl.store(spans_ptr + wide * 2 + 1, last)


@triton.jit
def indexer_kl_scores(
    q_ptr,
    k_ptr,
    w_ptr,
    spans_ptr,
    scores_ptr,
    open_ptr,
    first,
    rows,
    keys,
    chunks,
    pieces,
    scale,
    J: tl.constexpr,
    I: tl.constexpr,
    JP: tl.constexpr,
    IP: tl.constexpr,
    EACH: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Scores of EACH queries of the strip and a chunk of keys, as far as their sets reach, and the
    heads that are open.
    """
    c = tl.arange(0, COLUMNS)
    e = tl.arange(0, EACH)
    n = tl.arange(0, EACH * JP)
    bit = tl.full((EACH * JP,), 1, open_ptr.dtype.element_ty) << (n % JP)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        t = (piece // chunks) * EACH
        there = rows - t
        strip = (rows * 0 + t).to(tl.int64)
        row = strip + first
        begin = piece % chunks * (CHUNK * COLUMNS)
        of_span = spans_ptr + (row + e) * 2
        low = tl.min(tl.load(of_span, mask=e < there, other=2147483647), 0)
        high = tl.max(tl.load(of_span + 1, mask=e < there, other=0), 0)
        low = tl.maximum(begin, low // COLUMNS * COLUMNS)
        high = tl.minimum(high, begin + CHUNK * COLUMNS)
        q = heads_of(q_ptr + row * J * I, there, J, I, JP, IP, n)
        mine = (n // JP < there) & (n % JP < J)
        w = tl.load(w_ptr + row * J + (n // JP) * J + n % JP, mask=mine, other=0.0).to(tl.float32)
        w = w * scale
        for key in range(low, high, COLUMNS):
            k = rows_of(k_ptr + (keys * 0 + key).to(tl.int64) * I, c, keys - key, I, I, IP)
            each = tl.zeros((COLUMNS, EACH * JP), tl.float32)
            each = product(k, tl.trans(q), each, WIDE)
            weighted = tl.maximum(each, 0.0) * w[None, :]
            scores = tl.sum(tl.reshape(weighted, (COLUMNS, EACH, JP)), 2)
            heads = tl.where(each > 0, bit[None, :], 0)
            heads = tl.sum(tl.reshape(heads, (COLUMNS, EACH, JP)), 2)
            at = strip * keys + key + e[None, :] * keys + c[:, None]
            here = (c < keys - key)[:, None] & (e < there)[None, :]
            tl.store(scores_ptr + at, scores, mask=here)
            tl.store(open_ptr + at, heads, mask=here)


@triton.jit
def indexer_kl_sets(
    scores_ptr,
    teacher_ptr,
    topk_ptr,
    loss_ptr,
    d_scores_ptr,
    first,
    rows,
    keys,
    slots,
    SLOTS: tl.constexpr,
):
    """Loss of each query of the strip, and gradients of its scores at its keys."""
    m = tl.arange(0, SLOTS)
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        strip = (rows * 0 + i).to(tl.int64)
        row = strip + first
        largest = tl.sum(m * 0.0, 0) - 1e20
        total = largest * 0.0
        mass = largest * 0.0
        against = largest * 0.0  # sum of p (log p - score)
        for s in range(0, slots, SLOTS):
            key = tl.load(topk_ptr + row * slots + s + m, mask=m < slots - s, other=-1)
            there = key >= 0
            score = tl.load(scores_ptr + strip * keys + key, mask=there, other=0.0)
            p = tl.load(teacher_ptr + row * slots + s + m, mask=there, other=0.0).to(tl.float32)
            # 0 log 0 = 0
            entropy = tl.where(p > 0, p * tl.log(tl.where(p > 0, p, 1.0)), 0.0)
            # NaN of a refused set stays NaN, which no comparison passes on
            entropy = tl.where(p == p, entropy, p)
            against += tl.sum(entropy - p * score, 0)
            mass += tl.sum(p, 0)
            score = tl.where(there, score, -1e30)
            new = tl.maximum(largest, tl.max(score, 0))
            total = total * tl.exp(largest - new) + tl.sum(tl.exp(score - new), 0)
            largest = new
        some = total > 0
        lse = tl.where(some, largest + tl.log(tl.where(some, total, 1.0)), 0.0)
        tl.store(loss_ptr + row, against + lse * mass)
        for s in range(0, slots, SLOTS):
            key = tl.load(topk_ptr + row * slots + s + m, mask=m < slots - s, other=-1)
            there = key >= 0
            score = tl.load(scores_ptr + strip * keys + key, mask=there, other=-1e30)
            p = tl.load(teacher_ptr + row * slots + s + m, mask=there, other=0.0).to(tl.float32)
            d_score = tl.exp(score - lse) * mass - p
            low = d_scores_ptr.dtype.element_ty
            tl.store(d_scores_ptr + strip * keys + key, d_score.to(low), mask=there)


@triton.jit
def indexer_kl_queries(
    q_ptr,
    k_ptr,
    w_ptr,
    spans_ptr,
    open_ptr,
    d_scores_ptr,
    d_q_ptr,
    d_w_ptr,
    first,
    rows,
    keys,
    scale,
    J: tl.constexpr,
    I: tl.constexpr,
    JP: tl.constexpr,
    IP: tl.constexpr,
    EACH: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Gradients of EACH queries of the strip and of their weights."""
    c = tl.arange(0, COLUMNS)
    e = tl.arange(0, EACH)
    j = tl.arange(0, JP)
    n = tl.arange(0, EACH * JP)
    d = tl.arange(0, IP)
    tiles = tl.cdiv(rows, EACH)
    for piece in range(tl.program_id(0), tiles, tl.num_programs(0)):
        t = (tiles - 1 - piece) * EACH  # the longest rows are begun first
        there = rows - t
        strip = (rows * 0 + t).to(tl.int64)
        row = strip + first
        of_span = spans_ptr + (row + e) * 2
        low = tl.min(tl.load(of_span, mask=e < there, other=2147483647), 0)
        high = tl.max(tl.load(of_span + 1, mask=e < there, other=0), 0)
        g = tl.zeros((EACH * JP, IP), tl.float32)
        for key in range(low // COLUMNS * COLUMNS, high, COLUMNS):
            at = strip * keys + key + e[:, None] * keys + c[None, :]
            here = (e < there)[:, None] & (c < keys - key)[None, :]
            d_score = tl.load(d_scores_ptr + at, mask=here, other=0.0)
            heads = tl.load(open_ptr + at, mask=here, other=0)
            k = rows_of(k_ptr + (keys * 0 + key).to(tl.int64) * I, c, keys - key, I, I, IP)
            opened = (heads[:, None, :] >> j[None, :, None]) & 1
            spread = tl.where(opened != 0, d_score[:, None, :], 0.0)
            g = product(tl.reshape(spread, (EACH * JP, COLUMNS)), k, g, WIDE)
        q = heads_of(q_ptr + row * J * I, there, J, I, JP, IP, n)
        mine = (n // JP < there) & (n % JP < J)
        of_head = row * J + (n // JP) * J + n % JP
        w = tl.load(w_ptr + of_head, mask=mine, other=0.0).to(tl.float32)
        d_w = tl.sum(q.to(tl.float32) * g, 1) * scale
        tl.store(d_w_ptr + of_head, d_w, mask=mine)
        at = d_q_ptr + row * J * I + ((n // JP) * J + n % JP)[:, None] * I + d[None, :]
        d_q = g * (w * scale)[:, None]
        tl.store(at, d_q.to(d_q_ptr.dtype.element_ty), mask=mine[:, None] & (d < I)[None, :])


@triton.jit
def indexer_kl_keys(
    q_ptr,
    w_ptr,
    spans_ptr,
    open_ptr,
    d_scores_ptr,
    d_k_ptr,
    first,
    rows,
    keys,
    parts,
    pieces,
    scale,
    J: tl.constexpr,
    I: tl.constexpr,
    JP: tl.constexpr,
    IP: tl.constexpr,
    EACH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Adds what PART of the strip's queries give a tile of keys to that part of ``d_k``."""
    c = tl.arange(0, COLUMNS)
    e = tl.arange(0, EACH)
    j = tl.arange(0, JP)
    n = tl.arange(0, EACH * JP)
    d = tl.arange(0, IP)
    r = tl.arange(0, PART)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        part = piece % parts
        key = piece // parts * COLUMNS
        begin = part * PART
        of_span = spans_ptr + (first + begin + r) * 2
        low = tl.load(of_span, mask=r < rows - begin, other=2147483647)
        high = tl.load(of_span + 1, mask=r < rows - begin, other=0)
        reach = (low < key + COLUMNS) & (high > key)
        some = tl.min(tl.where(reach, r, PART), 0) // EACH * EACH
        most = tl.max(tl.where(reach, r + 1, 0), 0)
        wide = (rows * 0 + part).to(tl.int64) * keys + key
        here = (c < keys - key)[:, None] & (d < I)[None, :]
        of_keys = d_k_ptr + wide * I + c[:, None] * I + d[None, :]
        d_k = tl.zeros((COLUMNS, IP), tl.float32)
        for t in range(begin + some, begin + most, EACH):
            there = rows - t
            strip = (rows * 0 + t).to(tl.int64)
            row = strip + first
            at = strip * keys + key + e[None, :] * keys + c[:, None]
            both = (c < keys - key)[:, None] & (e < there)[None, :]
            d_score = tl.load(d_scores_ptr + at, mask=both, other=0.0)
            heads = tl.load(open_ptr + at, mask=both, other=0)
            q = heads_of(q_ptr + row * J * I, there, J, I, JP, IP, n)
            mine = (e < there)[:, None] & (j < J)[None, :]
            w = tl.load(w_ptr + row * J + e[:, None] * J + j[None, :], mask=mine, other=0.0)
            opened = (heads[:, :, None] >> j[None, None, :]) & 1
            spread = d_score.to(tl.float32)[:, :, None] * w.to(tl.float32)[None, :, :]
            spread = tl.where(opened != 0, spread, 0.0).to(q_ptr.dtype.element_ty)
            d_k = product(tl.reshape(spread, (COLUMNS, EACH * JP)), q, d_k, WIDE)
        tl.store(of_keys, tl.load(of_keys, mask=here, other=0.0) + d_k * scale, mask=here)


def accepts(
    q: Tensor, k: Tensor, w: Tensor, teacher: Tensor, topk_idx: Tensor, scale: float
) -> str:
    """Why :func:`indexer_kl` cannot run, or nothing."""
    del w, teacher, topk_idx
    if q.dtype != k.dtype:
        return f"queries and keys have one dtype, got {q.dtype} and {k.dtype}"
    if q.shape[2] > 64 or q.shape[3] > 256:
        return f"at most 64 heads of 256 dims, got {q.shape[2]} of {q.shape[3]}"
    # a factor that stays outside of the ReLU
    return "" if scale > 0 else f"scale={scale} must be positive"


def indexer_kl(
    q: Tensor, k: Tensor, w: Tensor, teacher: Tensor, topk_idx: Tensor, scale: float
) -> Tensor:
    """The op; contract in :mod:`k31fn.kernels.indexer_kl`, with each position once."""
    return _kl(*(x[None] for x in (q, k, w, teacher, topk_idx)), scale).squeeze(0)


def _fwd(*args: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    *operands, scale = args

    def launch(*operands: Tensor) -> tuple[Tensor, ...]:
        return _launch(scale, *operands)

    loss, *grads = grouped(launch, *operands)
    return loss, tuple(grads)


def _bwd(scale: float, grads: tuple[Tensor, ...], ct: Tensor) -> tuple[Tensor | None, ...]:
    del scale
    scaled = [g * ct.to(g.dtype).view(-1, *[1] * (g.ndim - 1)) for g in grads]
    return *scaled, None, None


_kl = custom_vjp(_fwd, _bwd, nondiff_argnums=(5,), opaque=True, name="indexer_kl (triton)")


def _launch(scale: float, *operands: Tensor) -> tuple[Tensor, ...]:
    """The loss of each group, and its gradients to ``q, k, w``."""
    groups = max(x.shape[0] for x in operands)
    whole = [x.expand(groups, *x.shape[1:]).flatten(0, 1).contiguous() for x in operands]
    q, k, w, _, _ = whole
    lines, queries, heads, dims = q.shape
    keys = k.shape[1]
    # whole parts, so that each adds up to the same queries in every strip
    strip = max(1, _STRIP // max(1, keys) // _PART) * _PART
    parts = triton.cdiv(min(strip, queries), _PART)
    pairs = min(strip, queries), keys
    scratch = (
        q.new_empty(pairs, dtype=torch.float32),
        q.new_empty(pairs, dtype=torch.int64 if heads > 32 else torch.int32),
        torch.empty(pairs, dtype=q.dtype, device=q.device),
    )
    loss = q.new_empty((lines, queries), dtype=torch.float32)
    d_q = torch.empty_like(q)
    d_w = torch.empty_like(w)
    d_k = k.new_zeros((lines, parts, keys, dims), dtype=torch.float32)
    for line in zip(*whole, loss, d_q, d_w, d_k, strict=True):
        _one_row(scale, strip, scratch, *line)
    total = loss.unflatten(0, (groups, -1)).sum((1, 2))
    # parts in torch's fixed order, rounded once
    grads = (x.unflatten(0, (groups, -1)) for x in (d_q, d_k.sum(1).to(k.dtype), d_w))
    return total, *grads


def _one_row(
    scale: float,
    strip: int,
    scratch: tuple[Tensor, Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    w: Tensor,
    teacher: Tensor,
    topk_idx: Tensor,
    loss: Tensor,
    d_q: Tensor,
    d_w: Tensor,
    d_k: Tensor,
) -> None:
    of_scores, of_queries, of_keys = _TILES[q.device.type, q.itemsize]
    scores, opened, d_scores = scratch
    queries, slots = topk_idx.shape
    keys = len(k)
    spans = topk_idx.new_empty((queries, 2), dtype=torch.int32)
    grid = looping_grid(queries)
    indexer_kl_spans[grid](topk_idx, spans, queries, slots, keys, SLOTS=_SLOTS, num_warps=4)
    for first in range(0, queries, strip):
        rows = min(strip, queries - first)
        given = _sizes(*q.shape[1:], of_scores)
        chunks = triton.cdiv(keys, of_scores.columns * _CHUNK)
        pieces = triton.cdiv(rows, given["EACH"]) * chunks
        indexer_kl_scores[looping_grid(pieces)](
            q,
            k,
            w,
            spans,
            scores,
            opened,
            first,
            rows,
            keys,
            chunks,
            pieces,
            scale,
            **given,
            CHUNK=_CHUNK,
            num_warps=of_scores.warps,
            num_stages=of_scores.stages,
        )
        d_scores.zero_()
        indexer_kl_sets[looping_grid(rows)](
            scores,
            teacher,
            topk_idx,
            loss,
            d_scores,
            first,
            rows,
            keys,
            slots,
            SLOTS=_SLOTS,
            num_warps=4,
        )
        given = _sizes(*q.shape[1:], of_queries)
        indexer_kl_queries[looping_grid(triton.cdiv(rows, given["EACH"]))](
            q,
            k,
            w,
            spans,
            opened,
            d_scores,
            d_q,
            d_w,
            first,
            rows,
            keys,
            scale,
            **given,
            num_warps=of_queries.warps,
            num_stages=of_queries.stages,
        )
        parts = triton.cdiv(rows, _PART)
        pieces = triton.cdiv(keys, of_keys.columns) * parts
        indexer_kl_keys[looping_grid(pieces)](
            q,
            w,
            spans,
            opened,
            d_scores,
            d_k,
            first,
            rows,
            keys,
            parts,
            pieces,
            scale,
            **_sizes(*q.shape[1:], of_keys),
            PART=_PART,
            num_warps=of_keys.warps,
            num_stages=of_keys.stages,
        )


def _sizes(heads: int, dims: int, tile: Tile) -> dict[str, Any]:
    padded = triton.next_power_of_2(heads)
    each = max(1, tile.rows // padded)
    wide = {"JP": max(16, padded) if each == 1 else padded}
    wide |= {"IP": max(16, triton.next_power_of_2(dims)), "EACH": each}
    return {"J": heads, "I": dims, **wide, "COLUMNS": tile.columns, "WIDE": INTERPRETED}


def builds(kind: str) -> list[Build]:
    """What is compiled for 32 heads of 128 dims on a kind of device."""
    names = ("first", "rows", "keys", "slots", "chunks", "parts", "pieces")
    types = dict.fromkeys(names, "i32") | {"scale": "fp32"}
    wide = ("w_ptr", "teacher_ptr", "loss_ptr", "d_w_ptr", "scores_ptr", "d_k_ptr")
    types |= dict.fromkeys(wide, "*fp32")
    types |= dict.fromkeys(("topk_ptr", "spans_ptr", "open_ptr"), "*i32")
    found = []
    # float32 for one of the kinds: each takes CUDA's compiler half a minute
    for dtype, itemsize in (("bf16", 2),) if kind == "cuda" else (("bf16", 2), ("fp32", 4)):
        known = types | dict.fromkeys(("q_ptr", "k_ptr", "d_q_ptr", "d_scores_ptr"), f"*{dtype}")
        of_scores, of_queries, of_keys = _TILES[kind, itemsize]
        by_slots = {"SLOTS": _SLOTS}
        for kernel, tile, more, direction in (
            (indexer_kl_spans, Tile(), by_slots, "forward"),
            (indexer_kl_scores, of_scores, {"CHUNK": _CHUNK}, "forward"),
            (indexer_kl_sets, Tile(), by_slots, "forward"),
            (indexer_kl_queries, of_queries, {}, "backward"),
            (indexer_kl_keys, of_keys, {"PART": _PART}, "backward"),
        ):
            signature = {n: known[n] for n in kernel.arg_names if n in known}
            every = {**_sizes(32, 128, tile), "WIDE": False, **more}
            constants = {n: every[n] for n in kernel.arg_names if n in every}
            label = f"{kernel.__name__} {dtype}"
            found.append(Build(label, kernel, signature, constants, direction, tile))
    return found
