"""KDA token by token: the definition, slow, differentiable to any order.

Every other form is tested against it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from k31fn.precision import upcast
from k31fn.typing import Float, Int, Tensor

__all__ = ["MIN_LOG_DECAY", "TILE", "KdaFragment", "KdaOut", "recurrence"]

TILE = 16
"""Tokens whose decays are factored against each other; ``exp(-MIN_LOG_DECAY * TILE)`` is the
largest factor.
"""

MIN_LOG_DECAY = -5.0
"""The strongest forgetting per token that a tile of 16 holds in float32 and bfloat16."""


class KdaOut(NamedTuple):
    """Result of ``kda``: the output of each token and the state after the last one."""

    o: Float[Tensor, "B T H V"]
    state: Float[Tensor, "B H K V"]


class KdaFragment(NamedTuple):
    """Result of ``kda_fragment``: from a state S before the fragment it makes ``transition S +
    state``.
    """

    state: Float[Tensor, "B H K V"]
    transition: Float[Tensor, "B H K K"]


def recurrence(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    ids: Int[Tensor, "B T"],
    initial_state: Float[Tensor, "B H K V"] | tuple[()] = (),
) -> KdaOut:
    """``S_t = (I - beta k k^T) Diag(e^g) S_{t-1} + beta k v^T``, ``o_t = S_t^T q_t``; see
    :mod:`k31fn.kernels.kda`.
    """
    dtype = v.dtype
    q, k, v, g, beta = map(upcast, (q, k, v, g, beta))
    batch, length, heads, width = k.shape
    if isinstance(initial_state, tuple):
        state = v.new_zeros(batch, heads, width, v.shape[-1])
    else:
        state = upcast(initial_state)
    # the initial state belongs to the document that the row begins with
    document = ids[:, 0]
    outputs = []
    for t in range(length):
        valid = (ids[:, t] > 0)[:, None, None, None]
        same = (ids[:, t] == document)[:, None, None, None]
        # padding changes neither the document nor the state
        document = torch.where(ids[:, t] > 0, ids[:, t], document)
        decayed = torch.where(same, g[:, t].exp()[..., None] * state, 0)
        key = k[:, t][..., None]
        error = v[:, t][..., None, :] - (key * decayed).sum(-2, keepdim=True)
        state = torch.where(valid, decayed + beta[:, t][..., None, None] * key * error, state)
        outputs.append(torch.where(valid[..., 0], (q[:, t][..., None] * state).sum(-2), 0))
    return KdaOut(torch.stack(outputs, 1).to(dtype), state)
