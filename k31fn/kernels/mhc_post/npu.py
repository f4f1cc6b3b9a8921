# pyright: reportMissingImports=false
"""``mhc_post`` by CANN's operator for Ascend 950 and its gradient operator. First order only.

The operator is documented as ``h_res^T x + h_post f``, the sum over the first index of ``h_res``,
as here.
"""

from __future__ import annotations

from typing import Any

import torch_npu
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp

__all__ = ["mhc_post", "mhc_post_accepts"]

_STREAMS = (4, 6, 8)  # those of the operator, from CANN's documentation


def mhc_post_accepts(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> str:
    """Why :func:`mhc_post` cannot run, or nothing."""
    del h_post, h_res
    name = torch_npu.npu.get_device_name()
    if not name.startswith("Ascend950"):
        return f"its operators are of Ascend 950, this is {name}"
    if x.shape[-2] not in _STREAMS:
        return f"it takes {_STREAMS} streams, got {x.shape[-2]}"
    if f.dtype != x.dtype:
        return (
            f"the streams and the sublayer's output must have one dtype, got {x.dtype} and "
            f"{f.dtype}"
        )
    return "" if x.numel() else "the operator takes no empty tensor"


def mhc_post(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """``h_post[j] f + sum_i h_res[i, j] x[i]``."""
    return _post(x, f, h_post, h_res)


def _fwd(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> tuple[Tensor, Any]:
    return torch_npu.npu_mhc_post(x, h_res, f, h_post), (x, f, h_post, h_res)


def _bwd(residuals: Any, ct: Tensor) -> tuple[Tensor, ...]:
    x, f, h_post, h_res = residuals
    # a cotangent may come expanded, as that of a sum does; the operator reads memory as it lies
    d_x, d_res, d_f, d_post = torch_npu.npu_mhc_post_backward(ct.contiguous(), x, h_res, f, h_post)
    return d_x, d_f, d_post, d_res


_post = custom_vjp(_fwd, _bwd, opaque=True, name="mhc_post (npu)")
