"""Gated DeltaNet in plain torch, chunk by chunk on a fixed grid of tiles of 64 tokens.

With E_ij the decay of the tokens behind j up to i, which are of one document, and G that of a
token's document from the tile's first token on, in exponents::

    L, P = E * K K^T, E * Q K^T                                       strictly lower; lower
    A    = (I + diag(beta) L)^-1 diag(beta)
    W, U = A R (e^G K), A V   R keeps the rows of the document that the incoming state S is of
    Y    = U - W S            S' = d S + (F K)^T Y            O = R (e^G Q) S + P Y

``F_j`` is the decay behind token j to the tile's end for the document that goes on, ``d`` that of
the whole tile. All tiles of a slab are prepared at once; only the state passes from tile to tile.

A slab keeps its inputs and is computed again in the backward: nothing lives between the two but the
op's inputs and one state per slab. S may have more columns than V: those are carried only, which
gives the transition.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from k31fn.autodiff.remat import remat
from k31fn.kernels.kda.chunks import Masks, from_tiles, make_masks, to_tiles
from k31fn.kernels.kda.recurrence import KdaFragment, KdaOut
from k31fn.precision import island, upcast
from k31fn.typing import Float, Int, Tensor

__all__ = ["gdn", "gdn_fragment"]

_TILE = 64  # no decay is factored, so its length is a matter of speed alone
_SLAB = 8  # tiles that are prepared at once


def gdn(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"],
    beta: Float[Tensor, "B T H"],
    ids: Int[Tensor, "B T"],
    initial_state: Float[Tensor, "B H K V"] | tuple[()] = (),
) -> KdaOut:
    """The chunked form; contract in :mod:`k31fn.kernels.gdn`."""
    batch, _, heads, width = k.shape
    if isinstance(initial_state, tuple):
        shape = (batch, heads, width, v.shape[-1])
        state = torch.zeros(shape, dtype=island(v.dtype), device=v.device)
    else:
        state = upcast(initial_state)
    outputs = []
    for masks, xs in _slabs(ids, (q, k, v, g, beta)):
        o, state = _with_outputs(*xs, state, masks)
        outputs.append(o)
    return KdaOut(torch.cat(outputs, dim=1), state)


def gdn_fragment(
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"],
    beta: Float[Tensor, "B T H"],
    ids: Int[Tensor, "B T"],
) -> KdaFragment:
    """The scan from ``[0 | I]``, of whose V + K columns only the first V read ``v``; contract in
    :mod:`k31fn.kernels.gdn`.
    """
    batch, _, heads, width = k.shape
    columns = v.shape[-1]
    identity = torch.eye(width, dtype=island(v.dtype), device=v.device)
    both = torch.nn.functional.pad(identity, (columns, 0)).expand(batch, heads, -1, -1)
    for masks, xs in _slabs(ids, (k, v, g, beta)):
        both = _state_alone(*xs, both, masks)
    return KdaFragment(*both.split([columns, width], dim=-1))


def _slabs(
    ids: Int[Tensor, "B T"], inputs: tuple[Tensor, ...]
) -> Iterator[tuple[Masks, tuple[Tensor, ...]]]:
    tile = max(1, min(_TILE, ids.shape[1]))
    masks = make_masks(ids, tile, island(inputs[0].dtype))
    tokens = zip(*(x.split(_SLAB * tile, dim=1) for x in inputs), strict=True)
    for mask, xs in zip(zip(*(m.split(_SLAB) for m in masks), strict=True), tokens, strict=True):
        yield Masks(*mask), xs


class _Tiles(NamedTuple):
    """What a slab has before any state is known; n tiles of C tokens."""

    k: Float[Tensor, "n B H C K"]
    between: Float[Tensor, "n B H C C"]  # E, lower with its diagonal, within documents
    reads: Float[Tensor, "n B H C 1"]  # R e^G
    w: Float[Tensor, "n B H C K"]
    u: Float[Tensor, "n B H C V"]
    out: Float[Tensor, "n B H C K"]  # F K
    whole: Float[Tensor, "n B H 1 1"]  # d


def _prepare(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, masks: Masks) -> _Tiles:
    k, v, g, beta = (to_tiles(upcast(x), masks) for x in (k, v, g[..., None], beta[..., None]))
    beta = beta * masks.valid[..., None]
    tile = k.shape[3]
    behind = torch.ones(tile, tile, dtype=k.dtype, device=k.device).tril(-1)
    # [i, j] sums the g behind j and up to i, in i's document. Not G_i - G_j: after a hard decay two
    # large sums would cancel, and so would their gradients.
    between = (masks.prefix @ (g * behind)).exp() * (masks.prefix * masks.valid[..., None])
    reads = (masks.prefix @ g).exp() * masks.enters
    low = (between * (k @ k.mT)).tril(-1) * beta
    # by substitution: powers of L would add up terms that cancel where keys are alike
    both = torch.linalg.solve_triangular(
        low, beta * torch.cat([reads * k, v], dim=-1), upper=False, unitriangular=True
    )
    w, u = both.split([k.shape[-1], v.shape[-1]], dim=-1)
    out = (masks.suffix @ g).exp() * masks.leaves * k
    whole = (masks.whole * g).sum(-2, keepdim=True).exp() * masks.keep[..., None]
    return _Tiles(k, between, reads, w, u, out, whole)


def _scan(
    t: _Tiles, s: Float[Tensor, "B H K columns"]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The state that comes into each tile, Y of each, and the state after the last."""
    u = torch.nn.functional.pad(t.u, (0, s.shape[-1] - t.u.shape[-1]))
    states: list[Tensor] = []
    ys: list[Tensor] = []
    # unbind: the gradient of n indexings would cost n^2
    for u_i, w_i, out_i, d_i in zip(*(x.unbind(0) for x in (u, t.w, t.out, t.whole)), strict=True):
        states.append(s)
        ys.append(u_i - w_i @ s)
        s = d_i * s + out_i.mT @ ys[-1]
    return states, ys, s


def _slab(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, masks: Masks
) -> tuple[Tensor, Tensor]:
    """Outputs of a slab, and the state after it."""
    t = _prepare(k, v, g, beta, masks)
    states, ys, last = _scan(t, state)
    tiled_q = to_tiles(upcast(q), masks)
    p = t.between * (tiled_q @ t.k.mT)
    o = (t.reads * tiled_q) @ torch.stack(states) + p @ torch.stack(ys)
    return from_tiles(o, v), last


def _slab_state(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, masks: Masks
) -> Tensor:
    """The state after a slab."""
    return _scan(_prepare(k, v, g, beta, masks), state)[2]


_with_outputs = remat(_slab)
_state_alone = remat(_slab_state)
