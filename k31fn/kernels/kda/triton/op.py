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

import torch
import triton
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.kda.recurrence import TILE, KdaOut
from k31fn.kernels.kda.triton.gradients import kda_gradients
from k31fn.kernels.kda.triton.launches import Shape
from k31fn.kernels.kda.triton.prepare import kda_prepare
from k31fn.kernels.kda.triton.scans import kda_adjoint, kda_scan, kda_states
from k31fn.kernels.launch import Build, grouped

__all__ = ["builds", "kda", "kda_accepts"]

_WIDTHS = (16, 32, 64, 128)
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


def _launch_forward(*operands: Tensor) -> tuple[Tensor, ...]:
    """o, the state after all tokens, the state before each segment, and the tokens of each row
    before its padding.
    """
    shape, (q, k, v, g, beta, ids, before) = Shape.fold(operands)
    stop = (ids > 0).sum(-1, dtype=torch.int32)
    wanted = triton.cdiv(shape.tiles, max(_SHORTEST, _SEGMENT // shape.lines))
    size = triton.cdiv(shape.tiles, wanted)
    count = triton.cdiv(shape.tiles, size)
    at_once = shape.tile("scan").rows
    factors = shape.factors(q, min(at_once * size, shape.tiles))
    wq, kf, u, p, _, d = factors
    states = q.new_empty((shape.lines, count + 1, shape.width, shape.columns), dtype=torch.float32)
    o = torch.empty_like(v)
    for i in range(0, count, at_once):
        first = i * size
        tiles = min(at_once * size, shape.tiles - first)
        given = shape.given("prepare", kda_prepare)
        kda_prepare[(shape.lines * triton.cdiv(tiles, given["PER"]),)](
            q, k, v, g, beta, ids, stop, *factors, shape.tokens, first, tiles, **given
        )
        if i == 0:  # The first kernel is under way by now.
            states[:, 0] = before.flatten(0, 1)
        given = shape.given("scan", kda_scan)
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
    shape, (q, k, v, g, beta, ids, before, states, stop, d_o, d_after) = Shape.fold(operands)
    count = states.shape[2]
    states = states.flatten(0, 1)
    size = triton.cdiv(shape.tiles, count)
    d_q = torch.empty_like(q)
    d_k = torch.empty_like(k)
    d_v = torch.empty_like(v)
    d_g = torch.empty_like(g)
    factors = shape.factors(q, size)
    wq, kf, u, p, inverse, d = factors
    # states that come into the tiles and minus the gradients of those that leave; Y
    s = shape.low(q, size, shape.columns, shape.width)
    ds = torch.empty_like(s)
    y = shape.low(q, size, TILE, shape.columns)
    d_state = d_after.to(torch.float32, copy=True)
    of_gradients = shape.given("gradients", kda_gradients)
    blocks = shape.width // of_gradients["BLOCK"]
    parts = q.new_empty((blocks, *beta.shape), dtype=torch.float32)
    for i in reversed(range(count)):
        first = i * size
        tiles = min(size, shape.tiles - first)
        span = (shape.tokens, first, tiles)
        given = shape.given("prepare", kda_prepare)
        kda_prepare[(shape.lines * triton.cdiv(tiles, given["PER"]),)](
            q, k, v, g, beta, ids, stop, *factors, *span, **given
        )
        given = shape.given("states", kda_states)
        kda_states[(shape.lines * (shape.columns // given["BLOCK"]),)](
            wq, kf, u, d, states[:, i], s, y, tiles, states.stride(0), **given
        )
        given = shape.given("adjoint", kda_adjoint)
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


def builds(kind: str) -> list[Build]:
    """What is compiled for 96 heads of 128 on a kind of device."""
    kinds = {"cuda": torch.bfloat16, "cuda32": torch.float32} if kind == "cuda" else {}
    listed: list[Build] = []
    for of, dtype in (kinds or {kind: torch.float32}).items():
        shape = Shape(1, 1, 8192, 96, 128, 128, dtype, of)
        listed += [
            shape.build("prepare", kda_prepare, "forward"),
            shape.build("scan", kda_scan, "forward"),
            shape.build("states", kda_states, "backward"),
            shape.build("adjoint", kda_adjoint, "backward"),
            shape.build("gradients", kda_gradients, "backward"),
        ]
    return listed
