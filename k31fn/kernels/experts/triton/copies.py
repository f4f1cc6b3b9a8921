# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""Tokens to expert rows and back in one pass each way. First order only.

Both passes go by tokens: a token is read once and written to its copies' rows, or its copies' rows
are read and added in the order of its choices, in float32. No row has two writers, so there are no
atomics, and the bits depend on the routes alone.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.launch import Build, Tile, grouped, programs, step

__all__ = [
    "accepts_dispatch",
    "accepts_permute",
    "build",
    "build_of_sum",
    "builds",
    "dispatch",
    "launch_sum",
    "permute",
    "scatter",
    "sum_copies",
    "unfit",
]


# Per kind of device: (scatter, sum).
_TILES = {
    "cuda": (
        Tile(warps=4, per_core=32, columns=2048),
        Tile(warps=4, per_core=16, columns=1024),
    ),
    "npu": (Tile(per_core=2, columns=2048), Tile(per_core=2, columns=2048)),
    "cpu": (Tile(columns=64), Tile(columns=64)),
}


@triton.jit
def expert_scatter(
    x_ptr,
    place_ptr,
    weight_ptr,
    rows_ptr,
    tokens,
    num_rows,
    width,
    cuts,
    pieces,
    x_group,
    place_group,
    weight_group,
    COPIES: tl.constexpr,
    LEAVES_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes each token to its copies' rows; with LEAVES_OUT zeros, where a copy's weight is 0."""
    for p in range(tl.program_id(0), pieces, tl.num_programs(0)):
        token = (p // cuts) % tokens
        group = (p // cuts // tokens).to(tl.int64)
        column = (p % cuts) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        first = group * x_group + token.to(tl.int64) * width
        x = tl.load(x_ptr + first + column, mask=inside, other=0.0)
        for copy in tl.static_range(COPIES):
            number = token * COPIES + copy
            row = tl.load(place_ptr + (group * place_group + number)).to(tl.int64)
            value = x
            if LEAVES_OUT:
                weight = tl.load(weight_ptr + (group * weight_group + number))
                value = tl.where(weight == 0.0, 0.0, x)
            to = rows_ptr + (group * num_rows + row) * width
            # An absent copy, at -1, has no columns.
            tl.store(to + column, value, mask=column < tl.where(row < 0, 0, width))


@triton.jit
def expert_sum(
    rows_ptr,
    more_ptr,
    place_ptr,
    weight_ptr,
    y_ptr,
    tokens,
    width,
    cuts,
    pieces,
    rows_group,
    more_group,
    place_group,
    weight_group,
    COPIES: tl.constexpr,
    TWO: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds each token's copies, with TWO those of two tensors, with WEIGHTED times their weight."""
    for p in range(tl.program_id(0), pieces, tl.num_programs(0)):
        token = (p // cuts) % tokens
        group = (p // cuts // tokens).to(tl.int64)
        column = (p % cuts) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for copy in tl.static_range(COPIES):
            number = token * COPIES + copy
            place = tl.load(place_ptr + (group * place_group + number)).to(tl.int64)
            row = place * width
            there = column < tl.where(place < 0, 0, width)  # none of an absent copy
            value = tl.load(rows_ptr + (group * rows_group + row) + column, mask=there, other=0.0)
            value = value.to(tl.float32)
            if TWO:
                more = more_ptr + (group * more_group + row)
                value += tl.load(more + column, mask=there, other=0.0).to(tl.float32)
            if WEIGHTED:
                weight = tl.load(weight_ptr + (group * weight_group + number))
                value *= weight.to(tl.float32)
            total += value
        y = y_ptr + (group * tokens + token) * width
        tl.store(y + column, total.to(y_ptr.dtype.element_ty), mask=inside)


def accepts_dispatch(x: Tensor, order: Tensor, inverse: Tensor) -> str:
    """Why :func:`dispatch` cannot run, or nothing."""
    return unfit(x, inverse.shape[0], order, inverse)


def accepts_permute(rows: Tensor, index: Tensor, inverse: Tensor) -> str:
    """Why :func:`permute` cannot run, or nothing."""
    count = inverse.numel() if index.numel() == inverse.numel() else -1  # no row may be absent
    return unfit(_flat(rows), count, index, inverse)


def unfit(x: Tensor, count: int, order: Tensor, inverse: Tensor) -> str:
    """Why so many rows have no places by ``order`` and ``inverse``, or nothing."""
    if x.ndim != 2 or x.shape[0] != count or order.numel() > inverse.numel():
        shapes = [list(a.shape) for a in (x, order, inverse)]
        return f"rows [R D] of one place each, got rows, order, inverse {shapes}"
    return ""


def dispatch(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """The op; contract in :mod:`k31fn.kernels.experts`."""
    return _dispatch(order.shape[0], x[None], inverse[None]).squeeze(0)


def permute(rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """The op: each row, as a token of one copy, goes to its place."""
    del index
    return _dispatch(len(rows), _flat(rows)[None], inverse[None, :, None]).view(rows.shape)


def _flat(rows: Tensor) -> Tensor:
    """``[R *D]`` with one dim of features."""
    return rows.unsqueeze(-1).flatten(1)


def scatter(x: Tensor, inverse: Tensor, num_rows: int, weights: Tensor | tuple[()] = ()) -> Tensor:
    """``dispatch``'s value alone; a copy whose weight is 0 is a row of zeros."""
    operands = (x[None], inverse[None], *((weights[None],) if isinstance(weights, Tensor) else ()))
    launch = functools.partial(_launch_scatter, num_rows)
    return grouped(launch, *operands)[0].squeeze(0)


def sum_copies(rows: Tensor, inverse: Tensor, more: Tensor | None = None) -> Tensor:
    """The sum of each token's copies, of ``rows`` or of ``rows + more``, in float32."""
    operands = (rows[None], inverse[None], *(() if more is None else (more[None],)))
    launch = functools.partial(launch_sum, more is not None)
    return grouped(launch, *operands)[0].squeeze(0)


def _dispatch_fwd(num_rows: int, x: Tensor, inverse: Tensor) -> tuple[Tensor, Any]:
    launch = functools.partial(_launch_scatter, num_rows)
    return grouped(launch, x, inverse)[0], (inverse,)


def _dispatch_bwd(num_rows: int, residuals: Any, ct: Tensor) -> tuple[Any, ...]:
    del num_rows
    (inverse,) = residuals
    return grouped(functools.partial(launch_sum, False), ct, inverse)[0], None


_dispatch = custom_vjp(
    _dispatch_fwd, _dispatch_bwd, nondiff_argnums=(0,), opaque=True, name="dispatch (triton)"
)


def _launch_scatter(num_rows: int, *operands: Tensor) -> tuple[Tensor, ...]:
    """Of tokens, places and, to leave out copies, weights."""
    given = [a.contiguous() for a in operands]
    x, place = given[:2]
    weights = given[2] if len(given) > 2 else x  # not read
    groups = max(a.shape[0] for a in given)
    _, tokens, copies = place.shape
    width = x.shape[2]
    rows = x.new_empty((groups, num_rows, width))
    tile = _TILES[x.device.type][0]
    cuts = triton.cdiv(width, tile.columns)
    pieces = groups * tokens * cuts
    expert_scatter[(programs(x.device, 1, pieces, tile.per_core),)](
        x,
        place,
        weights,
        rows,
        tokens,
        num_rows,
        width,
        cuts,
        pieces,
        *map(step, (x, place, weights)),
        COPIES=copies,
        LEAVES_OUT=len(given) > 2,
        BLOCK=tile.columns,
        num_warps=tile.warps,
    )
    return (rows,)


def launch_sum(two: bool, *operands: Tensor) -> tuple[Tensor, ...]:
    """Launches the sum, of rows, places and, last, a second tensor of rows (``two``) or weights."""
    given = [a.contiguous() for a in operands]
    rows, place = given[:2]
    last = given[2] if len(given) > 2 else rows  # not read
    groups = max(a.shape[0] for a in given)
    _, tokens, copies = place.shape
    width = rows.shape[2]
    y = rows.new_empty((groups, tokens, width))
    tile = _TILES[rows.device.type][1]
    cuts = triton.cdiv(width, tile.columns)
    pieces = groups * tokens * cuts
    expert_sum[(programs(rows.device, 1, pieces, tile.per_core),)](
        rows,
        last,
        place,
        last,
        y,
        tokens,
        width,
        cuts,
        pieces,
        *map(step, (rows, last, place, last)),
        COPIES=copies,
        TWO=two,
        WEIGHTED=len(given) > 2 and not two,
        BLOCK=tile.columns,
        num_warps=tile.warps,
    )
    return (y,)


def builds(kind: str) -> list[Build]:
    """What is compiled for 16 copies of a token: each kernel is the other's backward."""
    listed: list[Build] = []
    for low in ("bf16", "fp32"):
        for leaves_out in (False, True):
            flags = {"COPIES": 16, "LEAVES_OUT": leaves_out}
            listed.append(build(expert_scatter, low, flags, _TILES[kind][0], "forward"))
        for two in (False, True):
            listed.append(build_of_sum(kind, low, "backward", two=two))
    return listed


def build_of_sum(
    kind: str,
    low: str,
    direction: Literal["forward", "backward"],
    *,
    two: bool = False,
    weighted: bool = False,
) -> Build:
    """The sum of 16 copies."""
    flags = {"COPIES": 16, "TWO": two, "WEIGHTED": weighted}
    return build(expert_sum, low, flags, _TILES[kind][1], direction)


def build(
    kernel: Any,
    low: str,
    flags: dict[str, Any],
    tile: Tile,
    direction: Literal["forward", "backward"],
) -> Build:
    """A kernel of this package for rows of that dtype."""
    constants = {**flags, "BLOCK": tile.columns}
    names = [name for name in kernel.arg_names if name not in constants]
    chosen = [name.lower() for name, value in flags.items() if value is True]
    title = " ".join([kernel.__name__, low, *chosen])
    aligned = tuple(n for n in names if n == "width" or n.endswith("_group"))
    types = {name: _type(name, low) for name in names}
    return Build(title, kernel, types, constants, direction, tile, aligned)


def _type(name: str, low: str) -> str:
    """Triton's type of an argument, as the layer calls the ops."""
    if not name.endswith("_ptr"):
        return "i32"
    if name == "place_ptr":
        return "*i64"
    return "*fp32" if name in ("weight_ptr", "d_weight_ptr") else f"*{low}"
