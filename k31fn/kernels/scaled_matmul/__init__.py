"""Matrix products in FP8: ``scaled_matmul(a [M K], b [K N], scaling, b_blocks) -> [M N]``.

Both operands are rounded to E4M3 with scales along the contracted dimension K, multiplied, and
summed in float32::

    y[m, n] = sum_k sa[m, k] code(a)[m, k] sb[k, n] code(b)[k, n],    rounded once to the dtype of a

| scaling | scale of a | scale of b | sizes | |---|---|---|---| | ``rows`` | one per row | one per
column | K and N multiples of 16 | | ``blocks`` | one per row and 128 of K | one per column and 128
of K, or per 128 x 128 | multiples of 128 |

Operands are encoded by :mod:`k31fn.kernels.fp8_encode`: a scale is the smallest power of two with
which nothing saturates, so a code times its scale is exact in bfloat16. Scales per 128 x 128 are
those of ``b_blocks``, for weights: ``y`` and ``d a`` see the same numbers.

Gradients are those of the exact product, straight through the rounding, each computed in FP8 as
well, with scales along the dimension that it contracts: ``d a = scaled_matmul(ct, b^T)``, with
``b_blocks`` as before, and ``d b = scaled_matmul(a^T, ct)``, both operands by rows. All are E4M3:
with fine scales its third bit of mantissa is worth more than E5M2's range. What is kept for the
backward are the operands, not codes: those of ``d a`` and ``d b`` lie along another dimension than
those of ``y``, so a weight's codes would be one more copy, and what encoding it again from memory
costs over transposing its codes is a byte per number.

The reference multiplies the decoded operands in float32. ``scaled_mm`` is torch's on CUDA devices
of capability 9.0 and later; by blocks it needs CUDA 12.9, of whose library a product is tried, and
compared, before the first use.
"""

import torch

from k31fn.kernels.registry import Implementation, Op
from k31fn.kernels.scaled_matmul.library import accepts, missing, scaled_mm
from k31fn.kernels.scaled_matmul.reference import Scaling, refusal
from k31fn.kernels.scaled_matmul.reference import scaled_matmul as _scaled_matmul

__all__ = ["Scaling", "refusal", "scaled_matmul"]

scaled_matmul = Op("scaled_matmul", _scaled_matmul)
scaled_matmul.register(
    Implementation(
        "scaled_mm",
        ("cuda",),
        scaled_mm,
        accepts,
        dtypes=(torch.bfloat16,),
        no_vmap="torch.nn.functional.scaled_mm has no batching rule",
        missing=missing,
        calls=("fp8_encode",),
    )
)
