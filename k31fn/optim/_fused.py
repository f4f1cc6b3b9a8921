"""torch's fused AdamW kernel, a private API: tested with torch 2.11 and 2.13.

Nothing else in k31fn names it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from k31fn.typing import Float, Tensor

__all__ = ["adamw_", "supports"]


def supports(x: Tensor) -> bool:
    """Whether the kernel runs on this tensor's device, and can step it: the CPU kernel ignores
    strides.
    """
    key = torch._C._dispatch_key_for_device(x.device.type)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", key)
    return x.is_contiguous() and has_kernel


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    mu: Sequence[Tensor],
    nu: Sequence[Tensor],
    step: Float[Tensor, ""],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    skip: Float[Tensor, ""] | None,
) -> None:
    """One AdamW step in place, on tensors of one device and dtype, all contiguous.

    Args:
        step: number of this step, from 1; read, not changed.
        skip: 1 leaves everything as it was, 0 does not; decided on the device.
    """
    if isinstance(lr, Tensor) and not lr.is_cpu:
        lr = lr.to(torch.float32)  # on a device the kernel reads no other; the CPU's reads any
    torch._fused_adamw_(
        list(params),
        list(grads),
        list(mu),
        list(nu),
        [],  # largest values of nu, which AMSGrad would use
        [step] * len(params),  # the kernel reads one per tensor
        lr=lr,  # pyright: ignore[reportArgumentType]  # a tensor selects another overload
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=skip,  # meant for overflows under loss scaling; it skips for any reason
    )
