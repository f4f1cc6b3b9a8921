# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Gated DeltaNet by Triton kernels: segments of tiles, each prepared, scanned, and in the backward
differentiated.

The scans are KDA's own (:mod:`k31fn.kernels.kda.triton.scans`), which take any length of a tile. A
decay that is one number per token needs no factors in range, so tiles might be longer than KDA's;
but in bfloat16 results with keys that are alike then lose digits: o is off by 0.8e-2 with 16
tokens, 1.1e-2 with 32 and 1.3e-2 with 64.

Forward, a segment: :mod:`~.prepare`, then the scan. Between forward and backward live the inputs
and one state per segment and head. Backward, last segment first: the factors again, the states that
come into the tiles, the gradients of those that leave, and from both the gradients of the inputs
(:mod:`~.gradients`). No atomics: every number is a sum in one order, whatever the run. First order
only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.gdn.triton.gradients import gdn_gradients
from k31fn.kernels.gdn.triton.prepare import gdn_prepare
from k31fn.kernels.kda.recurrence import KdaOut
from k31fn.kernels.kda.triton.launches import folded
from k31fn.kernels.kda.triton.op import delta_rule_refusal
from k31fn.kernels.kda.triton.scans import kda_adjoint, kda_scan, kda_states
from k31fn.kernels.kda.triton.tiles import Shape, kind_of
from k31fn.kernels.launch import INTERPRETED, Build, Tile, grouped

__all__ = ["accepts", "builds", "gdn"]


class _Tiles(NamedTuple):
    """Tokens of a tile, and a cut per kernel. ``columns``: of V (of K in ``gradients``) that a
    program or a step has; ``rows``: tiles of tokens that a program has.
    """

    tokens: int
    prepare: Tile
    scan: Tile
    states: Tile
    adjoint: Tile
    gradients: Tile


# per kind of device; "cuda32": float32 operands there, whose products run without matrix units
_TILES = {
    "cuda": _Tiles(
        tokens=16,
        prepare=Tile(warps=2, rows=16, columns=64, stages=3),
        scan=Tile(warps=4, columns=64, stages=5),
        states=Tile(warps=4, columns=64, stages=4),
        adjoint=Tile(warps=4, columns=64, stages=4),
        gradients=Tile(warps=1, rows=8, columns=32, stages=2),
    ),
    "cuda32": _Tiles(
        tokens=16,
        prepare=Tile(warps=4, columns=64, stages=1),
        scan=Tile(warps=4, columns=32, stages=1),
        states=Tile(warps=4, columns=32, stages=1),
        adjoint=Tile(warps=4, columns=32, stages=1),
        gradients=Tile(warps=4, columns=32, stages=1),
    ),
    "npu": _Tiles(
        tokens=16,
        prepare=Tile(columns=64, stages=1),
        scan=Tile(columns=8, stages=1),
        states=Tile(columns=32, stages=1),
        adjoint=Tile(columns=16, stages=1),
        gradients=Tile(columns=32, stages=1),
    ),
    "cpu": _Tiles(32, *(Tile(rows=2, columns=16, stages=1),) * 5),
}
# tokens times heads of a segment: at widths of 128 in bfloat16 a tile of 16 takes 91 KB in the
# backward, so 1.7 GB
_SEGMENT = 294912
_SHORTEST = 256  # tokens of a segment: each costs a state, and the scans some time to begin


def accepts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ids: Tensor,
    initial_state: Tensor | tuple[()] = (),
) -> str:
    """Why the kernels cannot run, or nothing."""
    reason = delta_rule_refusal(q, k, v, beta, ids, (g, beta), initial_state)
    if not reason and g.shape != q.shape[:-1]:
        reason = f"g is [B T H], got {list(g.shape)} beside q {list(q.shape)}"
    return reason


def gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ids: Tensor,
    initial_state: Tensor | tuple[()] = (),
) -> KdaOut:
    """The op; contract in :mod:`k31fn.kernels.gdn`."""
    if isinstance(initial_state, tuple):
        shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        initial_state = torch.zeros(shape, dtype=torch.float32, device=q.device)
    o, state = _gdn(*(x[None] for x in (q, k, v, g, beta, ids, initial_state)))
    return KdaOut(o.squeeze(0), state.squeeze(0))


