# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Index scores and the best keys, a strip of queries at a time: never a number for each pair.

Scores take keys as rows and several queries with all their heads as columns of one product. A row
of scores is then held in registers: its threshold is found by bisection on ordered bits, and places
come from counts, so nothing is sorted and the lowest position wins among equals.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff.custom_vjp import detached
from k31fn.kernels.attention.triton.arithmetic import product, rows_of
from k31fn.kernels.indexer.limits import MOST_KEYS
from k31fn.kernels.launch import INTERPRETED, Build, Tile, grouped, looping_grid

__all__ = ["accepts", "builds", "heads_of", "index_topk"]

# Per kind of device and bytes of a number: ``rows`` columns of queries times heads, and ``columns``
# keys.
_SCORES = {
    ("cuda", 2): Tile(warps=8, rows=256, columns=128, stages=3),
    ("cuda", 4): Tile(warps=4, rows=32, columns=32, stages=1),
    ("npu", 2): Tile(rows=64, columns=64),
    ("npu", 4): Tile(rows=32, columns=32),
    ("cpu", 2): Tile(rows=32, columns=32),
    ("cpu", 4): Tile(rows=32, columns=32),
}
_CHUNK = 8  # tiles of keys to which one program's queries stay loaded
_STRIP = 2**25  # scores that are held at once, in all rows of the batch


