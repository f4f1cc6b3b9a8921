# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""KDA by Triton kernels: segments of tiles, each prepared, scanned, and in the backward
differentiated.

Forward, a segment: :mod:`~.prepare`, then :func:`~.scans.kda_scan`. Between forward and backward
live the inputs and one state per segment and head. Backward, last segment first: the factors again,
the states that come into the tiles, the gradients of those that leave, and from both the gradients
of the inputs (:mod:`~.gradients`). So the states of one segment are there at a time, and memory
over inputs and gradients does not grow with the length. No atomics: every number is a sum in one
order, whatever the run. First order only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.kda.recurrence import MIN_LOG_DECAY, TILE, KdaOut
from k31fn.kernels.kda.triton.gradients import kda_gradients
from k31fn.kernels.kda.triton.prepare import kda_prepare
from k31fn.kernels.kda.triton.scans import kda_adjoint, kda_scan, kda_states
from k31fn.kernels.launch import INTERPRETED, Build, Tile, grouped

__all__ = ["builds", "kda", "kda_accepts"]

_WIDTHS = (16, 32, 64, 128)


class _Tiles(NamedTuple):
    """One per kernel, called after it. ``columns``: of V (of K in ``gradients``, of both in
    ``prepare``) that a program or a step has; ``rows``: tiles of tokens that a program has, in
    ``scan`` segments of the backward, whose states the forward does not hold.
    """

    prepare: Tile
    scan: Tile
    states: Tile
    adjoint: Tile
    gradients: Tile


# per kind of device; "cuda32": float32 operands there, whose products run without matrix units.
# H200: a pipelined loop of few warps beats one tile a program (0.56 against 0.97 ms for prepare at
# 8192 tokens of 96 heads, 1.9 against 2.3 for the gradients), since it waits less for loads
_TILES = {
    "cuda": _Tiles(
        prepare=Tile(warps=2, rows=16, columns=64, stages=3),
        scan=Tile(warps=4, rows=2, columns=64, stages=5),
        states=Tile(warps=4, columns=64, stages=4),
        adjoint=Tile(warps=4, columns=64, stages=4),
        gradients=Tile(warps=1, rows=8, columns=32, stages=2),
    ),
    "cuda32": _Tiles(
        prepare=Tile(warps=4, columns=64, stages=1),
        scan=Tile(warps=4, columns=32, stages=1),
        states=Tile(warps=4, columns=32, stages=1),
        adjoint=Tile(warps=4, columns=32, stages=1),
        gradients=Tile(warps=4, columns=32, stages=1),
    ),
    "npu": _Tiles(
        prepare=Tile(rows=4, columns=64, stages=1),
        scan=Tile(columns=8, stages=1),
        states=Tile(columns=32, stages=1),
        adjoint=Tile(columns=16, stages=1),
        gradients=Tile(rows=4, columns=32, stages=1),
    ),
    "cpu": _Tiles(*(Tile(rows=2, columns=16, stages=1),) * 5),
}
# tiles times heads of a segment: at widths of 128 in bfloat16 each takes 84 KB in the backward, so
# 2 GB; half as many would be 0.9 GB less and as many launches more
_SEGMENT = 24576
_SHORTEST = 16  # tiles of a segment: each costs a state, and the scans some time to begin


