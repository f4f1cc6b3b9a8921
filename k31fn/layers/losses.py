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

from k31fn.kernels.head_cross_entropy import head_cross_entropy
from k31fn.kernels.head_cross_entropy.reference import of_pieces, piece_widths
from k31fn.layers.linear import linear, scale_columns, use_products
from k31fn.parallel.axis import active
from k31fn.parallel.collectives import all_gather, axis_index, pmax, psum
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import LowRank, Quantized
from k31fn.precision import island
from k31fn.typing import Float, Int, Tensor

__all__ = ["IGNORED", "linear_cross_entropy", "mean"]


def __dir__() -> list[str]:
    return __all__


IGNORED = -100
"""The label of a token that is not trained: padding, a document's last token, an image."""


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
    logits_bytes: int = 0,
    z_loss: float = 0.0,
    sh: Sharding = UNSHARDED,
) -> _LossSum:
    """``sum_t [label_t valid] (logsumexp(hidden_t w) - hidden_t w[:, label_t])``.

    A dense head is multiplied by :mod:`k31fn.kernels.head_cross_entropy`, which bounds the logits
    that are alive. Other leaves are multiplied piece by piece of the vocabulary, by ``linear``.

    On a mesh a rank has some columns of the vocabulary, and all tokens of its slice of the context:
    two numbers per token are joined over the ranks.

    Args:
        hidden: the normed last hidden state, of this rank's tokens; its dtype is that of the
            products, the softmax is float32. Of a token without a label it is not read: it may be
            NaN.
        w_head: weight leaf ``[D, Z]``, this rank's columns.
        labels: of all tokens of the slice; in ``[0, Z)``, or :data:`IGNORED`. Any other value
            cannot be seen inside a transform and is undefined:
            :func:`k31fn.layers.embedding.check_tokens` checks a batch where it is made.
        logits_bytes: bound of the logits that are alive; 0: that of the implementation.
        z_loss: weight of ``logsumexp(hidden_t w)^2``, added for each token with a label.
        sh: sharding.

    Returns:
        Sum and count over the slice, equal on the ranks of ``sh.vocab``; without any valid label
        the sum and every gradient are exactly 0.
    """
    dtype = hidden.dtype
    num_columns = _num_columns(w_head)
    # Its gradient is a sum over the ranks' columns, taken in float32 as over pieces of them.
    hidden = all_gather(hidden, sh.sequence, 1, grad_dtype=island(dtype))
    valid = labels != IGNORED
    # Its cotangent is 0, but the weight's gradient has the product of both: 0 times NaN.
    hidden = torch.where(valid[..., None], hidden, 0)
    # A label outside of this rank's columns picks nothing.
    column = labels - axis_index(sh.vocab) * num_columns
    if isinstance(w_head, Tensor):
        lse, picked = head_cross_entropy(hidden, w_head, column, logits_bytes)
    else:
        widths = piece_widths(num_columns, labels.numel(), dtype, logits_bytes)
        pieces = _columns(w_head, widths) if len(widths) > 1 else [w_head]
        lse, picked = of_pieces(_logits, hidden, pieces, widths, column)
    if active(sh.vocab):
        # log-sum-exp over the ranks by hand; the greatest is a constant of the derivative, whose
        # value it does not change. Both sums travel together.
        top = pmax(lse, sh.vocab)
        total, picked = psum(torch.stack([torch.exp(lse - top), picked]), sh.vocab)
        lse = top + torch.log(total)
    token_losses = lse - picked
    if z_loss:
        token_losses = token_losses + z_loss * lse.square()
    return _LossSum(total=torch.where(valid, token_losses, 0).sum(), num_tokens=valid.sum())


def _logits(x: Tensor, w: Any) -> Tensor:
    # Logits are not to be rounded to the three bits of FP8, whatever the layers' products are.
    with use_products("exact"):
        return linear(x, w)


def mean(total: Float[Tensor, ""], denominator: Tensor | int | float) -> Float[Tensor, ""]:
    """``total / denominator``; 0, with zero gradient, where the denominator is 0."""
    denominator = torch.as_tensor(denominator, device=total.device)
    some = denominator != 0
    # Two `where`: the inner one keeps 0 / 0 out of the derivative, which the outer one cannot.
    return torch.where(some, total / torch.where(some, denominator, 1), 0)


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