def _fwd(*operands: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    o, state, *rest = grouped(_launch_forward, *operands)
    return (o, state), (*operands, *rest)


def _bwd(residuals: tuple[Tensor, ...], ct: tuple[Tensor, Tensor]) -> tuple[Tensor | None, ...]:
    *d_inputs, d_state = grouped(_launch_backward, *residuals, *ct)
    return *d_inputs, None, d_state


_gdn = custom_vjp(_fwd, _bwd, opaque=True, name="gdn (triton)")


def _launch_forward(*operands: Tensor) -> tuple[Tensor, ...]:
    """o, the state after all tokens, the state before each segment, and the tokens of each row
    before its padding.
    """
    shape, (q, k, v, g, beta, ids, before) = folded(operands)
    kind = kind_of(q)
    stop = (ids > 0).sum(-1, dtype=torch.int32)
    tiles = triton.cdiv(shape.tokens, _TILES[kind].tokens)
    longest = max(_SHORTEST, _SEGMENT // shape.lines) // _TILES[kind].tokens
    count = triton.cdiv(tiles, longest)
    size = triton.cdiv(tiles, count)
    count = triton.cdiv(tiles, size)
    factors = _factors(q, shape, kind, size)
    states = q.new_empty((shape.lines, count + 1, shape.width, shape.columns), dtype=torch.float32)
    after = torch.empty_like(states[:, 0])
    o = torch.empty_like(v)
    for i in range(count):
        span = (shape.tokens, i * size, min(size, tiles - i * size))
        _prepare(kind, shape, (q, k, v, g, beta, ids, stop), factors, span)
        if i == 0:  # The first kernel is under way by now.
            states[:, 0] = before.flatten(0, 1)
        given = _given(kind, "scan", shape, q.dtype)
        kda_scan[(shape.lines * (shape.columns // given["BLOCK"]),)](
            factors.wq,
            factors.kf,
            factors.u,
            factors.p,
            factors.d,
            states[:, i],
            after,
            o,
            *span,
            size,
            1,  # in one piece
            states.stride(0),
            **given,
        )
    unfold = (shape.groups, shape.rows)
    states = states.unflatten(0, (*unfold, shape.heads))
    after = after.unflatten(0, (*unfold, shape.heads))
    return o.unflatten(0, unfold), after, states[:, :, :, :-1], stop.unflatten(0, unfold)


def _launch_backward(*operands: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, beta and the state before all tokens."""
    shape, (q, k, v, g, beta, ids, before, states, stop, d_o, d_after) = folded(operands)
    kind = kind_of(q)
    count = states.shape[2]
    states = states.flatten(0, 1)
    all_tiles = triton.cdiv(shape.tokens, _TILES[kind].tokens)
    size = triton.cdiv(all_tiles, count)
    d_q = torch.empty_like(q)
    d_k = torch.empty_like(k)
    d_v = torch.empty_like(v)
    factors = _factors(q, shape, kind, size)
    wq, kf, u, p, inverse, d = factors
    # states that come into the tiles and minus the gradients of those that leave; Y
    s = _low(q, shape, size, shape.columns, shape.width)
    ds = torch.empty_like(s)
    y = _low(q, shape, size, _TILES[kind].tokens, shape.columns)
    d_state = d_after.to(torch.float32, copy=True)
    per_head = shape.width * shape.columns
    of_gradients = _given(kind, "gradients", shape, q.dtype)
    blocks = shape.width // of_gradients["BLOCK"]
    # by blocks of features, which torch adds in order
    d_beta, d_g = q.new_empty((2, blocks, *beta.shape), dtype=torch.float32)
    for i in reversed(range(count)):
        tiles = min(size, all_tiles - i * size)
        span = (shape.tokens, i * size, tiles)
        _prepare(kind, shape, (q, k, v, g, beta, ids, stop), factors, span)
        given = _given(kind, "states", shape, q.dtype)
        kda_states[(shape.lines * (shape.columns // given["BLOCK"]),)](
            # a segment in one piece; d in the place of transitions, which are not asked for
            wq,
            kf,
            u,
            d,
            states[:, i],
            d,
            s,
            y,
            tiles,
            tiles,
            1,
            states.stride(0),
            0,
            **given,
        )
        given = _given(kind, "adjoint", shape, q.dtype)
        kda_adjoint[(shape.lines * (shape.columns // given["BLOCK"]),)](
            wq, kf, p, inverse, d, d_o, stop, d_state, ds, d_v, *span, tiles, 1, per_head, **given
        )
        gdn_gradients[(shape.lines * triton.cdiv(tiles, of_gradients["PER"]) * blocks,)](
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
            d_beta,
            d_g,
            *span,
            q.shape[0],
            **of_gradients,
        )
    of_tokens = (d_q, d_k, d_v, d_g.sum(0).to(g.dtype), d_beta.sum(0).to(beta.dtype))
    grads = (*of_tokens, d_state.to(before.dtype))
    return tuple(x.unflatten(0, (shape.groups, shape.rows)) for x in grads)


class _Factors(NamedTuple):
    """What :func:`gdn_prepare` writes, for the tiles of a segment."""

    wq: Tensor
    kf: Tensor
    u: Tensor
    p: Tensor
    inverse: Tensor
    d: Tensor


def _factors(q: Tensor, shape: Shape, kind: str, tiles: int) -> _Factors:
    C, K, V = _TILES[kind].tokens, shape.width, shape.columns
    parts = _constants(kind, "prepare", shape, q.dtype)["PARTS"]
    sizes = ((2 * C, K), (parts * C, K), (V, C), (parts * C, C), (parts * C, C))
    d = q.new_empty((shape.lines, tiles, K), dtype=torch.float32)
    return _Factors(*(_low(q, shape, tiles, *size) for size in sizes), d)


def _low(q: Tensor, shape: Shape, tiles: int, *size: int) -> Tensor:
    """A matrix for each tile, as the kernels multiply it: the interpreter cannot multiply
    bfloat16.
    """
    dtype = torch.float32 if INTERPRETED else q.dtype
    return q.new_empty((shape.lines, tiles, *size), dtype=dtype)


def _prepare(
    kind: str,
    shape: Shape,
    operands: tuple[Tensor, ...],
    factors: _Factors,
    span: tuple[int, int, int],
) -> None:
    given = _given(kind, "prepare", shape, operands[0].dtype)
    grid = (shape.lines * triton.cdiv(span[2], given["PER"]),)
    gdn_prepare[grid](*operands, *factors, *span, **given)


# kernels and their constants
_KERNELS = {
    "prepare": (gdn_prepare, "H K V C DOUBLINGS VBLOCK PER STAGES LOW HALF PARTS"),
    "scan": (kda_scan, "H K V C BLOCK STAGES STACKED PARTS LOW"),
    "states": (kda_states, "K V N WIDE C BLOCK STAGES FRESH INNER PARTS LOW"),
    "adjoint": (kda_adjoint, "H K V C BLOCK STAGES FRESH PARTS LOW"),
    "gradients": (gdn_gradients, "H K V C BLOCK PER STAGES LOW HALF"),
}


def _given(kind: str, name: str, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Constants and options of a launch."""
    tile = getattr(_TILES[kind], name)
    return {**_constants(kind, name, shape, dtype), "num_warps": tile.warps}


def _constants(kind: str, name: str, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    tile = getattr(_TILES[kind], name)
    matrix_units = dtype == torch.bfloat16 and not INTERPRETED
    constants = {
        "H": shape.heads,
        "K": shape.width,
        "V": shape.columns,
        "C": _TILES[kind].tokens,
        "DOUBLINGS": _TILES[kind].tokens.bit_length() - 2,
        "BLOCK": min(tile.columns, shape.width if name == "gradients" else shape.columns),
        "VBLOCK": min(tile.columns, shape.columns),
        "PER": tile.rows,
        "STAGES": tile.stages,
        "STACKED": kind.startswith("cuda"),
        # all of V from the states that are there, and no transition
        "N": shape.columns,
        "WIDE": shape.columns,
        "FRESH": False,
        "INNER": False,
        "PARTS": 2 if matrix_units else 1,
        "LOW": tl.bfloat16 if matrix_units else tl.float32,
        "HALF": tl.float16 if matrix_units else tl.float32,
    }
    return {constant: constants[constant] for constant in _KERNELS[name][1].split()}


_WIDE = ("g_ptr", "beta_ptr", "d_ptr", "state_ptr", "transition_ptr", "after_ptr", "d_state_ptr")


def builds(kind: str) -> list[Build]:
    """What is compiled for 96 heads of 128 on a kind of device, in the dtype that it trains in."""
    shape = Shape(1, 1, 8192, 96, 128, 128)
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    listed: list[Build] = []
    for name, (kernel, _) in _KERNELS.items():
        constants = _constants(kind, name, shape, dtype)
        direction = "forward" if name in ("prepare", "scan") else "backward"
        types = {n: _type(n, dtype) for n in kernel.arg_names if n not in constants}
        tile = getattr(_TILES[kind], name)
        listed.append(
            Build(
                f"gdn_{name}",
                kernel,
                types,
                constants,
                direction,
                tile,
                ("line_step", "state_step"),
            )
        )
    return listed


def _type(name: str, dtype: torch.dtype) -> str:
    """Triton's type of a kernel's argument, as the layer calls the op."""
    if not name.endswith("_ptr"):
        return "i32"
    if name in ("ids_ptr", "stop_ptr"):
        return "*i64" if name == "ids_ptr" else "*i32"
    wide = dtype == torch.float32 or name in (*_WIDE, "d_beta_ptr", "d_g_ptr")
    return "*fp32" if wide else "*bf16"
