# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""KDA by Triton kernels: segments of tiles, each prepared, scanned, and in the backward
differentiated.

Forward, a segment: :mod:`~.prepare`, then :func:`~.scans.kda_scan`, where heads are few by pieces
(:mod:`~.pieces`). Between forward and backward live the inputs, for each head one state per
segment, or one state and one transition per piece, and by the level that the caller sets the
factors too. Backward, last segment first: the factors, made again where they were not kept, the
states that come into the tiles, the gradients of those that leave, and from both the gradients of
the inputs (:mod:`~.gradients`). So the states of one segment are there at a time, and with
``keep="inputs"`` memory over inputs and gradients does not grow with the length. No atomics: every
number is a sum in one order, whatever the run. First order only.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.device import Branch
from k31fn.kernels.kda.recurrence import TILE, KdaOut
from k31fn.kernels.kda.triton.gradients import kda_gradients
from k31fn.kernels.kda.triton.launches import Factors, Inputs
from k31fn.kernels.kda.triton.pieces import scan_backward, scan_forward
from k31fn.kernels.kda.triton.tiles import builds
from k31fn.kernels.launch import grouped

__all__ = [
    "builds",
    "delta_rule_refusal",
    "kda",
    "kda_accepts",
    "run_backward",
    "run_forward",
]

_WIDTHS = (16, 32, 64, 128)


def kda_accepts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ids: Tensor,
    initial_state: Tensor | tuple[()] = (),
    keep: str = "factors",
) -> str:
    """Why the kernels cannot run, or nothing."""
    del keep
    reason = delta_rule_refusal(q, k, v, beta, ids, (g, beta), initial_state)
    if not reason and g.shape != q.shape:
        reason = f"g is [B T H K], got {list(g.shape)} beside q {list(q.shape)}"
    return reason


def delta_rule_refusal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    ids: Tensor,
    gates: tuple[Tensor, ...],
    initial_state: Tensor | tuple[()],
) -> str:
    """Why kernels that scan tiles of these operands cannot run, or nothing; all but the shape of
    the decays, which are among the ``gates``.
    """
    if q.ndim != 4 or not q.numel():
        return f"q is [B T H K] with at least one token, got {list(q.shape)}"
    width, columns = q.shape[-1], v.shape[-1]
    if width not in _WIDTHS or columns not in _WIDTHS:
        return f"K and V are one of 16, 32, 64, 128, got K = {width}, V = {columns}"
    if k.shape != q.shape or v.shape[:-1] != q.shape[:-1]:
        shapes = [list(x.shape) for x in (q, k, v)]
        return f"q and k are [B T H K] and v [B T H V], got {shapes}"
    if beta.shape != q.shape[:-1] or ids.shape != q.shape[:2]:
        return f"beta is [B T H] and ids [B T], got {list(beta.shape)} and {list(ids.shape)}"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
    state = () if isinstance(initial_state, tuple) else (initial_state,)
    if torch.float64 in [x.dtype for x in (*gates, *state)]:
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
    keep: str = "factors",
) -> KdaOut:
    """The op; contract in :mod:`k31fn.kernels.kda`."""
    if isinstance(initial_state, tuple):
        shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        initial_state = torch.zeros(shape, dtype=torch.float32, device=q.device)
    operands = (x[None] for x in (q, k, v, g, beta, ids, initial_state))
    o, state = _kda(*operands, keep == "factors")
    return KdaOut(o.squeeze(0), state.squeeze(0))


