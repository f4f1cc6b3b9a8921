"""The language-model loss: cross-entropy through the head, with the full logits never alive.

Losses come as plain sums over tokens. The denominator (the valid tokens of the whole step, over all
micro-batches and ranks) is counted from the batch beforehand and applied by the caller, so a loss
and its gradient depend neither on how the step is cut nor on how documents are packed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from k31fn.autodiff.remat import remat
from k31fn.kernels.cross_entropy import cross_entropy
from k31fn.kernels.cross_entropy.reference import Statistics
from k31fn.layers.linear import linear, scale_columns, use_products
from k31fn.parallel.axis import active
from k31fn.parallel.collectives import all_gather, axis_index, pmax, psum
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import LowRank, Quantized
from k31fn.precision import island, upcast
from k31fn.typing import Float, Int, Tensor

__all__ = ["IGNORED", "LOGITS_BYTES", "linear_cross_entropy", "mean"]

IGNORED = -100
"""The label of a token that is not trained: padding, a document's last token, an image."""

LOGITS_BYTES = 256 * 2**20
"""What the float32 logits of one piece of the vocabulary may take; about four such tensors live at
the peak.
"""


class _LossSum(NamedTuple):
    """Sum of the token losses (float32, float64 in a float64 run) and number of tokens with a
    label.
    """

    total: Tensor
    num_tokens: Tensor


def linear_cross_entropy(
    hidden: Float[Tensor, "B T D"],
    w_head: Any,
    labels: Int[Tensor, "B S"],
    *,
    logits_bytes: int = LOGITS_BYTES,
    sh: Sharding = UNSHARDED,
) -> _LossSum:
    """``sum_t [label_t valid] (logsumexp(hidden_t w) - hidden_t w[:, label_t])``.

    The vocabulary is cut into as few pieces of equal width as keep one piece's logits within
    ``logits_bytes``. With one piece its log-softmax is kept for the backward. With more, the
    backward computes each piece's logits again; the weight gradient of a piece is one product over
    all tokens, and that of ``hidden`` is summed in float32.

    On a mesh a rank has some columns of the vocabulary, and all tokens of its slice of the context:
    two numbers per token are joined over the ranks.

    Args:
        hidden: the normed last hidden state, of this rank's tokens; its dtype is that of the
            products, the softmax is float32.
        w_head: weight leaf ``[D, Z]``, this rank's columns.
        labels: of all tokens of the slice; in ``[0, Z)``, or :data:`IGNORED`. Any other value
            cannot be seen inside a transform and is undefined:
            :func:`k31fn.layers.embedding.check_tokens` checks a batch where it is made.
        logits_bytes: bound of one piece.
        sh: sharding.

    Returns:
        Sum and count over the slice, equal on the ranks of ``sh.vocab``; without any valid label
        the sum and every gradient are exactly 0.
    """
    dtype = hidden.dtype
    num_columns = _num_columns(w_head)
    # Its gradient is a sum over the ranks' columns, taken in float32 as over the pieces below.
    hidden = all_gather(hidden, sh.sequence, 1, grad_dtype=island(dtype))
    widths = _piece_widths(num_columns, labels.numel(), island(dtype).itemsize, logits_bytes)
    # A label outside of this rank's columns, or of a piece, picks nothing.
    column = labels - axis_index(sh.vocab) * num_columns

    def statistics(x: Tensor, w: Any, piece_labels: Tensor) -> Statistics:
        # Logits are not to be rounded to the three bits of FP8, whatever the layers' products are.
        with use_products("exact"):
            return cross_entropy(linear(x.to(dtype), w), piece_labels)

    if len(widths) == 1:
        lse, picked = statistics(hidden, w_head, column)
    else:
        # Wide outside of the pieces and narrow inside: the pieces' gradients are added in float32.
        wide = upcast(hidden)
        start = 0
        parts: list[Statistics] = []
        for width, w in zip(widths, _columns(w_head, widths), strict=True):
            # remat: else the logits of all pieces would live on to the backward together.
            parts.append(remat(statistics)(wide, w, column - start))
            start += width
        lse = torch.logsumexp(torch.stack([part.lse for part in parts]), 0)
        picked = torch.stack([part.picked for part in parts]).sum(0)
    if active(sh.vocab):
        # log-sum-exp over the ranks by hand; the greatest is a constant of the derivative, whose
        # value it does not change. Both sums travel together.
        top = pmax(lse, sh.vocab)
        total, picked = psum(torch.stack([torch.exp(lse - top), picked]), sh.vocab)
        lse = top + torch.log(total)
    valid = labels != IGNORED
    return _LossSum(total=torch.where(valid, lse - picked, 0).sum(), num_tokens=valid.sum())


def mean(total: Float[Tensor, ""], denominator: Tensor | int | float) -> Float[Tensor, ""]:
    """``total / denominator``; 0, with zero gradient, where the denominator is 0."""
    denominator = torch.as_tensor(denominator, device=total.device)
    some = denominator != 0
    # Two `where`: the inner one keeps 0 / 0 out of the derivative, which the outer one cannot.
    return torch.where(some, total / torch.where(some, denominator, 1), 0)


def _piece_widths(num_columns: int, num_tokens: int, itemsize: int, logits_bytes: int) -> list[int]:
    """As few widths as the bound allows; they differ by at most one and add up to
    ``num_columns``.
    """
    most = max(1, logits_bytes // max(1, num_tokens * itemsize))
    pieces = -(-num_columns // most)
    return [num_columns // pieces + (i < num_columns % pieces) for i in range(pieces)]


def _num_columns(w: Any) -> int:
    if isinstance(w, LowRank):
        return w.b.shape[-1]
    return (w.codes if isinstance(w, Quantized) else w).shape[-1]


def _columns(w: Any, widths: Sequence[int]) -> list[Any]:
    """The weight leaf cut along its output dim; ``split`` because its transpose is one ``cat``,
    without padding.
    """
    if isinstance(w, LowRank):
        pairs = zip(_columns(w.base, widths), w.b.split(widths, -1), strict=True)
        return [dataclasses.replace(w, base=base, b=b) for base, b in pairs]
    if isinstance(w, Quantized):
        # A piece may end inside a block of codes.
        w = scale_columns(w)
        pairs = zip(w.codes.split(widths, -1), w.scales.split(widths, -1), strict=True)
        return [dataclasses.replace(w, codes=codes, scales=scales) for codes, scales in pairs]
    return list(w.split(widths, -1))
