"""The head's statistics in plain torch, piece by piece of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from k31fn.autodiff.remat import remat
from k31fn.autodiff.weight_grads import weight_product
from k31fn.kernels.cross_entropy import cross_entropy
from k31fn.kernels.cross_entropy.reference import Statistics
from k31fn.precision import island, upcast
from k31fn.typing import Float, Int, Tensor

__all__ = ["head_cross_entropy", "of_pieces", "piece_widths"]

_LOGITS_BYTES = 256 * 2**20  # about four tensors of this size live at the peak


def head_cross_entropy(
    hidden: Float[Tensor, "*rows D"],
    w: Float[Tensor, "D Z"],
    labels: Int[Tensor, "*rows"],
    logits_bytes: int = 0,
) -> Statistics:
    """``lse`` and ``picked`` of the logits ``hidden @ w``; contract in
    :mod:`k31fn.kernels.head_cross_entropy`.

    With one piece its log-softmax is kept for the backward. With more, the backward computes each
    piece's logits again; the weight gradient of a piece is one product over all tokens, and that of
    ``hidden`` is summed in float32.
    """
    widths = piece_widths(w.shape[-1], labels.numel(), hidden.dtype, logits_bytes)
    # split, whose transpose is one cat, without padding; of one piece it would be a copy
    pieces = w.split(widths, -1) if len(widths) > 1 else (w,)
    return of_pieces(_product, hidden, pieces, widths, labels)


def _product(x: Tensor, w: Tensor) -> Tensor:
    # Its weight gradient may be put off. Cast here: a remat then keeps w and not its narrow copy.
    return weight_product(torch.matmul, x, w.to(x.dtype))


def piece_widths(
    num_columns: int, num_tokens: int, dtype: torch.dtype, logits_bytes: int = 0
) -> list[int]:
    """As few widths as keep the float32 logits of a piece within the bound; they differ by at most
    one and add up to ``num_columns``.
    """
    bound = logits_bytes or _LOGITS_BYTES
    most = max(1, bound // max(1, num_tokens * island(dtype).itemsize))
    pieces = -(-num_columns // most)
    return [num_columns // pieces + (i < num_columns % pieces) for i in range(pieces)]


def of_pieces(
    product: Callable[[Tensor, Any], Tensor],
    hidden: Float[Tensor, "*rows D"],
    pieces: Sequence[Any],
    widths: Sequence[int],
    labels: Int[Tensor, "*rows"],
) -> Statistics:
    """Statistics of the logits ``product(hidden, piece)`` of all pieces, which have these
    widths.
    """
    dtype = hidden.dtype

    def statistics(x: Tensor, w: Any, piece_labels: Tensor) -> Statistics:
        return cross_entropy(product(x.to(dtype), w), piece_labels)

    if len(pieces) == 1:
        return statistics(hidden, pieces[0], labels)
    # Wide outside of the pieces and narrow inside: the pieces' gradients are added in float32.
    wide = upcast(hidden)
    start = 0
    parts: list[Statistics] = []
    for width, w in zip(widths, pieces, strict=True):
        # remat: else the logits of all pieces would live on to the backward together. A label
        # outside of a piece picks nothing.
        parts.append(remat(statistics)(wide, w, labels - start))
        start += width
    return Statistics(
        lse=torch.logsumexp(torch.stack([part.lse for part in parts]), 0),
        picked=torch.stack([part.picked for part in parts]).sum(0),
    )
