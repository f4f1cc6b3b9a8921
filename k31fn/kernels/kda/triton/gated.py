# pyright: reportMissingImports=false, reportCallIssue=false
"""KDA from projections: the kernels of ``kda``, those that read and write tokens with norms and
gates inside.

Between forward and backward live what ``kda`` keeps, and o, from which a norm's gradient is made:
the next layer keeps it too. First order only.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.kda.recurrence import MIN_LOG_DECAY, KdaOut
from k31fn.kernels.kda.triton.gated_gradients import kda_gated_gradients
from k31fn.kernels.kda.triton.launches import Factors, Inputs
from k31fn.kernels.kda.triton.op import kda_accepts, run_backward, run_forward
from k31fn.kernels.launch import grouped

__all__ = ["kda_gated", "kda_gated_accepts"]


def kda_gated_accepts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ids: Tensor,
    bound: float,
    eps: float,
    scale: float,
    initial_state: Tensor | tuple[()] = (),
) -> str:
    """Why the kernels cannot run, or nothing."""
    del eps
    reason = kda_accepts(q, k, v, z, beta, ids, initial_state)
    if reason:
        return reason
    if A_log.shape != q.shape[2:3] or dt_bias.shape != q.shape[2:]:
        return f"A_log is [H] and dt_bias [H K], got {list(A_log.shape)} and {list(dt_bias.shape)}"
    if torch.float64 in (A_log.dtype, dt_bias.dtype):
        return "A_log and dt_bias are at most float32, got float64 beside q, k and v"
    if not MIN_LOG_DECAY <= bound < 0 or not scale > 0:
        return f"bound is in [{MIN_LOG_DECAY}, 0) and scale positive, got {bound} and {scale}"
    return ""


def kda_gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ids: Tensor,
    bound: float,
    eps: float,
    scale: float,
    initial_state: Tensor | tuple[()] = (),
) -> KdaOut:
    """The op; contract in :mod:`k31fn.kernels.kda`."""
    if isinstance(initial_state, tuple):
        shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        initial_state = torch.zeros(shape, dtype=torch.float32, device=q.device)
    operands = (q, k, v, z, beta, ids, initial_state, A_log, dt_bias)
    o, state = _gated(*(x[None] for x in operands), bound, eps, scale)
    return KdaOut(o.squeeze(0), state.squeeze(0))


def _fwd(*arguments: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    operands = arguments[:9]
    o, state, *rest = grouped(functools.partial(_launch_forward, arguments[9:]), *operands)
    return (o, state), (*operands, o, *rest)


def _bwd(
    bound: float,
    eps: float,
    scale: float,
    residuals: tuple[Tensor, ...],
    ct: tuple[Tensor, Tensor],
) -> tuple[Tensor | None, ...]:
    launch = functools.partial(_launch_backward, (bound, eps, scale))
    *per_token, d_state, d_rate, d_bias = grouped(launch, *residuals, *ct)
    return *per_token, None, d_state, d_rate, d_bias


_gated = custom_vjp(_fwd, _bwd, nondiff_argnums=(9, 10, 11), opaque=True, name="kda_gated (triton)")


def _launch_forward(numbers: tuple[float, ...], *operands: Tensor) -> tuple[Tensor, ...]:
    """See :func:`run_forward`."""
    x, (before,) = Inputs.fold(operands[:7], operands[7:], numbers)
    return run_forward(x, before)


def _launch_backward(numbers: tuple[float, ...], *operands: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, z, beta, the state before all tokens, A_log and dt_bias."""
    A_log, dt_bias = operands[7:9]
    x, (before, o, *others) = Inputs.fold(operands[:7] + operands[9:], (A_log, dt_bias), numbers)
    shape = x.shape
    given = x.given("gated_gradients")
    blocks = shape.width // given["BLOCK"]
    d_q, d_k, d_z, d_beta = (torch.empty_like(y) for y in (x.q, x.k, x.g, x.beta))
    size = min(x.plan("scan").segment, shape.tiles)
    of_each = triton.cdiv(size, given["PER"])
    # of each program; zeros, since the last segment may have fewer
    programs = of_each * triton.cdiv(shape.tiles, size)
    d_rate = x.wide(programs, blocks).zero_()
    d_bias = x.wide(programs, shape.width).zero_()

    def of_segment(factors: Factors, scanned: tuple[Tensor, ...], first: int, tiles: int) -> None:
        kda_gated_gradients[(shape.lines * triton.cdiv(tiles, given["PER"]) * blocks,)](
            x.q,
            x.k,
            x.v,
            x.g,
            x.beta,
            x.ids,
            x.stop,
            x.rate,
            x.bias,
            factors.norm,
            o,
            *scanned,
            d_q,
            d_k,
            d_z,
            d_beta,
            d_rate,
            d_bias,
            shape.tokens,
            first,
            tiles,
            first // size * of_each,
            programs,
            numbers[0],
            numbers[2],
            **given,
        )

    d_v, d_before = run_backward(x, [before, *others], of_segment)
    grads = [y.unflatten(0, (shape.groups, shape.rows)) for y in (d_q, d_k, d_v, d_z, d_beta)]
    # of all programs and rows, in one order
    by_row = (shape.groups, shape.rows, shape.heads)
    d_rate = d_rate.sum((1, 2)).unflatten(0, by_row).sum(1)
    d_bias = d_bias.sum(1).unflatten(0, by_row).sum(1)
    return *grads, d_before, d_rate.to(A_log.dtype), d_bias.to(dt_bias.dtype)
