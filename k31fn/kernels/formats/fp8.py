"""FP8: numbers of 8 bits, E4M3 (up to 448) or E5M2 (up to 57344), with one scale per block of a
matrix.

A scale is a power of two, the smallest with which the block's largest number does not saturate: so
decoding is exact in bfloat16 and wider, and encoding again changes no number. A block of zeros has
the scale 2^-126, float32's smallest.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import UInt8

from k31fn._functorch import reinterpret
from k31fn.kernels.formats.powers import LARGEST, SMALLEST, power_of_two
from k31fn.precision import island, upcast
from k31fn.typing import Float, Tensor

__all__ = ["BLOCK", "block_size", "decode", "encode", "scale_of"]

BLOCK = 128  # rows and columns that share a scale, at most


def block_size(dim: int) -> int:
    """The largest divisor of a dimension that is at most 128."""
    return max(n for n in range(1, min(dim, BLOCK) + 1) if dim % n == 0)


def encode(
    w: Float[Tensor, "*E R C"], block: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[UInt8[Tensor, "*E R C"], Float[Tensor, "*E GR GC"]]:
    """``(codes, scales)``: bytes, and a scale in float32 per block of so many rows and columns.

    Raises:
        ValueError: the blocks do not divide the matrix.
    """
    rows, columns = block
    if w.shape[-2] % rows or w.shape[-1] % columns:
        raise ValueError(
            f"FP8: blocks of {rows} x {columns} do not divide a matrix {list(w.shape)}"
        )
    # [... GR rows GC columns]
    blocks = upcast(w).unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    scales = scale_of(blocks.abs().amax((-3, -1)), dtype)
    codes = (blocks / scales[..., :, None, :, None]).to(dtype)
    return reinterpret(codes, torch.uint8).flatten(-2).flatten(-3, -2), scales.to(torch.float32)


def decode(
    codes: UInt8[Tensor, "*E R C"],
    scales: Float[Tensor, "*E GR GC"],
    dtype: torch.dtype,
    stored: torch.dtype = torch.float8_e4m3fn,
) -> Float[Tensor, "*E R C"]:
    """The matrix, exactly.

    Raises:
        ValueError: the scales do not divide it into equal blocks.
    """
    rows, columns = map(math.gcd, codes.shape[-2:], scales.shape[-2:])
    if (rows, columns) != tuple(scales.shape[-2:]) or codes.shape[:-2] != scales.shape[:-2]:
        raise ValueError(
            f"FP8: scales {list(scales.shape)} do not divide codes {list(codes.shape)} into equal "
            "blocks"
        )
    values = reinterpret(codes, stored).to(dtype)
    blocks = values.unflatten(-1, (columns, -1)).unflatten(-3, (rows, -1))
    return (blocks * scales.to(dtype)[..., :, None, :, None]).flatten(-2).flatten(-3, -2)


def scale_of(largest: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """The smallest power of two, at least 2^-126, by which numbers up to ``largest`` fit into
    ``dtype``; 1 for 0.
    """
    # a mantissa in [0.5, 1) times 2^exponent; exact, which a logarithm near a power of two is not
    mantissa, exponent = torch.frexp(upcast(largest) / torch.finfo(dtype).max)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(SMALLEST, LARGEST)
    return power_of_two(exponent, island(largest.dtype))
