"""Routed experts as one rule: the library's grouped products, and kernels for all between them.

All products are ``torch.nn.functional.grouped_mm``, which reads on the device where each expert's
rows end.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.experts.triton.copies import scatter, sum_copies
from k31fn.kernels.situ.triton import activation, activation_grads

__all__ = ["accepts", "expert_mlp"]


def accepts(
    x: Tensor,
    weights: Tensor | tuple[()],
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    order: Tensor,
    inverse: Tensor,
    sizes: Tensor,
    beta: float = 4.0,
    linear_beta: float = 25.0,
) -> str:
    """Why :func:`expert_mlp` cannot run, or nothing."""
    del beta, linear_beta
    matrices = (w_gate, w_up, w_down)
    experts = sizes.shape[0]
    inner = w_gate.shape[-1]
    wanted = [(experts, x.shape[-1], inner)] * 2 + [(experts, inner, x.shape[-1])]
    if [w.shape for w in matrices] != wanted:
        shapes = ", ".join(str(list(w.shape)) for w in matrices)
        return (
            f"{experts} experts on rows of {x.shape[-1]} have w_gate and w_up [E D F] and w_down "
            f"[E F D], got {shapes}"
        )
    if any(w.dtype != x.dtype for w in matrices):
        dtypes = ", ".join(str(w.dtype) for w in matrices)
        return f"it multiplies rows and weights of one dtype, got {x.dtype} and {dtypes}"
    if w_gate.shape[1] % 8 or w_gate.shape[2] % 8:
        return f"rows of 16 bytes: [D, F]={list(w_gate.shape[1:])} must be multiples of 8"
    # The kernels would read past the end.
    if inverse.shape[0] != x.shape[0] or order.numel() > inverse.numel():
        return (
            f"order and inverse have a place for each copy of {x.shape[0]} tokens, got "
            f"{list(order.shape)} and {list(inverse.shape)}"
        )
    if isinstance(weights, tuple):
        copies = inverse.shape[1]
        return "" if copies == 1 else f"a token of {copies} copies needs weights"
    if weights.shape != inverse.shape or weights.dtype == torch.float64:
        return (
            f"weights are {list(inverse.shape)}, at most float32, got {list(weights.shape)} of "
            f"{weights.dtype}"
        )
    return ""


def expert_mlp(
    x: Tensor,
    weights: Tensor | tuple[()],
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    order: Tensor,
    inverse: Tensor,
    sizes: Tensor,
    beta: float = 4.0,
    linear_beta: float = 25.0,
) -> Tensor:
    """The op; contract in :mod:`k31fn.kernels.expert_mlp`."""
    route = (order, inverse, sizes)
    return _experts(x, weights, (w_gate, w_up, w_down), route, (beta, linear_beta))


def _fwd(
    x: Tensor,
    weights: Tensor | tuple[()],
    matrices: tuple[Tensor, Tensor, Tensor],
    route: tuple[Tensor, Tensor, Tensor],
    bounds: tuple[float, float],
) -> tuple[Tensor, Any]:
    order, inverse, sizes = route
    w_gate, w_up, w_down = matrices
    ends = _ends(sizes)
    rows = scatter(x, inverse, order.shape[0], weights)
    gate = _product(rows, w_gate, ends)
    up = _product(rows, w_up, ends)
    # Freed as soon as it is read: the products after this are as large.
    del rows
    hidden = activation(gate, up, weights, order, bounds)
    y = sum_copies(_product(hidden, w_down, ends), inverse)
    return y, (x, weights, matrices, route, gate, up)


def _bwd(bounds: tuple[float, float], needs: Any, residuals: Any, ct: Tensor) -> tuple[Any, ...]:
    x, weights, matrices, route, gate, up = residuals
    order, inverse, sizes = route
    w_gate, w_up, w_down = matrices
    of_x, _, (of_gate, of_up, of_down), _ = needs
    ends = _ends(sizes)
    d_out = scatter(ct, inverse, order.shape[0], weights)
    d_hidden = _product(d_out, w_down.mT, ends)
    d_gate, d_up, d_weights, hidden = activation_grads(gate, up, weights, order, d_hidden, bounds)
    d_w_down = _outer(hidden, d_out, ends) if of_down else None
    # Each as soon as it has been read: the weights' gradients that follow are larger.
    del d_out, d_hidden, hidden
    d_x = None
    if of_x:
        through_up = _product(d_up, w_up.mT, ends)
        d_x = sum_copies(_product(d_gate, w_gate.mT, ends), inverse, through_up)
        del through_up
    d_w_gate: Tensor | None = None
    d_w_up: Tensor | None = None
    if of_gate or of_up:
        rows = scatter(x, inverse, order.shape[0], weights)
        d_w_gate = _outer(rows, d_gate, ends) if of_gate else None
        del d_gate
        d_w_up = _outer(rows, d_up, ends) if of_up else None
    return d_x, d_weights, (d_w_gate, d_w_up, d_w_down), None


_experts = custom_vjp(
    _fwd, _bwd, nondiff_argnums=(4,), opaque=True, needs=True, name="expert_mlp (fused)"
)


def _ends(sizes: Tensor) -> Tensor:
    # The library reads them as 32-bit integers.
    return sizes.cumsum(0, dtype=torch.int32)


def _product(rows: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Each expert's rows times its matrix."""
    if not rows.shape[0]:
        return rows.new_zeros((0, w.shape[2]))
    return F.grouped_mm(rows, w, offs=ends)


def _outer(rows: Tensor, ct: Tensor, ends: Tensor) -> Tensor:
    """Each expert's rows, transposed, times its cotangents; zeros for an expert without rows."""
    if not rows.shape[0]:
        return rows.new_zeros((ends.shape[0], rows.shape[1], ct.shape[1]))
    return F.grouped_mm(rows.mT, ct, offs=ends)
