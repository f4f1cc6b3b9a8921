# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""What the kernels of KDA share: products, sums by a 0/1 matrix, gates, and who reads which
state.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["documents", "log2_decay", "opened", "product", "running", "sums"]


@triton.jit
def product(a, b, acc):
    """``acc + a b`` with float32 sums."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def sums(mask, x, acc, HALF: tl.constexpr):
    """``acc + mask x`` for a 0/1 mask: a product, since not all backends have a cumulative sum.

    x is taken as two float16 numbers, 22 bits; where HALF is bfloat16 as one, which is enough for
    gradients, that are products of such; where it is float32 as it is.
    """
    ones = mask.to(HALF)
    high = x.to(HALF)
    acc = tl.dot(ones, high, acc, input_precision="ieee")
    if tl.float16 == HALF:
        low = (x - high.to(tl.float32)).to(HALF)
        acc = tl.dot(ones, low, acc, input_precision="ieee")
    return acc


@triton.jit
def log2_decay(g, LEAST: tl.constexpr):
    """Log-decays to base 2, none stronger than LEAST; a NaN stays one, a maximum would hide it."""
    return tl.where(g < LEAST, LEAST, g) * 1.4426950408889634


@triton.jit
def opened(x):
    """``sigmoid(x)`` and ``1 - sigmoid(x)``, each to its own last bit; a NaN stays one."""
    x *= -1.4426950408889634
    e = tl.exp2(tl.where(x > 126.0, 126.0, x))
    s = 1.0 / (1.0 + e)
    return s, e * s


@triton.jit
def running(g, C: tl.constexpr, HALF: tl.constexpr):
    """Of the log-decays of a tile: the sum up to each token, behind it, and of all."""
    i = tl.arange(0, C)
    none = tl.zeros(g.shape, tl.float32)
    G = sums(i[:, None] >= i[None, :], g, none, HALF)
    total = tl.sum(g, 0)
    if tl.float32 == HALF:
        behind = sums(i[:, None] < i[None, :], g, none, HALF)
    else:  # a difference of two sums is good to 2^-17, enough for bfloat16 and one product less
        behind = total[None, :] - G
    return G, behind, total


@triton.jit
def documents(ids, t0, stop, C: tl.constexpr):
    """The documents of the state that comes into the tile at token t0 and of the one that leaves.

    ``ids`` points at the row's first token, ``stop`` is how many tokens it has before its padding,
    which belongs to the document before it.
    """
    came = tl.load(ids + tl.maximum(tl.minimum(t0, stop) - 1, 0))
    goes = tl.load(ids + tl.maximum(tl.minimum(t0 + C, stop) - 1, 0))
    return came, goes
