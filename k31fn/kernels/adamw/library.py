"""``adamw_step`` by torch's fused kernel, a private API: tested with torch 2.11 and 2.13.

Nothing else in k31fn names it.
"""

from __future__ import annotations

import torch

from k31fn.kernels.adamw.reference import Constants, Moved, in_slices
from k31fn.kernels.philox.reference import Draws
from k31fn.typing import Tensor

__all__ = ["adamw_step", "missing"]


def missing() -> str:
    """Why this machine cannot run it, or nothing."""
    if not hasattr(torch, "_fused_adamw_"):
        return f"torch {torch.__version__} has no fused AdamW"
    return ""


def adamw_step(
    p: Tensor,
    g: Tensor,
    mu: Tensor,
    nu: Tensor,
    step: Tensor,
    lr: float | Tensor,
    constants: Constants,
    scale: Tensor | None = None,
    skip: Tensor | None = None,
    draws: Draws | None = None,
) -> Moved:
    """The op."""
    beta1, beta2, eps, decay = constants
    if isinstance(lr, Tensor) and not lr.is_cpu:
        lr = lr.to(torch.float32)  # on a device the kernel reads no other; the CPU's reads any
    # meant for overflows under loss scaling; it skips for any reason
    found_inf = None if skip is None else skip.to(torch.float32)

    def rule(g: Tensor, p: Tensor, mu: Tensor, nu: Tensor) -> None:
        torch._fused_adamw_(
            [p],
            [g],
            [mu],
            [nu],
            [],  # largest values of nu, which AMSGrad would use
            [step],  # read, not changed
            lr=lr,  # pyright: ignore[reportArgumentType]  # a tensor selects another overload
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            found_inf=found_inf,
        )

    return in_slices(rule, (p, mu, nu), g, scale, draws)
