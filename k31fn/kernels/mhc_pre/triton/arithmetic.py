# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Arithmetic of the kernels of the read of hyper-connected streams: numbers cut in parts, sigmoid,
softmax, and Sinkhorn's iterations.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["back", "cut", "forth", "sigmoid", "softmax"]


@triton.jit
def cut(a):
    """The first 8 bits of a's mantissa as bfloat16, and the rest of a; the third rest is 0."""
    # cut and not rounded: the rest is exact, and has the sign of a
    bits = (a.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
    first = bits.to(tl.bfloat16, bitcast=True)
    return first, a - first.to(tl.float32)


@triton.jit
def sigmoid(a):
    """``1 / (1 + exp(-a))``, of any a."""
    # of a magnitude that is not positive: exp never overflows
    e = tl.exp(-tl.abs(a))
    return tl.where(a >= 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def softmax(a):
    """Softmax over the last of three dims."""
    e = tl.exp(a - tl.max(a, axis=2)[:, :, None])
    return e / tl.sum(e, axis=2)[:, :, None]


@triton.jit
def forth(m, EPS: tl.constexpr):
    """An iteration of Sinkhorn, and the sums by which it divided."""
    # the sums are kept and not the matrices: with them back() recovers each matrix
    rows = tl.sum(m, axis=2) + EPS
    m = m * (1.0 / rows)[:, :, None]
    columns = tl.sum(m, axis=1) + EPS
    return m * (1.0 / columns)[:, None, :], rows, columns


@triton.jit
def back(m, d_m, rows, columns):
    """An iteration undone, and its transpose."""
    # d(m / s) with s the sum itself: the gradient less its mean under m, over s; columns first,
    # since they were divided last
    d_m = (d_m - tl.sum(d_m * m, axis=1)[:, None, :]) * (1.0 / columns)[:, None, :]
    m = m * columns[:, None, :]
    d_m = (d_m - tl.sum(d_m * m, axis=2)[:, :, None]) * (1.0 / rows)[:, :, None]
    return m * rows[:, :, None], d_m
