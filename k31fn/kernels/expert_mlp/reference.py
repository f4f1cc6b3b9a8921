"""Routed experts by the operators that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k31fn.kernels.experts import combine, dispatch, grouped_matmul, permute
from k31fn.kernels.experts.reference import ExpertOrder
from k31fn.kernels.situ import situ_glu
from k31fn.typing import Float, Int, Tensor

__all__ = ["expert_mlp", "of_products"]


def expert_mlp(
    x: Float[Tensor, "N D"],
    weights: Float[Tensor, "N G"] | tuple[()],
    w_gate: Float[Tensor, "E D F"],
    w_up: Float[Tensor, "E D F"],
    w_down: Float[Tensor, "E F D"],
    order: Int[Tensor, "R"],
    inverse: Int[Tensor, "N G"],
    sizes: Int[Tensor, "E"],
    beta: float = 4.0,
    linear_beta: float = 25.0,
) -> Float[Tensor, "N D"]:
    """``y[n] = sum_g weights[n, g] e_j(x[n])``; every expert's output is rounded, then weighted."""
    matrices = (w_gate, w_up, w_down)
    route = ExpertOrder(order, inverse, sizes)
    return of_products(grouped_matmul, x, weights, matrices, route, beta, linear_beta)


def of_products(
    product: Callable[[Tensor, Any, Tensor], Tensor],
    x: Float[Tensor, "N D"],
    weights: Float[Tensor, "N G"] | tuple[()],
    matrices: tuple[Any, Any, Any],
    route: ExpertOrder,
    beta: float,
    linear_beta: float,
) -> Float[Tensor, "N D"]:
    """The same with ``product(rows, w, sizes)`` for each of ``matrices``: gate, up and down."""
    order, inverse, sizes = route
    w_gate, w_up, w_down = matrices
    if isinstance(weights, tuple):
        rows = permute(x, order, inverse.flatten())
    else:
        rows = dispatch(x, order, inverse)
    gate = product(rows, w_gate, sizes)
    up = product(rows, w_up, sizes)
    # No name for the activation, so that nothing keeps it through the last product.
    rows = product(situ_glu(gate, up, beta, linear_beta), w_down, sizes)
    if isinstance(weights, tuple):
        return permute(rows, inverse.flatten(), order)
    return combine(rows, weights, order, inverse)
