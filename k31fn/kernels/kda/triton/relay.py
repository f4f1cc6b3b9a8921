# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false
"""States between the pieces of a row, from what each piece does to any state::

    S <- M S + S~      first piece first          dS <- M^T dS + dS~      last piece first

The only chain that is as long as there are pieces, and the only products of whole transitions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.kda.triton.shared import product

__all__ = ["kda_relay"]


@triton.jit
def kda_relay(
    transition_ptr,
    state_ptr,
    steps,
    transition_step,
    state_step,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    BACK: tl.constexpr,
    PARTS: tl.constexpr,
    LOW: tl.constexpr,
):
    """BLOCK of the WIDE columns of one head's states, held transposed as the scans do.

    ``state [steps + 1, K, WIDE]`` begins with what is handed on (BACK: ends with it) and gets the
    rest in place; the first ADDED columns of each hold S~ before. ``transition [steps, PARTS, K,
    K]``: in bfloat16 each number is two, and so is the state, so that one handed on has 16 bits.
    ``transition_step`` and ``state_step``: elements from one head to the next.
    """
    column = (tl.program_id(0) % (WIDE // BLOCK)) * BLOCK
    line = (tl.program_id(0) // (WIDE // BLOCK)).to(tl.int64)
    x = column + tl.arange(0, BLOCK)
    # halves of a state, since a whole transition is more than a core of Ascend holds
    SIZE: tl.constexpr = K // 2 if K > 64 else K
    c = tl.arange(0, SIZE)
    upper = c[None, :] * WIDE + x[:, None]
    lower = upper + SIZE * WIDE
    state_ptr += line * state_step
    transition_ptr += line * transition_step
    begin = 0
    if BACK:
        begin = steps
    S = tl.load(state_ptr + begin * (K * WIDE) + upper)
    # where a state is one part it has no last one; and a second name of S would not be carried
    S_last = tl.zeros([BLOCK, SIZE], tl.float32)
    if SIZE < K:
        S_last = tl.load(state_ptr + begin * (K * WIDE) + lower)
    for step in tl.range(0, steps, num_stages=STAGES):
        if BACK:
            n = steps - 1 - step
            to = n
        else:
            n = step
            to = step + 1
        M = transition_ptr + n * (PARTS * K * K)
        made = state_ptr + to * (K * WIDE)
        first = tl.where(column < ADDED, tl.load(made + upper), 0.0)
        first = _times(S, M, 0, 0, first, K, SIZE, BACK, PARTS, LOW)
        if SIZE < K:
            last = tl.where(column < ADDED, tl.load(made + lower), 0.0)
            first = _times(S_last, M, 1, 0, first, K, SIZE, BACK, PARTS, LOW)
            last = _times(S, M, 0, 1, last, K, SIZE, BACK, PARTS, LOW)
            S_last = _times(S_last, M, 1, 1, last, K, SIZE, BACK, PARTS, LOW)
            tl.store(made + lower, S_last)
        S = first
        tl.store(made + upper, S)


@triton.jit
def _times(
    S,
    M,
    of: tl.constexpr,
    to: tl.constexpr,
    acc,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BACK: tl.constexpr,
    PARTS: tl.constexpr,
    LOW: tl.constexpr,
):
    """``acc + S^T M^T`` (BACK: ``S^T M``) of part ``of`` of the state, for its part ``to``."""
    c = tl.arange(0, SIZE)
    square = c[:, None] * K + c[None, :]
    if BACK:
        square += of * SIZE * K + to * SIZE
    else:
        square += to * SIZE * K + of * SIZE
    whole = tl.load(M + square)
    if not BACK:
        whole = tl.trans(whole)
    if PARTS == 1:
        acc = product(S, whole, acc)
    else:
        rest = tl.load(M + K * K + square)
        if not BACK:
            rest = tl.trans(rest)
        high = S.to(LOW)
        acc = product((S - high.to(tl.float32)).to(LOW), whole, acc)
        acc = product(high, rest, acc)
        acc = product(high, whole, acc)
    return acc