def kda_accepts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ids: Tensor,
    initial_state: Tensor | tuple[()] = (),
) -> str:
    """Why the kernels cannot run, or nothing."""
    if q.ndim != 4 or not q.numel():
        return f"q is [B T H K] with at least one token, got {list(q.shape)}"
    width, columns = q.shape[-1], v.shape[-1]
    if width not in _WIDTHS or columns not in _WIDTHS:
        return f"K and V are one of 16, 32, 64, 128, got K = {width}, V = {columns}"
    if k.shape != q.shape or g.shape != q.shape or v.shape[:-1] != q.shape[:-1]:
        shapes = [list(x.shape) for x in (q, k, v, g)]
        return f"q, k, g are [B T H K] and v [B T H V], got {shapes}"
    if beta.shape != q.shape[:-1] or ids.shape != q.shape[:2]:
        return f"beta is [B T H] and ids [B T], got {list(beta.shape)} and {list(ids.shape)}"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
    state = () if isinstance(initial_state, tuple) else (initial_state,)
    if torch.float64 in [x.dtype for x in (g, beta, *state)]:
        return "g, beta and initial_state are at most float32, got float64 beside q, k and v"
    expected = (q.shape[0], q.shape[2], width, columns)
    if state and state[0].shape != expected:
        return f"initial_state is {list(expected)}, got {list(state[0].shape)}"
    return ""


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ids: Tensor,
    initial_state: Tensor | tuple[()] = (),
) -> KdaOut:
    """The op; contract in :mod:`k31fn.kernels.kda`."""
    if isinstance(initial_state, tuple):
        shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        initial_state = torch.zeros(shape, dtype=torch.float32, device=q.device)
    o, state = _kda(*(x[None] for x in (q, k, v, g, beta, ids, initial_state)))
    return KdaOut(o.squeeze(0), state.squeeze(0))


