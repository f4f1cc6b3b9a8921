# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The indexer's loss with its gradients in one go: the backward only scales them.

Each query gathers its chosen index keys, twice: for the softmax's sum, then for loss, gradients of
its queries and weights, and of its scores. Those are kept for a strip of queries at a time, where
each tile of keys adds up its own gradient in order. First order only.
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

# Per kind of device and bytes of a number: of a query, ``columns`` slots; of keys, ``rows`` columns
# of queries times heads and ``columns`` keys.
_TILES = {
    ("cuda", 2): (
        Tile(warps=4, columns=64, stages=2),
        Tile(warps=8, rows=128, columns=64, stages=2),
    ),
    ("cuda", 4): (Tile(columns=16, stages=1), Tile(rows=32, columns=32, stages=1)),
    ("npu", 2): (Tile(columns=32), Tile(rows=32, columns=32)),
    ("npu", 4): (Tile(columns=32), Tile(rows=32, columns=32)),
    ("cpu", 2): (Tile(columns=16), Tile(rows=32, columns=32)),
    ("cpu", 4): (Tile(columns=16), Tile(rows=32, columns=32)),
}
_STRIP = 2**25  # gradients of scores that are held at once, of a row of the batch


@triton.jit
def _scores(q, w, k, scale, WIDE: tl.constexpr):
    """Products of each head before and after the ReLU, and their weighted sums."""
    each = tl.zeros((q.shape[0], k.shape[0]), tl.float32)
    each = product(q, tl.trans(k), each, WIDE) * scale
    opened = tl.maximum(each, 0.0)
    return each, opened, tl.sum(w[:, None] * opened, 0)


