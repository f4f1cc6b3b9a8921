# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The decays of a tile, which are one number per token."""

from __future__ import annotations

import triton
import triton.language as tl

from k31fn.kernels.kda.triton.shared import log2_decay, sums

__all__ = ["decays"]


@triton.jit
def decays(g, same, C: tl.constexpr, HALF: tl.constexpr):
    """Decays between the tokens of a tile, from its first token to each, from each to its last, and
    of all; each in documents, by ``same``: whether two tokens are of one.

    [i, j] of the first is that of the tokens behind j and up to i, 0 where j is later.
    """
    i = tl.arange(0, C)
    I = i[:, None]
    J = i[None, :]
    # e^-128 is 0 in float32: what is below changes nothing, and float16 would not hold it
    g = log2_decay(g, -128.0)
    upto = same & (I >= J)
    # not a difference of running sums: behind a hard decay two large ones would cancel
    between = sums(upto, tl.where(I > J, g[:, None], 0.0), tl.zeros([C, C], tl.float32), HALF)
    between = tl.where(upto, tl.exp2(between), 0.0)
    to_token = tl.exp2(tl.sum(tl.where(upto, g[None, :], 0.0), 1))
    to_end = tl.exp2(tl.sum(tl.where(same & (I < J), g[None, :], 0.0), 1))
    return between, to_token, to_end, tl.exp2(tl.sum(g, 0))
