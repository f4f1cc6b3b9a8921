"""FP8 operands of a product: ``fp8_encode(x [R K], scaling) -> Codes(codes [R K], scales)``.

Each group of numbers is divided by its scale and rounded to E4M3, to the nearest, ties to even::

    code(x)[r, k] = e4m3(x[r, k] / scale[group of r, k])

| scaling | a group | scales | sizes |
|---|---|---|---|
| ``rows`` | a row | ``[R, 1]`` | any |
| ``blocks`` | 128 of a row | ``[R, K / 128]`` | K a multiple of 128 |
| ``tiles`` | 128 x 128 | ``[R / 128, K / 128]`` | both multiples of 128 |

A scale is the smallest power of two, at least 2^-126, with which the group's largest number is at
most 448, so that division is exact; a group of zeros has 2^-126. A group with NaN or infinity is
NaN as a whole (of either sign) and has the scale 1, so that what is computed from it is NaN too:
casts of infinity to E4M3 saturate in some versions of torch.

Codes are contiguous, in ``torch.float8_e4m3fn``; scales are float32 (float64 of float64), in any
order of memory. All implementations give the same bits. No gradient: codes are made inside rules
that have their own (:mod:`k31fn.kernels.scaled_matmul`).

The ``triton`` kernels read ``x`` where it lies, contiguous or the transpose of a contiguous matrix,
once, and write the codes once. Only ``rows`` of a transpose are read twice, and rows too long to
hold, then from the cache. The scales of ``blocks`` lie with the rows innermost, as products in
CUDA's library want them.
"""

import torch

from k31fn.kernels.fp8_encode.reference import E4M3, Codes, Groups
from k31fn.kernels.fp8_encode.reference import fp8_encode as _fp8_encode
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op

__all__ = ["E4M3", "Codes", "Groups", "fp8_encode"]

_TRITON = "k31fn.kernels.fp8_encode.triton"
fp8_encode = Op("fp8_encode", _fp8_encode, differentiable=False)
fp8_encode.register(
    Implementation(
        "triton",
        ("cuda", "npu"),
        lazily(_TRITON, "fp8_encode"),
        dtypes=(torch.bfloat16, torch.float32),
        on_request=ON_REQUEST,
        no_vmap="its kernels take one matrix",
        missing=missing_triton,
        kernels=_TRITON,
    )
)