def _fwd(*arguments: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    *operands, keep = arguments
    o, state, *kept = grouped(functools.partial(_launch_forward, keep), *operands)
    return (o, state), (*operands, *kept)


def _bwd(
    keep: bool, residuals: tuple[Tensor, ...], ct: tuple[Tensor, Tensor]
) -> tuple[Tensor | None, ...]:
    del keep
    *d_inputs, d_state = grouped(_launch_backward, *residuals, *ct)
    return *d_inputs, None, d_state


_kda = custom_vjp(_fwd, _bwd, nondiff_argnums=(7,), opaque=True, name="kda (triton)")


def _launch_forward(keep: bool, *operands: Tensor) -> tuple[Tensor, ...]:
    """See :func:`run_forward`."""
    x, (before,) = Inputs.fold(operands)
    return run_forward(x, before, keep)


def _launch_backward(*operands: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, beta and the state before all tokens."""
    x, (before, *kept, d_o, d_after) = Inputs.fold(operands)
    grads, d_before = run_backward(x, before, kept, (d_o, d_after))
    return *(y.unflatten(0, (x.shape.groups, x.shape.rows)) for y in grads), d_before


def run_forward(x: Inputs, before: Tensor, keep: bool) -> tuple[Tensor, ...]:
    """o and the state after all tokens; then what the backward reads: the states before each piece
    and after the last, what each piece does to a state, and with ``keep`` the factors of each
    segment.
    """
    shape = x.shape
    plan = x.plan("scan")
    size = min(plan.segment, shape.tiles)
    factors = x.factors(size)
    kept: list[Tensor] = []
    states = x.wide(plan.pieces + 1, shape.width, shape.columns)
    transitions = x.transitions(plan.pieces if plan.side > 1 else 0)
    after = x.wide(shape.width, shape.columns)
    o = torch.empty_like(x.v)
    # a scan of one segment beside the factors of the next, where these have room of their own
    beside = Branch(o.device)
    for first in range(0, shape.tiles, size):
        tiles = min(size, shape.tiles - first)
        if keep and first:
            factors = x.factors(size)
        if keep:
            kept += factors
        x.prepare(factors, first, tiles)
        if first == 0:  # The first kernel is under way by now.
            states[:, 0] = before.flatten(0, 1)
        with beside:
            scan_forward(x, plan, factors, (states, transitions, after), o, first, tiles)
        if not keep:
            beside.join()
    beside.join()
    by_head = (shape.groups, shape.rows, shape.heads)
    of_heads = [y.unflatten(0, by_head) for y in (after, states, transitions, *kept)]
    return o.unflatten(0, by_head[:2]), *of_heads


def run_backward(
    x: Inputs, before: Tensor, kept: list[Tensor], cts: tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gradients of q, k, v, g and beta, folded, and of the state ``before`` all tokens.

    ``kept`` is what :func:`run_forward` kept, ``cts`` are the gradients of its results.
    """
    d_o, d_after = cts
    states, transitions, *of_factors = (y.flatten(0, 1) for y in kept)
    shape = x.shape
    plan = x.plan("scan")
    size = min(plan.segment, shape.tiles)
    factors = x.factors(0 if of_factors else size)
    # states that come into the tiles and minus the gradients of those that leave; Y
    s = x.low(size, shape.columns, shape.width)
    ds = torch.empty_like(s)
    y = x.low(size, TILE, shape.columns)
    d_states = x.wide(plan.side, shape.width, shape.columns)
    d_states[:, (plan.pieces - 1) % plan.side] = d_after.flatten(0, 1)
    given = x.given("gated_gradients" if x.gated else "gradients", size)
    blocks = shape.width // given["BLOCK"]
    d_q, d_k, d_v, d_g = (torch.empty_like(z) for z in (x.q, x.k, x.v, x.g))
    parts = x.beta.new_empty((blocks, *x.beta.shape), dtype=torch.float32)
    for i in reversed(range(triton.cdiv(shape.tiles, size))):
        first = i * size
        tiles = min(size, shape.tiles - first)
        if of_factors:
            factors = Factors.of_segment(of_factors, i)
        else:
            x.prepare(factors, first, tiles)
        scanned = (d_o, s, ds, y, d_v)
        scan_backward(x, plan, factors, (states, transitions, d_states), scanned, i, tiles)
        kda_gradients[(shape.lines * triton.cdiv(tiles, given["PER"]) * blocks,)](
            x.q,
            x.k,
            x.g,
            x.beta,
            x.ids,
            x.stop,
            x.rate,
            x.bias,
            factors.norm,
            *scanned,
            d_q,
            d_k,
            d_g,
            parts,
            shape.tokens,
            first,
            tiles,
            x.q.shape[0],
            x.numbers[0],
            **given,
        )
    d_before = d_states[:, 0].unflatten(0, (before.shape[0], shape.heads)).to(before.dtype)
    grads = (d_q, d_k, d_v, d_g, parts.sum(0).to(x.beta.dtype))
    return grads, d_before.unflatten(0, (shape.groups, shape.rows))
