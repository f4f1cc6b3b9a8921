# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""What the kernels of KDA share: products, sums by a 0/1 matrix, gates, and who reads which
state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.kda_gates.reference import MOST_A_LOG

__all__ = [
    "inverse",
    "log2_decay",
    "opened",
    "product",
    "program_of",
    "rate_of",
    "readers",
    "row_of",
    "running",
    "store_parts",
    "sums",
]


_MOST_A_LOG = tl.constexpr(MOST_A_LOG)


@triton.jit
def product(a, b, acc):
    """``acc + a b`` with float32 sums."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def sums(mask, x, acc, HALF: tl.constexpr):
    """``acc + mask x`` for a 0/1 mask: a product, since not all backends have a cumulative sum.

    x is taken as two numbers of HALF: 22 bits of float16, 16 of bfloat16, which holds gradients of
    any size; where HALF is float32 as it is.
    """
    ones = mask.to(HALF)
    high = x.to(HALF)
    acc = tl.dot(ones, high, acc, input_precision="ieee")
    if tl.float32 != HALF:
        low = (x - high.to(tl.float32)).to(HALF)
        acc = tl.dot(ones, low, acc, input_precision="ieee")
    return acc


@triton.jit
def store_parts(to, x, step, PARTS: tl.constexpr, LOW: tl.constexpr):
    """``x`` in LOW, which is stored; PARTS 2: and what rounding left, ``step`` elements behind."""
    high = x.to(LOW)
    tl.store(to, high)
    if PARTS == 2:
        tl.store(to + step, (x - high.to(tl.float32)).to(LOW))
    return high


@triton.jit
def inverse(N, DOUBLINGS: tl.constexpr, HALF: tl.constexpr):
    """``(I + N)^-1`` of a strictly lower matrix with 2^(DOUBLINGS + 1) rows.

    Blocks of 2 are I - N; then blocks double. Every operand is the inverse of a part of I + N, so
    below 1 in size; powers of N are not where keys are alike.
    """
    I = tl.arange(0, N.shape[0])[:, None]
    J = tl.arange(0, N.shape[0])[None, :]
    T = tl.where(I == J, 1.0, 0.0) - tl.where(I // 2 == J // 2, N, 0.0)
    for s in tl.static_range(1, DOUBLINGS + 1):
        step = (I // (2 << s) == J // (2 << s)) & (I // (1 << s) > J // (1 << s))
        part = T.to(HALF)
        M = tl.where(step, N, 0.0).to(HALF)
        T -= tl.dot(
            part,
            tl.dot(M, part, input_precision="ieee").to(HALF),
            input_precision="ieee",
        )
    return T


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
def rate_of(A_log):
    """``exp(A_log)``, of at most ``MOST_A_LOG``, and whether it is above; a NaN stays one."""
    A_log = A_log.to(tl.float32)
    above = A_log > _MOST_A_LOG
    return tl.exp(tl.where(above, _MOST_A_LOG, A_log)), above


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
def program_of(tiles, blocks: tl.constexpr, PER: tl.constexpr):
    """Block, line and first tile of this program, where each of the blocks of a line has a program
    for PER of its tiles.
    """
    programs = tl.cdiv(tiles, PER)
    block = tl.program_id(0) % blocks
    start = tl.program_id(0) // blocks % programs * PER
    line = tl.program_id(0) // blocks // programs
    return block, line, start


@triton.jit
def row_of(line, ids_ptr, stop_ptr, tokens, H: tl.constexpr):
    """Row and head of a line; of the row where its ids begin, and how many tokens it has before its
    padding.
    """
    row = line // H
    h = line % H
    stop = tl.load(stop_ptr + row)
    return row, h, ids_ptr + row.to(tl.int64) * tokens, stop


@triton.jit
def readers(ids, t0, stop, C: tl.constexpr):
    """Of the tile at token t0: its tokens before the padding, and their documents; those of them
    that read the state that comes in, and that add to the one that leaves; and whether these are of
    one document.

    ``ids`` points at the row's first token, ``stop`` is how many tokens it has before its padding,
    which belongs to the document before it.
    """
    i = tl.arange(0, C)
    valid = t0 + i < stop
    came = tl.load(ids + tl.maximum(tl.minimum(t0, stop) - 1, 0))
    goes = tl.load(ids + tl.maximum(tl.minimum(t0 + C, stop) - 1, 0))
    doc = tl.load(ids + t0 + i, mask=valid, other=0)
    return valid, doc, (doc == came) & valid, (doc == goes) & valid, goes == came
