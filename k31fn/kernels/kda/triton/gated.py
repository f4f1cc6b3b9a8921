# pyright: reportMissingImports=false, reportCallIssue=false
"""KDA from projections: the kernels of ``kda``, those that read tokens with norms and gates inside.

What the backward has at the end are the gradients of normalised q and k, of log-decays and of beta;
the kernel of :mod:`~k31fn.kernels.kda_gates` then takes them back to the projections, in place.
Between forward and backward lives what ``kda`` keeps. First order only.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.kda.recurrence import MIN_LOG_DECAY, KdaOut
from k31fn.kernels.kda.triton.launches import Inputs
from k31fn.kernels.kda.triton.op import kda_accepts, run_backward, run_forward
from k31fn.kernels.kda_gates.triton import gates_gradients
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
    keep: str = "factors",
) -> str:
    """Why the kernels cannot run, or nothing."""
    del eps, keep
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
    keep: str = "factors",
) -> KdaOut:
    """The op; contract in :mod:`k31fn.kernels.kda`."""
    if isinstance(initial_state, tuple):
        shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        initial_state = torch.zeros(shape, dtype=torch.float32, device=q.device)
    operands = (q, k, v, z, beta, ids, initial_state, A_log, dt_bias)
    o, state = _gated(*(x[None] for x in operands), (bound, eps, scale), keep == "factors")
    return KdaOut(o.squeeze(0), state.squeeze(0))


def _fwd(*arguments: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    *operands, numbers, keep = arguments
    o, state, *kept = grouped(functools.partial(_launch_forward, numbers, keep), *operands)
    return (o, state), (*operands, *kept)


def _bwd(
    numbers: tuple[float, ...],
    keep: bool,
    residuals: tuple[Tensor, ...],
    ct: tuple[Tensor, Tensor],
) -> tuple[Tensor | None, ...]:
    del keep
    launch = functools.partial(_launch_backward, numbers)
    *per_token, d_state, d_rate, d_bias = grouped(launch, *residuals, *ct)
    return *per_token, None, d_state, d_rate, d_bias


_gated = custom_vjp(_fwd, _bwd, nondiff_argnums=(9, 10), opaque=True, name="kda_gated (triton)")


def _launch_forward(
    numbers: tuple[float, ...], keep: bool, *operands: Tensor
) -> tuple[Tensor, ...]:
    """See :func:`run_forward`."""
    x, (before,) = Inputs.fold(operands[:7], operands[7:], numbers)
    return run_forward(x, before, keep)


def _launch_backward(numbers: tuple[float, ...], *operands: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, z, beta, the state before all tokens, A_log and dt_bias."""
    parameters = operands[7:9]
    x, (before, *kept, d_o, d_after) = Inputs.fold(operands[:7] + operands[9:], parameters, numbers)
    (d_q, d_k, d_v, d_g, d_beta), d_before = run_backward(x, before, kept, (d_o, d_after))

    def of_groups(y: Tensor) -> Tensor:
        return y.unflatten(0, (x.shape.groups, x.shape.rows)).flatten(1, 2)

    inputs = (*(of_groups(y) for y in (x.q, x.k, x.g, x.beta)), *parameters)
    cts = tuple(of_groups(y) for y in (d_q, d_k, d_g, d_beta))
    # each in the place of what it is made from
    d_rate, d_bias = gates_gradients(inputs, cts, cts, numbers, of_groups(x.ids))
    grads = (y.unflatten(0, (x.shape.groups, x.shape.rows)) for y in (d_q, d_k, d_v, d_g, d_beta))
    return *grads, d_before, d_rate, d_bias