def _fwd(*operands: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    o, state, *rest = grouped(_launch_forward, *operands)
    return (o, state), (*operands, *rest)


def _bwd(residuals: tuple[Tensor, ...], ct: tuple[Tensor, Tensor]) -> tuple[Tensor | None, ...]:
    *d_inputs, d_state = grouped(_launch_backward, *residuals, *ct)
    return *d_inputs, None, d_state


_kda = custom_vjp(_fwd, _bwd, opaque=True, name="kda (triton)")


class _Shape(NamedTuple):
    """Sizes of a launch. A line is a head of a row of a group."""

    groups: int
    rows: int
    tokens: int
    heads: int
    width: int
    columns: int

    @property
    def lines(self) -> int:
        return self.groups * self.rows * self.heads

    @property
    def tiles(self) -> int:
        return triton.cdiv(self.tokens, TILE)


def _folded(operands: tuple[Tensor, ...]) -> tuple[_Shape, list[Tensor]]:
    """Sizes, and the operands with groups and rows as one dimension.

    What samples share under vmap is copied for each.
    """
    groups = max(x.shape[0] for x in operands)
    if groups > 1:
        operands = tuple(x.expand(groups, *x.shape[1:]) for x in operands)
    q, v = operands[0], operands[2]
    return _Shape(groups, *q.shape[1:], v.shape[-1]), [
        x.flatten(0, 1).contiguous() for x in operands
    ]


def _launch_forward(*operands: Tensor) -> tuple[Tensor, ...]:
    """o, the state after all tokens, the state before each segment, and the tokens of each row
    before its padding.
    """
    shape, (q, k, v, g, beta, ids, before) = _folded(operands)
    kind = _kind(q)
    stop = (ids > 0).sum(-1, dtype=torch.int32)
    wanted = triton.cdiv(shape.tiles, max(_SHORTEST, _SEGMENT // shape.lines))
    size = triton.cdiv(shape.tiles, wanted)
    count = triton.cdiv(shape.tiles, size)
    at_once = _TILES[kind].scan.rows
    factors = _factors(q, shape, min(at_once * size, shape.tiles))
    wq, kf, u, p, _, d = factors
    states = q.new_empty((shape.lines, count + 1, shape.width, shape.columns), dtype=torch.float32)
    o = torch.empty_like(v)
    for i in range(0, count, at_once):
        first = i * size
        tiles = min(at_once * size, shape.tiles - first)
        given = _given(kind, "prepare", shape, q.dtype)
        kda_prepare[(shape.lines * triton.cdiv(tiles, given["PER"]),)](
            q, k, v, g, beta, ids, stop, *factors, shape.tokens, first, tiles, **given
        )
        if i == 0:  # The first kernel is under way by now.
            states[:, 0] = before.flatten(0, 1)
        given = _given(kind, "scan", shape, q.dtype)
        given["MARKS"] = min(at_once, count - i)
        kda_scan[(shape.lines * (shape.columns // given["BLOCK"]),)](
            wq,
            kf,
            u,
            p,
            d,
            states[:, i],
            o,
            shape.tokens,
            first,
            tiles,
            size,
            states.stride(0),
            **given,
        )
    unfold = (shape.groups, shape.rows)
    states = states.unflatten(0, (*unfold, shape.heads))
    after = states[:, :, :, -1].clone()
    return o.unflatten(0, unfold), after, states[:, :, :, :-1], stop.unflatten(0, unfold)


def _launch_backward(*operands: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, beta and the state before all tokens."""
    shape, (q, k, v, g, beta, ids, before, states, stop, d_o, d_after) = _folded(operands)
    kind = _kind(q)
    count = states.shape[2]
    states = states.flatten(0, 1)
    size = triton.cdiv(shape.tiles, count)
    d_q = torch.empty_like(q)
    d_k = torch.empty_like(k)
    d_v = torch.empty_like(v)
    d_g = torch.empty_like(g)
    factors = _factors(q, shape, size)
    wq, kf, u, p, inverse, d = factors
    # states that come into the tiles and minus the gradients of those that leave; Y
    s = _low(q, shape, size, shape.columns, shape.width)
    ds = torch.empty_like(s)
    y = _low(q, shape, size, TILE, shape.columns)
    d_state = d_after.to(torch.float32, copy=True)
    of_gradients = _given(kind, "gradients", shape, q.dtype)
    blocks = shape.width // of_gradients["BLOCK"]
    parts = q.new_empty((blocks, *beta.shape), dtype=torch.float32)
    for i in reversed(range(count)):
        first = i * size
        tiles = min(size, shape.tiles - first)
        span = (shape.tokens, first, tiles)
        given = _given(kind, "prepare", shape, q.dtype)
        kda_prepare[(shape.lines * triton.cdiv(tiles, given["PER"]),)](
            q, k, v, g, beta, ids, stop, *factors, *span, **given
        )
        given = _given(kind, "states", shape, q.dtype)
        kda_states[(shape.lines * (shape.columns // given["BLOCK"]),)](
            wq, kf, u, d, states[:, i], s, y, tiles, states.stride(0), **given
        )
        given = _given(kind, "adjoint", shape, q.dtype)
        kda_adjoint[(shape.lines * (shape.columns // given["BLOCK"]),)](
            wq, kf, p, inverse, d, d_o, stop, d_state, ds, d_v, *span, **given
        )
        kda_gradients[(shape.lines * triton.cdiv(tiles, of_gradients["PER"]) * blocks,)](
            q,
            k,
            g,
            beta,
            ids,
            stop,
            d_o,
            s,
            ds,
            y,
            d_v,
            d_q,
            d_k,
            d_g,
            parts,
            *span,
            q.shape[0],
            **of_gradients,
        )
    grads = (d_q, d_k, d_v, d_g, parts.sum(0).to(beta.dtype), d_state.to(before.dtype))
    return tuple(x.unflatten(0, (shape.groups, shape.rows)) for x in grads)


class _Factors(NamedTuple):
    """What :func:`kda_prepare` writes, for the tiles of a segment."""

    wq: Tensor
    kf: Tensor
    u: Tensor
    p: Tensor
    inverse: Tensor
    d: Tensor


def _factors(q: Tensor, shape: _Shape, tiles: int) -> _Factors:
    C, K, V = TILE, shape.width, shape.columns
    sizes = ((2 * C, K), (C, K), (V, C), (C, C), (C, C))
    d = q.new_empty((shape.lines, tiles, K), dtype=torch.float32)
    return _Factors(*(_low(q, shape, tiles, *size) for size in sizes), d)


def _low(q: Tensor, shape: _Shape, tiles: int, *size: int) -> Tensor:
    """A matrix for each tile, as the kernels multiply it: the interpreter cannot multiply
    bfloat16.
    """
    dtype = torch.float32 if INTERPRETED else q.dtype
    return q.new_empty((shape.lines, tiles, *size), dtype=dtype)


def _kind(q: Tensor) -> str:
    """The key of ``_TILES``: float32 on CUDA has its own."""
    wide = q.dtype == torch.float32 and q.device.type == "cuda"
    return "cuda32" if wide else q.device.type


# kernels and their constants
_KERNELS = {
    "prepare": (kda_prepare, "H K V C BLOCK VBLOCK PER STAGES LEAST LOW HALF"),
    "scan": (kda_scan, "H K V C BLOCK STAGES STACKED MARKS LOW"),
    "states": (kda_states, "K V C BLOCK STAGES LOW"),
    "adjoint": (kda_adjoint, "H K V C BLOCK STAGES LOW"),
    "gradients": (kda_gradients, "H K V C BLOCK PER STAGES LEAST LOW HALF"),
}


def _given(kind: str, name: str, shape: _Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Constants and options of a launch."""
    tile = getattr(_TILES[kind], name)
    return {**_constants(kind, name, shape, dtype), "num_warps": tile.warps}


def _constants(kind: str, name: str, shape: _Shape, dtype: torch.dtype) -> dict[str, Any]:
    tile = getattr(_TILES[kind], name)
    matrix_units = dtype == torch.bfloat16 and not INTERPRETED
    block = min(tile.columns, shape.columns)
    if name == "gradients":
        block = min(tile.columns, shape.width)
    elif name == "prepare":  # It holds what it needs again of two blocks of K, and no more.
        block = max(min(tile.columns, shape.width), shape.width // 2)
    constants = {
        "H": shape.heads,
        "K": shape.width,
        "V": shape.columns,
        "C": TILE,
        "BLOCK": block,
        "VBLOCK": min(tile.columns, shape.columns),
        "PER": tile.rows,
        "STAGES": tile.stages,
        "STACKED": kind.startswith("cuda"),
        "MARKS": tile.rows,
        "LEAST": MIN_LOG_DECAY,
        "LOW": tl.bfloat16 if matrix_units else tl.float32,
        "HALF": tl.float16 if matrix_units else tl.float32,
    }
    return {constant: constants[constant] for constant in _KERNELS[name][1].split()}


_WIDE = ("g_ptr", "beta_ptr", "d_ptr", "before_ptr", "state_ptr", "d_state_ptr", "d_g_ptr")


def builds(kind: str) -> list[Build]:
    """What is compiled for 96 heads of 128 on a kind of device."""
    shape = _Shape(1, 1, 8192, 96, 128, 128)
    dtypes = (torch.bfloat16, torch.float32) if kind == "cuda" else (torch.float32,)
    listed: list[Build] = []
    for dtype in dtypes:
        of = "cuda32" if kind == "cuda" and dtype == torch.float32 else kind
        for name, (kernel, _) in _KERNELS.items():
            constants = _constants(of, name, shape, dtype)
            direction = "forward" if name in ("prepare", "scan") else "backward"
            types = {n: _type(n, dtype) for n in kernel.arg_names if n not in constants}
            title = f"kda_{name} {str(dtype).removeprefix('torch.')}"
            tile = getattr(_TILES[of], name)
            listed.append(Build(title, kernel, types, constants, direction, tile, ("line_step",)))
    return listed


def _type(name: str, dtype: torch.dtype) -> str:
    """Triton's type of a kernel's argument, as the layer calls the op."""
    if not name.endswith("_ptr"):
        return "i32"
    if name in ("ids_ptr", "stop_ptr"):
        return "*i64" if name == "ids_ptr" else "*i32"
    wide = dtype == torch.float32 or name in (*_WIDE, "part_ptr")
    return "*fp32" if wide else "*bf16"
