# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""What the kernels of attention share: rows of a head, products, and which keys a query sees."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["product", "rows_of", "sees"]


@triton.jit
def product(a, b, acc, WIDE: tl.constexpr):
    """``acc + a b`` in float32; WIDE: the interpreter cannot multiply bfloat16."""
    if WIDE:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rows_of(ptr, r, there, stride, N: tl.constexpr, PADDED: tl.constexpr):
    """Rows ``r`` of N numbers, of which ``there`` exist; 0 elsewhere."""
    d = tl.arange(0, PADDED)
    here = (r < there)[:, None] & (d < N)[None, :]
    return tl.load(ptr + r[:, None] * stride + d[None, :], mask=here, other=0.0)


@triton.jit
def sees(
    seen_ptr,
    key,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SETS: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):
    """Whether ROWS queries, whose masks begin at ``seen_ptr``, see the COLUMNS keys from ``key``.

    SETS: a mask is ``width`` words of 32 keys each, else the first key and one past the last.
    KEYS_FIRST: the result is [COLUMNS, ROWS], else [ROWS, COLUMNS].
    """
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    if SETS:
        at = seen_ptr + r * width + key // 32
        if KEYS_FIRST:
            words = tl.load(at)[None, :]
            for i in tl.static_range(1, COLUMNS // 32):
                words = tl.where((c // 32 == i)[:, None], tl.load(at + i)[None, :], words)
            bits = words >> (c % 32)[:, None]
        else:
            words = tl.load(at)[:, None]
            for i in tl.static_range(1, COLUMNS // 32):
                words = tl.where((c // 32 == i)[None, :], tl.load(at + i)[:, None], words)
            bits = words >> (c % 32)[None, :]
        seen = (bits & 1) != 0
    else:
        at = seen_ptr + r * 2
        if KEYS_FIRST:
            first = tl.load(at)[None, :] - key
            last = tl.load(at + 1)[None, :] - key
            seen = (c[:, None] >= first) & (c[:, None] < last)
        else:
            # loaded as columns: bishengir-compile 1.2.0 crashes on rows that become columns
            first = tl.load(at[:, None]) - key
            last = tl.load(at[:, None] + 1) - key
            seen = (c[None, :] >= first) & (c[None, :] < last)
    return seen