@triton.jit
def indexer_kl_queries(
    q_ptr,
    k_ptr,
    w_ptr,
    teacher_ptr,
    topk_ptr,
    loss_ptr,
    d_q_ptr,
    d_w_ptr,
    d_scores_ptr,
    first,
    rows,
    keys,
    slots,
    scale,
    J: tl.constexpr,
    I: tl.constexpr,
    JP: tl.constexpr,
    IP: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Loss and gradients of one query; ``d_scores`` are those of the strip's rows, at its keys."""
    j = tl.arange(0, JP)
    m = tl.arange(0, COLUMNS)
    d = tl.arange(0, IP)
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        strip = (rows * 0 + i).to(tl.int64)
        row = strip + first
        q = rows_of(q_ptr + row * J * I, j, J, I, I, IP)
        w = tl.load(w_ptr + row * J + j, mask=j < J, other=0.0).to(tl.float32)
        largest = tl.max(w) * 0.0 - 1e20
        total = largest * 0.0
        mass = largest * 0.0
        against = largest * 0.0  # sum of p (log p - score)
        for s in range(0, slots, COLUMNS):
            key = tl.load(topk_ptr + row * slots + s + m, mask=m < slots - s, other=-1)
            there = key >= 0
            k = tl.load(
                k_ptr + tl.where(there, key, 0)[:, None] * I + d[None, :],
                mask=there[:, None] & (d < I)[None, :],
                other=0.0,
            )
            _, _, score = _scores(q, w, k, scale, WIDE)
            p = tl.load(teacher_ptr + row * slots + s + m, mask=there, other=0.0).to(tl.float32)
            # 0 log 0 = 0
            entropy = tl.where(p > 0, p * tl.log(tl.where(p > 0, p, 1.0)), 0.0)
            # NaN of a refused set stays NaN, which no comparison passes on
            entropy = tl.where(p == p, entropy, p)
            against += tl.sum(entropy - tl.where(there, p * score, 0.0), 0)
            mass += tl.sum(p, 0)
            score = tl.where(there, score, -1e30)
            new = tl.maximum(largest, tl.max(score, 0))
            total = total * tl.exp(largest - new) + tl.sum(tl.exp(score - new), 0)
            largest = new
        some = total > 0
        lse = tl.where(some, largest + tl.log(tl.where(some, total, 1.0)), 0.0)
        tl.store(loss_ptr + row, against + lse * mass)
        d_w = tl.zeros((JP,), tl.float32)
        d_q = tl.zeros((JP, IP), tl.float32)
        for s in range(0, slots, COLUMNS):
            key = tl.load(topk_ptr + row * slots + s + m, mask=m < slots - s, other=-1)
            there = key >= 0
            k = tl.load(
                k_ptr + tl.where(there, key, 0)[:, None] * I + d[None, :],
                mask=there[:, None] & (d < I)[None, :],
                other=0.0,
            )
            each, opened, score = _scores(q, w, k, scale, WIDE)
            p = tl.load(teacher_ptr + row * slots + s + m, mask=there, other=0.0).to(tl.float32)
            # at most 1: where there is no key the score is none of the set's
            chance = tl.exp(tl.minimum(score - lse, 0.0))
            d_score = tl.where(there, chance * mass - p, 0.0)
            tl.store(d_scores_ptr + strip * keys + key, d_score, mask=there)
            d_w += tl.sum(opened * d_score[None, :], 1)
            open_only = tl.where(each > 0, w[:, None] * d_score[None, :], 0.0) * scale
            d_q = product(open_only.to(k_ptr.dtype.element_ty), k, d_q, WIDE)
        tl.store(d_w_ptr + row * J + j, d_w, mask=j < J)
        at = d_q_ptr + row * J * I + j[:, None] * I + d[None, :]
        tl.store(at, d_q, mask=(j < J)[:, None] & (d < I)[None, :])


@triton.jit
def indexer_kl_keys(
    q_ptr,
    k_ptr,
    w_ptr,
    d_scores_ptr,
    d_k_ptr,
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
    """Adds what the strip's queries give a tile of keys to ``d_k``."""
    c = tl.arange(0, COLUMNS)
    e = tl.arange(0, EACH)
    n = tl.arange(0, EACH * JP)
    d = tl.arange(0, IP)
    for tile in range(tl.program_id(0), tl.cdiv(keys, COLUMNS), tl.num_programs(0)):
        key = tile * COLUMNS
        k = rows_of(k_ptr + key * I, c, keys - key, I, I, IP)
        here = (c < keys - key)[:, None] & (d < I)[None, :]
        at = d_k_ptr + key * I + c[:, None] * I + d[None, :]
        d_k = tl.load(at, mask=here, other=0.0)
        for t in range(0, rows, EACH):
            there = rows - t
            strip = (rows * 0 + t).to(tl.int64)
            of_scores = d_scores_ptr + strip * keys + key + e[None, :] * keys + c[:, None]
            some = (c < keys - key)[:, None] & (e < there)[None, :]
            d_score = tl.load(of_scores, mask=some, other=0.0)
            # most tiles of a strip hold no chosen key: later ones, and those of other documents
            if tl.max(tl.max(tl.abs(d_score), 1), 0) > 0:
                row = strip + first
                q = heads_of(q_ptr + row * J * I, there, J, I, JP, IP, n)
                mine = (n // JP < there) & (n % JP < J)
                at_w = w_ptr + row * J + (n // JP) * J + n % JP
                w = tl.load(at_w, mask=mine, other=0.0).to(tl.float32)
                each = tl.zeros((COLUMNS, EACH * JP), tl.float32)
                each = product(k, tl.trans(q), each, WIDE) * scale
                spread = tl.broadcast_to(d_score[:, :, None], (COLUMNS, EACH, JP))
                spread = tl.reshape(spread, (COLUMNS, EACH * JP))
                open_only = tl.where(each > 0, w[None, :] * spread, 0.0) * scale
                d_k = product(open_only.to(k_ptr.dtype.element_ty), q, d_k, WIDE)
        tl.store(at, d_k, mask=here)


def accepts(
    q: Tensor, k: Tensor, w: Tensor, teacher: Tensor, topk_idx: Tensor, scale: float
) -> str:
    """Why :func:`indexer_kl` cannot run, or nothing."""
    del w, teacher, topk_idx, scale
    if q.dtype != k.dtype:
        return f"queries and keys have one dtype, got {q.dtype} and {k.dtype}"
    if q.shape[2] > 64 or q.shape[3] > 256:
        return f"at most 64 heads of 256 dims, got {q.shape[2]} of {q.shape[3]}"
    return ""


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
    q, k, w, teacher, topk_idx = whole
    keys = k.shape[1]
    each = _sizes(*q.shape[2:], _TILES[q.device.type, q.itemsize][1])["EACH"]
    strip = max(1, _STRIP // max(1, keys) // each) * each
    strip = min(strip, -(-q.shape[1] // each) * each)
    d_scores = q.new_empty((strip, keys), dtype=torch.float32)
    loss = q.new_empty(q.shape[:2], dtype=torch.float32)
    d_q = torch.empty_like(q)
    d_w = torch.empty_like(w)
    d_k = torch.zeros_like(k, dtype=torch.float32)
    for line in zip(q, k, w, teacher, topk_idx, loss, d_q, d_w, d_k, strict=True):
        _one_row(scale, strip, d_scores, *line)
    total = loss.unflatten(0, (groups, -1)).sum((1, 2))
    grads = (x.unflatten(0, (groups, -1)) for x in (d_q, d_k.to(k.dtype), d_w))
    return total, *grads


def _one_row(
    scale: float,
    strip: int,
    d_scores: Tensor,
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
    of_queries, of_keys = _TILES[q.device.type, q.itemsize]
    keys = len(k)
    sizes = _sizes(*q.shape[1:], of_keys)
    padded = {"JP": max(16, sizes["JP"]), "COLUMNS": of_queries.columns}
    for first in range(0, len(q), max(1, strip)):
        rows = min(strip, len(q) - first)
        d_scores.zero_()
        indexer_kl_queries[looping_grid(rows)](
            q,
            k,
            w,
            teacher,
            topk_idx,
            loss,
            d_q,
            d_w,
            d_scores,
            first,
            rows,
            keys,
            topk_idx.shape[1],
            scale,
            **{n: v for n, v in (sizes | padded).items() if n != "EACH"},
            num_warps=of_queries.warps,
            num_stages=of_queries.stages,
        )
        indexer_kl_keys[looping_grid(triton.cdiv(keys, of_keys.columns))](
            q,
            k,
            w,
            d_scores,
            d_k,
            first,
            rows,
            keys,
            scale,
            **sizes,
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
    types = dict.fromkeys(("first", "rows", "keys", "slots"), "i32") | {"scale": "fp32"}
    wide = ("w_ptr", "teacher_ptr", "loss_ptr", "d_w_ptr", "d_scores_ptr", "d_k_ptr")
    types |= dict.fromkeys(wide, "*fp32") | {"topk_ptr": "*i32"}
    found = []
    # float32 for one of the kinds: each takes CUDA's compiler half a minute
    for dtype, itemsize in (("bf16", 2),) if kind == "cuda" else (("bf16", 2), ("fp32", 4)):
        of_queries, of_keys = _TILES[kind, itemsize]
        known = types | dict.fromkeys(("q_ptr", "k_ptr", "d_q_ptr"), f"*{dtype}")
        sizes = {**_sizes(32, 128, of_keys), "WIDE": False}
        constants = {**sizes, "COLUMNS": of_queries.columns}
        del constants["EACH"]
        for kernel, tile, given, direction in (
            (indexer_kl_queries, of_queries, constants, "forward"),
            (indexer_kl_keys, of_keys, sizes, "backward"),
        ):
            signature = {n: known[n] for n in kernel.arg_names if n in known}
            label = f"{kernel.__name__} {dtype}"
            found.append(Build(label, kernel, signature, given, direction, tile))
    return found
