"""KDA from projections in plain torch; contract in :mod:`k31fn.kernels.kda`."""

from __future__ import annotations

from k31fn.kernels.kda.recurrence import KdaOut
from k31fn.kernels.kda.reference import kda
from k31fn.kernels.kda_gates.reference import kda_gates
from k31fn.typing import Float, Int, Tensor

__all__ = ["kda_gated"]


def kda_gated(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    z: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    A_log: Float[Tensor, " H"],
    dt_bias: Float[Tensor, "H K"],
    ids: Int[Tensor, "B T"],
    bound: float,
    eps: float,
    scale: float,
    initial_state: Float[Tensor, "B H K V"] | tuple[()] = (),
    keep: str = "factors",
) -> KdaOut:
    """The op."""
    del keep
    x = kda_gates(q, k, z, beta, A_log, dt_bias, bound, eps, scale)
    return kda(x.q, x.k, v, x.g, x.beta, ids, initial_state)