@triton.jit
def heads_of(ptr, there, J: tl.constexpr, I: tl.constexpr, JP: tl.constexpr, IP: tl.constexpr, n):
    """Rows of ``n`` (a vector's length) queries' heads, each query padded to JP; 0 elsewhere."""
    d = tl.arange(0, IP)
    here = ((n // JP < there) & (n % JP < J))[:, None] & (d < I)[None, :]
    at = ptr + ((n // JP) * J + n % JP)[:, None] * I + d[None, :]
    return tl.load(at, mask=here, other=0.0)


@triton.jit
def index_scores_strip(
    q_ptr,
    k_ptr,
    w_ptr,
    start_ptr,
    stop_ptr,
    scores_ptr,
    first,
    strip,
    queries,
    keys,
    slots,
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
    """Scores of EACH queries and a chunk of keys, as far as one of them has to choose."""
    c = tl.arange(0, COLUMNS)
    e = tl.arange(0, EACH)
    n = tl.arange(0, EACH * JP)
    tiles = tl.cdiv(strip, EACH)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        chunk = piece % chunks
        tile = (piece // chunks) % tiles
        b = (piece // (chunks * tiles)).to(tl.int64)
        t = first + tile * EACH
        there = tl.minimum(queries - t, strip - tile * EACH)
        row = b * queries + t
        q = heads_of(q_ptr + row * J * I, there, J, I, JP, IP, n)
        mine = (n // JP < there) & (n % JP < J)
        w = tl.load(w_ptr + row * J + (n // JP) * J + n % JP, mask=mine, other=0.0).to(tl.float32)
        w = w * scale
        start = tl.load(start_ptr + row + e, mask=e < there, other=0).to(tl.int32)
        stop = tl.load(stop_ptr + row + e, mask=e < there, other=0).to(tl.int32)
        # who sees no more than it may choose needs no score
        last = tl.max(tl.where(stop - start > slots, stop, 0), 0)
        begin = chunk * (CHUNK * COLUMNS)
        for key in range(begin, tl.minimum(last, begin + CHUNK * COLUMNS), COLUMNS):
            k = rows_of(k_ptr + (b * keys + key) * I, c, keys - key, I, I, IP)
            each = tl.zeros((COLUMNS, EACH * JP), tl.float32)
            each = product(k, tl.trans(q), each, WIDE)
            opened = tl.maximum(each, 0.0) * w[None, :]
            scores = tl.sum(tl.reshape(opened, (COLUMNS, EACH, JP)), 2)
            at = scores_ptr + (b * strip + tile * EACH) * keys + key
            here = (c < keys - key)[:, None] & (e < there)[None, :]
            tl.store(at + e[None, :] * keys + c[:, None], scores, mask=here)


@triton.jit
def _places(chosen, R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr):
    """How many are chosen up to each place of [R, C], in row order."""
    i = tl.arange(0, C)
    # products of zeros and ones: counts are exact in bfloat16 too
    upto = tl.where(i[:, None] <= i[None, :], 1.0, 0.0).to(tl.bfloat16)
    ones = tl.where(chosen, 1.0, 0.0).to(tl.bfloat16)
    inside = tl.zeros((R, C), tl.float32)
    inside = product(ones, upto, inside, WIDE)
    r = tl.arange(0, R)
    rows = tl.sum(chosen.to(tl.int32), 1)
    before = tl.sum(tl.where(r[None, :] < r[:, None], rows[None, :], 0), 1)
    return inside.to(tl.int32) + before[:, None]


@triton.jit
def index_choose_strip(
    scores_ptr,
    start_ptr,
    stop_ptr,
    out_ptr,
    first,
    strip,
    queries,
    keys,
    slots,
    pieces,
    R: tl.constexpr,
    C: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The best keys of one query, by position, then -1."""
    key = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        b = (piece // strip).to(tl.int64)
        row = b * queries + first + piece % strip
        start = tl.load(start_ptr + row).to(tl.int32)
        stop = tl.load(stop_ptr + row).to(tl.int32)
        reached = tl.maximum(stop - start, 0)
        need = tl.minimum(reached, slots)
        visible = (key >= start) & (key < stop)
        at = scores_ptr + (b * strip + piece % strip) * keys + key
        scored = visible & (key < tl.where(reached > need, stop, start))
        score = tl.load(at, mask=scored, other=0.0)
        score = tl.where(score == 0, 0.0, score)  # -0.0 is no smaller
        bits = score.to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative numbers descend in their bits
        ordered = tl.where(visible, ordered, -0x80000000)
        # the largest threshold that so many reach, by halves of the range of the scores
        threshold = tl.min(tl.where(visible, ordered, 0x7FFFFFFF))
        highest = tl.max(ordered)
        for _ in range(32):
            # between the two, rounded up: their sum could overflow
            middle = (threshold | highest) - ((threshold ^ highest) >> 1)
            if (reached != need) & (threshold != highest):
                some = tl.sum((ordered >= middle).to(tl.int32))
                highest = tl.where(some >= need, highest, middle - 1)
                threshold = tl.where(some >= need, middle, threshold)
                reached = tl.where(some >= need, some, reached)
        above = ordered > threshold
        equal = (ordered == threshold) & visible
        left = need - tl.sum(above.to(tl.int32))
        chosen = above | (equal & (_places(equal, R, C, WIDE) <= left))
        slot = _places(chosen, R, C, WIDE) - 1
        tl.store(out_ptr + row * slots + slot, key, mask=chosen)
        m = tl.arange(0, SLOTS)
        nothing = tl.full((SLOTS,), -1, tl.int32)
        tl.store(out_ptr + row * slots + m, nothing, mask=(m >= need) & (m < slots))


def accepts(
    q: Tensor, k: Tensor, w: Tensor, start: Tensor, stop: Tensor, topk: int, scale: float
) -> str:
    """Why :func:`index_topk` cannot run, or nothing."""
    del w, start, stop, topk
    if k.shape[1] > MOST_KEYS:
        return f"it holds a row of scores of at most {MOST_KEYS} keys, got {k.shape[1]}"
    if q.dtype != k.dtype:
        return f"queries and keys have one dtype, got {q.dtype} and {k.dtype}"
    if q.shape[2] > 64 or q.shape[3] > 256:
        return f"at most 64 heads of 256 dims, got {q.shape[2]} of {q.shape[3]}"
    # a factor that stays outside of the ReLU
    return "" if scale > 0 else f"scale={scale} must be positive"


def index_topk(
    q: Tensor, k: Tensor, w: Tensor, start: Tensor, stop: Tensor, topk: int, scale: float
) -> Tensor:
    """The op; contract in :mod:`k31fn.kernels.indexer`."""

    def launch(*operands: Tensor) -> tuple[Tensor, ...]:
        return (_launch(topk, scale, *operands),)

    operands = detached((q, k, w, start, stop))
    return grouped(launch, *(x[None] for x in operands))[0].squeeze(0)


def _launch(topk: int, scale: float, *operands: Tensor) -> Tensor:
    groups = max(x.shape[0] for x in operands)
    whole = [x.expand(groups, *x.shape[1:]).flatten(0, 1).contiguous() for x in operands]
    q, k, w, start, stop = whole
    lines, queries, heads, dims = q.shape
    keys = k.shape[1]
    slots = min(topk, keys)
    scorer = _SCORES[q.device.type, q.itemsize]
    given = _sizes(heads, dims, scorer)
    each = given["EACH"]
    out = start.new_empty((lines, queries, slots), dtype=torch.int32)
    most = max(1, _STRIP // max(1, lines * keys) // each) * each
    strip = min(most, -(-queries // each) * each)
    scores = q.new_empty((lines, strip, keys), dtype=torch.float32)
    chunks = triton.cdiv(keys, scorer.columns * _CHUNK)
    rows = _row(keys)
    for first in range(0, queries, max(1, strip)):
        count = min(strip, queries - first)
        pieces = lines * triton.cdiv(strip, each) * chunks
        index_scores_strip[looping_grid(pieces)](
            q,
            k,
            w,
            start,
            stop,
            scores,
            first,
            strip,
            queries,
            keys,
            slots,
            chunks,
            pieces,
            scale,
            **given,
            num_warps=scorer.warps,
            num_stages=scorer.stages,
        )
        # rows of the strip behind the last query are none of the next line's
        for line in range(lines):
            index_choose_strip[looping_grid(count)](
                scores[line],
                start[line],
                stop[line],
                out[line],
                first,
                strip,
                queries,
                keys,
                slots,
                count,
                **rows,
                SLOTS=triton.next_power_of_2(slots),
                WIDE=INTERPRETED,
                num_warps=_warps(keys),
            )
    return out.unflatten(0, (groups, -1))


def _sizes(heads: int, dims: int, tile: Tile) -> dict[str, Any]:
    padded = triton.next_power_of_2(heads)
    cut = {"EACH": max(1, tile.rows // padded), "COLUMNS": tile.columns, "CHUNK": _CHUNK}
    wide = {"JP": max(16, padded) if cut["EACH"] == 1 else padded, "IP": _power(dims)}
    return {"J": heads, "I": dims, **wide, **cut, "WIDE": INTERPRETED}


def _power(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _held(keys: int) -> int:
    return max(256, triton.next_power_of_2(keys))


def _row(keys: int) -> dict[str, int]:
    """The square that a row of scores is held in, of sides that a product takes."""
    columns = 16 if _held(keys) < 2048 else 128
    return {"R": _held(keys) // columns, "C": columns}


def _warps(keys: int) -> int:
    """Warps that hold a row, at most 64 scores a thread: with more of them counts take longer."""
    return max(4, _held(keys) // 2048)


def builds(kind: str) -> list[Build]:
    """What is compiled for 32 heads of 128 dims and rows of 8192 keys on a kind of device."""
    integers = ("first", "strip", "queries", "keys", "chunks", "slots", "pieces")
    types = dict.fromkeys(integers, "i32") | {"scale": "fp32", "w_ptr": "*fp32"}
    types |= {"scores_ptr": "*fp32", "start_ptr": "*i64", "stop_ptr": "*i64", "out_ptr": "*i32"}
    # on Ascend a row of 4096 is what its memory holds
    choice = {**_row(4096 if kind == "npu" else 8192), "SLOTS": 2048, "WIDE": False}
    found = []
    for dtype, itemsize in (("bf16", 2), ("fp32", 4)):
        scorer = _SCORES[kind, itemsize]
        known = types | {"q_ptr": f"*{dtype}", "k_ptr": f"*{dtype}"}
        signature = {n: known[n] for n in index_scores_strip.arg_names if n in known}
        label = f"index_scores_strip {dtype}"
        constants = {**_sizes(32, 128, scorer), "WIDE": False}
        found.append(Build(label, index_scores_strip, signature, constants, "forward", scorer))
    signature = {n: types[n] for n in index_choose_strip.arg_names if n in types}
    tile = Tile(warps=_warps(8192))
    found.append(
        Build("index_choose_strip", index_choose_strip, signature, choice, "forward", tile)
    )
    return found
