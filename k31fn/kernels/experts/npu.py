# pyright: reportMissingImports=false
"""``grouped_matmul``, ``dispatch`` and ``combine`` by CANN's operators. First order only.

``npu_grouped_matmul`` has no gradient of its own. Here the gradient of the rows is the same product
with the weights transposed, and that of the weights the product whose summed dimension is cut into
groups (``group_type=2``): an expert's rows, transposed, times its cotangents. ``sizes`` stays on
the device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp

__all__ = [
    "combine",
    "combine_accepts",
    "dispatch",
    "dispatch_accepts",
    "grouped_matmul",
    "grouped_matmul_accepts",
]

_MOST_GROUPS = 1024
_WIDEST = 65535  # last dim of each factor
_MOST_COPIES = 16_777_214
_MOST_CHOICES = 512  # experts of a token
_BY_ROWS, _BY_SUM = (
    0,
    2,
)  # group_type: which dim of rows [m, k] times weight [k, n] is cut into groups
_ONE_RESULT, _ENDS = 3, 0  # split_item; group_list_type: where each group ends


def grouped_matmul_accepts(rows: Tensor, w: Tensor, sizes: Tensor) -> str:
    """Why :func:`grouped_matmul` cannot run, or nothing."""
    del sizes
    if w.dtype != rows.dtype:
        return f"it multiplies rows and weights of one dtype, got {rows.dtype} and {w.dtype}"
    if w.shape[0] > _MOST_GROUPS:
        return f"at most {_MOST_GROUPS} experts, got {w.shape[0]}"
    if max(w.shape[1:]) > _WIDEST:
        return f"[in, out]={list(w.shape[1:])} may be at most {_WIDEST}"
    return "" if rows.numel() else "the operator takes no empty tensor"


def grouped_matmul(rows: Tensor, w: Tensor, sizes: Tensor) -> Tensor:
    """Each expert's rows times its weights; contract in :mod:`k31fn.kernels.experts`."""
    return _product(rows, w, sizes)


def _multiply(x: Tensor, y: Tensor, sizes: Tensor, group_type: int) -> Tensor:
    ends = sizes.cumsum(0, dtype=torch.int64)
    (out,) = torch_npu.npu_grouped_matmul(
        [x],
        [y],
        group_list=ends,
        split_item=_ONE_RESULT,
        group_type=group_type,
        group_list_type=_ENDS,
    )
    return out


def _product_fwd(rows: Tensor, w: Tensor, sizes: Tensor) -> tuple[Tensor, Any]:
    rows = rows.contiguous()
    return _multiply(rows, w, sizes, _BY_ROWS), (rows, w, sizes)


def _product_bwd(needs: Any, residuals: Any, ct: Tensor) -> tuple[Any, ...]:
    rows, w, sizes = residuals
    ct = ct.contiguous()
    d_rows = _multiply(ct, w.mT, sizes, _BY_ROWS) if needs[0] else None
    if not needs[1]:
        return d_rows, None, None
    d_w = _multiply(rows.mT, ct, sizes, _BY_SUM).view(w.shape)
    # what the operator leaves in the place of an expert without rows is not documented
    return d_rows, torch.where((sizes > 0)[:, None, None], d_w, 0), None


_product = custom_vjp(
    _product_fwd, _product_bwd, opaque=True, needs=True, name="grouped_matmul (npu)"
)


def dispatch_accepts(x: Tensor, order: Tensor, inverse: Tensor) -> str:
    """Why :func:`dispatch` cannot run, or nothing."""
    return _unfit(order, inverse) if x.numel() else "the operator takes no empty tensor"


def dispatch(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """``rows[r] = x[order[r] // G]``: a gather; its gradient sums a token's copies in one
    operator.
    """
    return _dispatch(x, order, inverse)


def _dispatch_fwd(x: Tensor, order: Tensor, inverse: Tensor) -> tuple[Tensor, Any]:
    return x.index_select(0, order // inverse.shape[1]), (inverse,)


def _dispatch_bwd(residuals: Any, ct: Tensor) -> tuple[Any, ...]:
    (inverse,) = residuals
    num_tokens, copies = inverse.shape
    index = inverse.flatten().to(torch.int32)
    return (
        torch_npu.npu_moe_token_permute_grad_v2(
            ct.contiguous(), index, num_tokens, ct.dtype, copies
        ),
        None,
        None,
    )


_dispatch = custom_vjp(_dispatch_fwd, _dispatch_bwd, opaque=True, name="dispatch (npu)")


def combine_accepts(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> str:
    """Why :func:`combine` cannot run, or nothing."""
    if weights.dtype != rows.dtype:
        return (
            f"it would round the weights from {weights.dtype} to {rows.dtype}, the dtype of the "
            "rows"
        )
    return _unfit(order, inverse) if rows.numel() else "the operator takes no empty tensor"


def combine(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """``y[n] = sum_g weights[n, g] rows[inverse[n, g]]``; contract in
    :mod:`k31fn.kernels.experts`.
    """
    return _combine(rows, weights, order, inverse)


def _combine_fwd(
    rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor
) -> tuple[Tensor, Any]:
    index = inverse.flatten().to(torch.int32)
    return torch_npu.npu_moe_token_unpermute(rows, index, probs=weights), (rows, weights, inverse)


def _combine_bwd(residuals: Any, ct: Tensor) -> tuple[Any, ...]:
    rows, weights, inverse = residuals
    index = inverse.flatten().to(torch.int32)
    d_rows, d_weights = torch_npu.npu_moe_token_unpermute_grad(
        rows, ct.contiguous(), index, probs=weights
    )
    return d_rows, d_weights, None, None


_combine = custom_vjp(_combine_fwd, _combine_bwd, opaque=True, name="combine (npu)")


def _unfit(order: Tensor, inverse: Tensor) -> str:
    if order.numel() != inverse.numel():
        return f"it takes no absent copies: {inverse.numel()} copies have {order.numel()} rows"
    if inverse.numel() > _MOST_COPIES or inverse.shape[1] > _MOST_CHOICES:
        return (
            f"at most {_MOST_COPIES} rows and {_MOST_CHOICES} experts of a token, got "
            f"{inverse.numel()} and "
            f"{inverse.shape[1]}"
        )
    return ""
