"""The algebra of KDA on a fixed grid of tiles, shared by the outputs (``reference``) and the relay
(``fragment``).

Each row is cut into tiles of 16 tokens wherever its documents begin. With G the running sum of g
inside the token's document and tile, all tiles of a slab are prepared at once (the WY form of arXiv
2510.26692)::

    [L; P] = [K*e^G; Q*e^G] (K*e^-G)^T  strictly lower, inside documents;
                                             P only where outputs are asked for
    A      = (I + diag(beta) L)^-1 diag(beta)
    W, U   = A R (K*e^G), A V  R keeps the rows of the document that the incoming state S belongs to

and only the state passes from tile to tile::

    Y = U - W S        S' = Diag(d) S + (K*F)^T Y

``F_j`` is the decay from token j to the tile's end for the document that goes on, ``d`` that of the
whole tile. The gradient of F goes to the g behind token j alone, so no two large equal terms cancel
in the gradient of g, which stays good to float32's own rounding at the hardest decay.

S may have more columns than V: those of U are zero there, so what they begin with is only carried
on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from k31fn.kernels.kda.recurrence import MIN_LOG_DECAY
from k31fn.precision import upcast
from k31fn.typing import Bool, Float, Int, Tensor

__all__ = [
    "SLAB",
    "Masks",
    "Tiles",
    "accumulate",
    "from_tiles",
    "grad_of_decay",
    "make_masks",
    "operands",
    "prepare",
    "scan",
    "scan_bwd",
    "state_bwd",
    "to_tiles",
]

SLAB = 8
"""Tiles that are prepared at once, and whose backward starts again from their inputs."""


class Masks(NamedTuple):
    """Who sees whom; n tiles of C tokens, 1 stands for all heads. Floats are 0 or 1."""

    prefix: Float[Tensor, "n B 1 C C"]  # G = prefix @ g
    suffix: Float[Tensor, "n B 1 C C"]  # log F = suffix @ g
    whole: Float[Tensor, "n B 1 C 1"]  # log d = the sum of whole * g
    strict: Bool[Tensor, "n B 1 1 C C"]  # strictly earlier token of the same document
    valid: Float[Tensor, "n B 1 C"]
    enters: Float[Tensor, "n B 1 C 1"]  # the token reads the incoming state
    leaves: Float[Tensor, "n B 1 C 1"]  # the token writes the outgoing state
    keep: Float[Tensor, "n B 1 1"]  # the incoming state survives the tile


class Tiles(NamedTuple):
    """Parts of a slab before any state is known. ``rows``: k, and q where outputs are asked
    for.
    """

    kq: Float[Tensor, "n B H rows C K"]
    v: Float[Tensor, "n B H C V"]
    beta: Float[Tensor, "n B H C"]
    decay: Float[Tensor, "n B H C K"]  # e^G
    grow: Float[Tensor, "n B H C K"]  # e^-G
    to_end: Float[Tensor, "n B H C K"]  # F
    whole: Float[Tensor, "n B H K 1"]  # d
    kq_decayed: Float[Tensor, "n B H rows_C K"]  # K*e^G, Q*e^G
    products: Float[Tensor, "n B H rows C C"]  # L, P
    inverse: Float[Tensor, "n B H C C"]  # (I + diag(beta) L)^-1


class _Operands(NamedTuple):
    """Factors of the recurrence."""

    a: Float[Tensor, "n B H C C"]
    a_read: Float[Tensor, "n B H C C"]  # A R
    k: Float[Tensor, "n B H C K"]  # K*e^G
    w: Float[Tensor, "n B H C K"]
    out: Float[Tensor, "n B H C K"]  # K*F


class _Scan(NamedTuple):
    """Result of a scan: the state that comes into each tile, Y, and the state that leaves the last
    tile.
    """

    states: Float[Tensor, "n B H K V"]
    y: Float[Tensor, "n B H C V"]
    last: Float[Tensor, "B H K V"]


def make_masks(ids: Int[Tensor, "B T"], tile: int, dtype: torch.dtype) -> Masks:
    """Masks of every tile; padding, that of the grid included, counts to the document before it but
    is not valid.
    """
    # no tokens at all are one tile of padding
    ids = torch.nn.functional.pad(ids, (0, -ids.shape[1] % tile if ids.shape[1] else tile))
    # padding counts to the document before it, so that the state goes on to the end of the row
    document = _as_tiles(ids.cummax(dim=1).values, tile)
    valid = _as_tiles(ids != 0, tile)
    last = document[..., -1:]
    incoming = torch.cat([document[:1, ..., :1], last[:-1]])
    earlier = torch.ones(tile, tile, dtype=torch.bool, device=ids.device).tril()
    same = (document[..., :, None] == document[..., None, :]) & valid[..., None, :]
    leaves = document == last
    keep = incoming == last
    return Masks(
        prefix=(same & earlier).to(dtype),
        suffix=(same & ~earlier & leaves[..., None]).to(dtype),
        whole=(keep & valid)[..., None].to(dtype),
        strict=(same & earlier.tril(-1) & valid[..., None])[:, :, :, None],
        valid=valid.to(dtype),
        enters=((document == incoming) & valid)[..., None].to(dtype),
        leaves=(leaves & valid)[..., None].to(dtype),
        keep=keep.to(dtype),
    )


def _as_tiles(x: Tensor, tile: int) -> Tensor:
    """``[B T]`` as ``[n B 1 C]``."""
    # not -1, which torch cannot tell where there is no row
    return x.unflatten(1, (x.shape[1] // tile, tile)).transpose(0, 1)[:, :, None]


def to_tiles(x: Float[Tensor, "B T H K"], masks: Masks) -> Float[Tensor, "n B H C K"]:
    """The tokens of a slab as tiles, zeros after the last."""
    n, _, _, tile = masks.valid.shape
    short = n * tile - x.shape[1]
    if short:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, short))
    return x.unflatten(1, (n, tile)).permute(1, 0, 3, 2, 4)


def from_tiles(
    x: Float[Tensor, "n B H C K"], like: Float[Tensor, "B T H K"]
) -> Float[Tensor, "B T H K"]:
    """The inverse of :func:`to_tiles`, in the dtype of ``like``."""
    return x.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : like.shape[1]].to(like.dtype)


def grad_of_decay(
    d_g: Float[Tensor, "n B H C K"], g: Float[Tensor, "B T H K"]
) -> Float[Tensor, "B T H K"]:
    """The gradient of g, zero where :func:`prepare` took a bound in its place."""
    return torch.where(g >= MIN_LOG_DECAY, from_tiles(d_g, g), 0)


def prepare(rows: tuple[Tensor, ...], v: Tensor, g: Tensor, beta: Tensor, masks: Masks) -> Tiles:
    """Everything that does not depend on the state, for all tiles at once; ``rows`` is ``(k,)`` or
    ``(k, q)``.
    """
    v, g, *tiled = (to_tiles(upcast(x), masks) for x in (v, g, *rows))
    g = g.clamp(min=MIN_LOG_DECAY)  # beyond it e^-G may overflow
    beta = to_tiles(upcast(beta)[..., None], masks)[..., 0] * masks.valid
    tile = v.shape[3]
    kq = torch.stack(tiled, dim=3)
    # a product with 0 and 1 and not a cumulative sum: it begins anew at each document, and under
    # vmap each sample has its own documents
    total = masks.prefix @ g
    decay = total.exp()
    grow = (-total).exp()  # at most e^(5 x 16), which float32 and bfloat16 hold
    kq_decayed = (kq * decay[:, :, :, None]).flatten(3, 4)
    products = (kq_decayed @ (kq[:, :, :, 0] * grow).mT).unflatten(3, (len(rows), tile))
    # where and not a factor 0: across documents the decays do not cancel, and 0 times infinity is
    # NaN
    products = torch.where(masks.strict, products, 0)
    low = products[:, :, :, 0] * beta[..., None]
    eye = torch.eye(tile, dtype=g.dtype, device=g.device).expand_as(low)
    # by substitution: a Neumann series of powers of L would add up terms that cancel
    inverse = torch.linalg.solve_triangular(low, eye, upper=False, unitriangular=True)
    at_end = decay[..., -1:, :]
    to_end = grow * (masks.leaves * at_end)
    whole = masks.keep[..., None] * at_end.mT
    return Tiles(
        kq, v.contiguous(), beta, decay, grow, to_end, whole, kq_decayed, products, inverse
    )


def operands(t: Tiles, masks: Masks) -> _Operands:
    """The factors that the scan multiplies with."""
    k = t.kq_decayed[:, :, :, : t.v.shape[3]]
    a = t.inverse * t.beta[..., None, :]
    a_read = a * masks.enters.mT
    return _Operands(a, a_read, k, a_read @ k, t.kq[:, :, :, 0] * t.to_end)


def scan(t: Tiles, m: _Operands, state: Float[Tensor, "B H K V"]) -> _Scan:
    """``Y = U - W S; S <- d S + (K*F)^T Y``, tile after tile."""
    u = m.a @ t.v
    more = state.shape[-1] - u.shape[-1]
    if more:  # columns that carry the transition; no value is written to them
        u = torch.nn.functional.pad(u, (0, more))
    heads = state.shape[:2]
    s = state.flatten(0, 1)
    states, ys = [], []
    for d_i, w_i, out_i, u_i in zip(*map(_each, (t.whole, m.w, m.out.mT, u)), strict=True):
        states.append(s)
        ys.append(torch.baddbmm(u_i, w_i, s, alpha=-1))
        s = torch.addcmul(out_i @ ys[-1], d_i, s)
    return _Scan(_joined(states, heads), _joined(ys, heads), s.unflatten(0, heads))


def scan_bwd(
    t: Tiles,
    m: _Operands,
    d_state: Float[Tensor, "B H K V"],
    from_outputs: tuple[Tensor, Tensor] | tuple[()] = (),
) -> _Scan:
    """The adjoint: ``dU = dY + (K*F) dS; dS <- d dS - W^T dU + (dS from the outputs)``, last tile
    first.

    In the result ``y`` is dU and ``states`` are the gradients of the states that leave the tiles.
    ``from_outputs`` are dY and dS as the outputs give them; ``()``: there are none.
    """
    heads = d_state.shape[:2]
    s = d_state.flatten(0, 1)
    states, d_us = [], []
    tiles = zip(*map(_each, (t.whole, m.w.mT, m.out, *from_outputs)), strict=True)
    for d_i, w_i, out_i, *more in reversed(list(tiles)):
        states.append(s)
        d_us.append(torch.baddbmm(more[0], out_i, s) if more else out_i @ s)
        s = torch.addcmul(more[1], d_i, s) if more else d_i * s
        s = torch.baddbmm(s, w_i, d_us[-1], alpha=-1)
    return _Scan(_joined(states[::-1], heads), _joined(d_us[::-1], heads), s.unflatten(0, heads))


def _each(x: Float[Tensor, "n B H *rest"]) -> tuple[Float[Tensor, "BH *rest"], ...]:
    """The tiles, batch and heads folded. ``unbind``: the gradient of n indexings would cost n^2."""
    return x.flatten(1, 2).unbind(0)


def _joined(tiles: list[Tensor], heads: torch.Size) -> Float[Tensor, "n B H *rest"]:
    return torch.stack(tiles).unflatten(1, heads)


class _TileGradients(NamedTuple):
    """Gradients of what :func:`prepare` was given, tiled."""

    rows: list[Tensor]
    v: Float[Tensor, "n B H C V"]
    g: Float[Tensor, "n B H C K"]
    beta: Float[Tensor, "n B H C"]


def state_bwd(
    t: Tiles,
    m: _Operands,
    masks: Masks,
    run: _Scan,
    back: _Scan,
    d_q_decayed: tuple[Tensor, ...] = (),
    d_p: tuple[Tensor, ...] = (),
) -> _TileGradients:
    """Gradients of k, v, g and beta from a scan and its adjoint.

    ``d_q_decayed`` and ``d_p``: those of Q*e^G and of P, one each where there are outputs.
    """
    minus_d_w = back.y @ run.states.mT
    d_u = back.y[..., : t.v.shape[-1]]
    d_kq = torch.cat([-m.a_read.mT @ minus_d_w, *d_q_decayed], dim=3)
    d_a = d_u @ t.v.mT - (minus_d_w @ m.k.mT) * masks.enters.mT
    strict = masks.strict[:, :, :, 0]
    rows = t.kq.shape[3]
    # d(X^-1) = -X^-1 dX X^-1: the inverse is known, nothing is solved again
    minus_d_low = t.inverse.mT @ (d_a * t.beta[..., None, :]) @ t.inverse.mT * strict
    d_beta = (
        (d_a * t.inverse).sum(-2) - (minus_d_low * t.products[:, :, :, 0]).sum(-1)
    ) * masks.valid
    d_products = torch.cat([-t.beta[..., None] * minus_d_low, *(p * strict for p in d_p)], dim=3)
    k = t.kq[:, :, :, 0]
    d_kq = (
        accumulate(d_kq, d_products, k * t.grow).unflatten(3, (rows, -1)) * t.decay[:, :, :, None]
    )
    d_k_grow = (d_products.mT @ t.kq_decayed) * t.grow
    d_k_out = (run.y @ back.states.mT) * t.to_end
    d_whole = (back.states * run.states).sum(-1) * t.whole[..., 0]
    # each gradient of a sum of g goes to the g that the sum has, by the mask transposed
    d_g = masks.whole * d_whole[..., None, :]
    for sums, d_sum in (
        (masks.suffix, d_k_out * k),
        (masks.prefix, (d_kq * t.kq).sum(3) - d_k_grow * k),
    ):
        d_g = accumulate(d_g, sums.mT.expand_as(t.inverse), d_sum)
    d_k, *d_q = d_kq.unbind(3)
    return _TileGradients([d_k + d_k_grow + d_k_out, *d_q], m.a.mT @ d_u, d_g, d_beta)


def accumulate(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``x + a b`` over the leading dims n B H."""
    # one operation: a product and a sum would write the product first
    flat = torch.baddbmm(x.flatten(0, 2), a.flatten(0, 2), b.flatten(0, 2))
    return flat.unflatten(0, x.shape[:3])
