"""Newton-Schulz: the orthogonal factor of matrices by products alone."""

from __future__ import annotations

import torch

from k31fn import precision
from k31fn.typing import Float, Tensor

__all__ = ["orthogonalize", "working_dtype"]

# Jordan's: the steepest slope at 0 for which five steps still end near 1. They do not converge; an
# update needs no singular values closer to each other than that.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_WIDENED = 2**24  # elements that are divided at once


def orthogonalize(
    x: Float[Tensor, "... rows columns"], *, steps: int = 5, dtype: torch.dtype | None = None
) -> Float[Tensor, "... rows columns"]:
    """About ``U V^T`` of ``x = U S V^T``: nonzero singular values end between 0.68 and 1.14.

    Those below some 1e-3 of the Frobenius norm stay smaller. Newton-Schulz: ``X <- a X + (b A + c A
    A) X`` with ``A = X X^T``, from X of norm 1 with the smaller side as rows. A zero matrix stays
    zero.

    Args:
        x: matrices.
        steps: of the iteration.
        dtype: in which ``x`` is taken and iterated. None: that of ``x``, but for float32 on other
            devices than the CPU (where bfloat16 is slow) bfloat16.
    """
    a, b, c = _COEFFICIENTS
    y = x.to(working_dtype(x.dtype, x.device, dtype))
    # In float32 at least: a bfloat16 sum of a million squares would be wrong by percents.
    norm = torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True, dtype=precision.island(y.dtype))
    y = _divided(y, norm.clamp(min=1e-7))
    # The smaller side as rows: A is the smaller of the two products that would do.
    tall = x.shape[-2] > x.shape[-1]
    y = (y.mT if tall else y).reshape(-1, *sorted(x.shape[-2:]))
    for _ in range(steps):
        A = torch.bmm(y, y.mT)
        y = torch.baddbmm(y, torch.baddbmm(A, A, A, beta=b, alpha=c), y, beta=a)
    y = (y.mT if tall else y).reshape(x.shape)
    return y.to(x.dtype)


def _divided(y: Tensor, norm: Tensor) -> Tensor:
    """``y / norm`` in the dtype of ``y``, widened a slice of rows at a time."""
    rows = max(1, _WIDENED * y.shape[-2] // max(1, y.numel()))
    parts = [(part / norm).to(y.dtype) for part in y.split(rows, dim=-2)]
    return torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0]


def working_dtype(
    dtype: torch.dtype, device: torch.device, asked: torch.dtype | None
) -> torch.dtype:
    """In which matrices of ``dtype`` are iterated (:func:`orthogonalize`)."""
    if asked is not None:
        return asked
    # Tensor cores are what Newton-Schulz is for; a float64 run stays float64.
    if dtype == torch.float32 and device.type not in ("cpu", "meta"):
        return torch.bfloat16
    return dtype
