"""Context parallelism: what a rank needs of the tokens before its slice.

Rank r holds the r-th contiguous slice of every row. A document may begin on an earlier rank;
``position``, the index of a token in its document, says how far back it reaches: the d-th token
before the slice is in the document of the slice's first token iff ``position[:, 0] >= d``. No
hidden state of another rank is needed: a short convolution takes :func:`left_halo`, a linear
recurrence :func:`relay`.
"""

from __future__ import annotations

import torch

from k31fn.parallel.axis import Axes
from k31fn.parallel.collectives import all_gather, axis_index, axis_size, ppermute
from k31fn.segments import Segments
from k31fn.typing import Float, Int, Tensor

__all__ = ["left_halo", "relay", "whole_slice"]


def whole_slice(
    batch: int, length: int, context: Axes, *, device: torch.device | str | None = None
) -> Segments:
    """This rank's ``length`` tokens of rows that are one document each, without padding."""
    position = torch.arange(length, device=device) + axis_index(context) * length
    return Segments(torch.ones_like(position).expand(batch, -1), position.expand(batch, -1))


def left_halo(
    tail: Float[Tensor, "B N channels"], count: int, position: Int[Tensor, "B T"], context: Axes
) -> Float[Tensor, "B count channels"]:
    """The ``count`` tokens before this rank's slice, oldest first; zero where they are not of its
    first document.

    Args:
        tail: the last ``count`` tokens of this rank's slice, or the whole slice where it is
            shorter.
        count: tokens that a token sees before itself.
        position: of this rank's tokens.
        context: the ranks.

    Raises:
        ValueError: the slice is shorter than ``count``: a token would need more than one rank to
            its left.
    """
    if tail.shape[1] < count:
        raise ValueError(
            f"mesh.cp={axis_size(context)}: a slice of {tail.shape[1]} tokens is shorter than the "
            f"{count} that the next rank needs of it; rows of at least "
            f"{axis_size(context) * count} tokens or fewer ranks would fit"
        )
    # No wrap-around: rank 0 has nobody before it, and is no target, so it gets zeros.
    before = ppermute(tail, context, [(i, i + 1) for i in range(axis_size(context) - 1)])
    distance = torch.arange(count, 0, -1, device=tail.device)
    return torch.where((position[:, :1] >= distance)[..., None], before, 0)


def relay(
    state: Float[Tensor, "B H K V"],
    transition: Float[Tensor, "B H K K"],
    position: Int[Tensor, "B T"],
    context: Axes,
) -> Float[Tensor, "B H K V"]:
    """The state of a recurrence before this rank's slice, when the slice of rank j maps S to ``M_j
    S + S~_j``::

        S <- M_j S + S~_j      over the ranks j < r in order, from 0

    It is 0 where this rank's first token begins a document. One gather of all pairs, in their
    dtype; the fold is local. Source: KCP, section 5.1.2 of the Kimi K3 report, arXiv 2607.24653.
    Differentiable to any order.

    Args:
        state: S~, what this rank's tokens make of 0.
        transition: M, for a state of the document of this rank's first token: 0 if another begins
            inside the slice.
        position: of this rank's tokens; padding has 0.
        context: the ranks.
    """
    continues = (position[:, 0] > 0)[:, None, None, None]
    # State and transition side by side: one collective, and one latency, for both.
    pair = torch.cat([state, torch.where(continues, transition, 0)], dim=-1)
    # added to a number of the device: a copy of the index to it would make the host wait
    rank = torch.zeros((), dtype=torch.int64, device=state.device) + axis_index(context)
    folded = torch.zeros_like(state)
    # Every rank folds all pairs and selects by its index: in the simulated mesh no rank can run
    # fewer steps than another. The last pair comes before nobody.
    for j, other in enumerate(all_gather(pair[None], context)[:-1].unbind(0)):
        s, m = other.split([state.shape[-1], transition.shape[-1]], dim=-1)
        folded = torch.where(j < rank, m @ folded + s if j else s, folded)
    return torch.where(continues, folded, 0)
