# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""What the kernels of attention share: rows of a head, products, and which keys a query sees."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["chosen", "interval", "product", "rows_of"]


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
def interval(bounds_ptr, rows, r):
    """The first key that each row ``r`` sees and one past the last; 0 and 0 of a row of padding."""
    # loaded as columns: bishengir-compile 1.2.0 crashes on rows that become columns
    at = bounds_ptr + r[:, None]
    return tl.load(at), tl.load(at + rows)


@triton.jit
def chosen(words_ptr, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Bits of ROWS rows and COLUMNS columns; words of 32 columns of all rows lie together, those of
    the next 32 columns ``stride`` behind them.
    """
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    words = tl.load(words_ptr + r)[:, None]
    for i in tl.static_range(1, COLUMNS // 32):
        more = tl.load(words_ptr + i * stride + r)[:, None]
        words = tl.where((c // 32 == i)[None, :], more, words)
    bit = tl.full((COLUMNS,), 1, tl.int32) << (c % 32)
    return (words & bit[None, :]) != 0
