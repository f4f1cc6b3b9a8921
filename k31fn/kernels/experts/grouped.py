"""Implementations of ``grouped_matmul`` that need no padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.typing import Float, Int, Tensor

__all__ = ["grouped_mm", "grouped_mm_accepts", "ragged"]


def ragged(
    rows: Float[Tensor, "R I"], w: Float[Tensor, "E I O"], sizes: Int[Tensor, "E"]
) -> Float[Tensor, "R O"]:
    """One product per expert.

    ``split`` and ``unbind`` are one node of the graph each, with ``cat`` and ``stack`` as their
    gradients.

    Raises:
        ValueError: ``sizes`` does not add up to the number of rows.
    """
    counts = sizes.tolist()
    if sum(counts) != rows.shape[0]:
        raise ValueError(
            f"grouped_matmul: sizes={counts} add up to {sum(counts)}, but there are "
            f"{rows.shape[0]} rows"
        )
    # No expert is left out: one without rows multiplies an empty slice, and its weights get zeros.
    return torch.cat([x @ e for x, e in zip(rows.split(counts), w.unbind(0), strict=True)])


def grouped_mm_accepts(rows: Tensor, w: Tensor, sizes: Tensor) -> str:
    """Why :func:`grouped_mm` cannot run, or nothing."""
    del sizes
    if w.dtype != rows.dtype:
        return f"it multiplies rows and weights of one dtype, got {rows.dtype} and {w.dtype}"
    if w.shape[1] % 8 or w.shape[2] % 8:
        return f"rows of 16 bytes: [in, out]={list(w.shape[1:])} must be multiples of 8"
    return ""


def grouped_mm(
    rows: Float[Tensor, "R I"], w: Float[Tensor, "E I O"], sizes: Int[Tensor, "E"]
) -> Float[Tensor, "R O"]:
    """The CUDA library's grouped product; ``sizes`` stays on the device.

    Its own autograd, so that a frozen weight costs no gradient; it refuses expanded cotangents.
    """
    # The library reads where each expert's rows end as 32-bit integers.
    product = F.grouped_mm(rows.contiguous(), w, offs=sizes.cumsum(0, dtype=torch.int32))
    return _with_contiguous_cotangent(product)


def _identity_fwd(x: Tensor) -> tuple[Tensor, tuple[()]]:
    return x, ()


def _identity_bwd(residuals: tuple[()], ct: Tensor) -> tuple[Tensor]:
    # A sum hands its cotangent back expanded, with stride 0, which the library refuses.
    return (ct.contiguous(),)


_with_contiguous_cotangent = custom_vjp(_identity_fwd, _identity_bwd, name="grouped_mm")
