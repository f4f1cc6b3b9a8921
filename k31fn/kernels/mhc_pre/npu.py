# pyright: reportMissingImports=false
"""``mhc_pre`` by CANN's operators for Ascend 950 and their gradient operators. First order only.

Sinkhorn runs again in the backward, with the steps that its gradient operator reads; between
forward and backward there are its argument and 2 N + N N + 1 more numbers per token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.mhc_pre.reference import SINKHORN_EPS, Pre

__all__ = ["mhc_pre", "mhc_pre_accepts"]

# limits of the operators, from CANN's documentation
_STREAMS = (4, 6, 8)
_MOST_ITERATIONS = 100


def mhc_pre_accepts(
    x: Tensor, phi: Tensor, scale: Tensor, base: Tensor, eps: float, iterations: int
) -> str:
    """Why :func:`mhc_pre` cannot run, or nothing."""
    del scale, base, eps
    name = torch_npu.npu.get_device_name()
    if not name.startswith("Ascend950"):
        return f"its operators are of Ascend 950, this is {name}"
    streams, width = x.shape[-2:]
    if streams not in _STREAMS or phi.shape != (streams * width, 2 * streams + streams**2):
        return (
            f"it takes {_STREAMS} streams and their phi, got {streams} of width {width} and phi "
            f"{list(phi.shape)}"
        )
    if not 1 <= iterations <= _MOST_ITERATIONS:
        return f"1 to {_MOST_ITERATIONS} iterations, got {iterations}"
    return "" if x.numel() else "the operator takes no empty tensor"


def mhc_pre(
    x: Tensor, phi: Tensor, scale: Tensor, base: Tensor, eps: float, iterations: int
) -> Pre:
    """The sublayer's input, the streams handed through, and how they go on."""
    return _pre(x, phi, scale, base, eps, iterations)


def _fwd(
    x: Tensor, phi: Tensor, scale: Tensor, base: Tensor, eps: float, iterations: int
) -> tuple[Pre, Any]:
    wide = (a.to(torch.float32) for a in (phi.mT, scale, base))
    y, h_post, a_res, inverse, products, h_pre = torch_npu.npu_mhc_pre(
        x, *wide, norm_eps=eps, hc_eps=SINKHORN_EPS, out_flag=1
    )
    h_res = torch_npu.npu_mhc_sinkhorn(a_res, eps=SINKHORN_EPS, num_iters=iterations)[0]
    return Pre(y, x, h_post, h_res), (x, phi, scale, base, a_res, inverse, products, h_pre, h_post)


def _bwd(eps: float, iterations: int, residuals: Any, ct: Pre) -> tuple[Tensor, ...]:
    x, phi, scale, base, a_res, inverse, products, h_pre, h_post = residuals
    # for its steps and sums, which the forward did not ask for: they need not live until here
    _, steps, sums = torch_npu.npu_mhc_sinkhorn(
        a_res, eps=SINKHORN_EPS, num_iters=iterations, out_flag=1
    )
    d_a_res = torch_npu.npu_mhc_sinkhorn_backward(ct.h_res.contiguous(), steps, sums)
    of_forward = (inverse, products, h_pre, h_post)
    d_x, d_phi, d_scale, d_base, _ = torch_npu.npu_mhc_pre_backward(
        x,
        phi.mT.to(torch.float32),
        scale.to(torch.float32),
        ct.y.contiguous(),
        ct.h_post.contiguous(),
        d_a_res,
        *of_forward,
        hc_eps=SINKHORN_EPS,
        grad_x_post=ct.x.contiguous(),
    )
    # the operators hold phi as [C, N D], k31fn as [N D, C]
    return d_x, d_phi.mT.to(phi.dtype), d_scale.to(scale.dtype), d_base.to(base.dtype)


_pre = custom_vjp(_fwd, _bwd, nondiff_argnums=(4, 5), opaque=True, name="mhc_pre (npu)")
