"""KDA in plain torch, chunk by chunk on a fixed grid.

Each row is cut into tiles of 16 tokens wherever its documents begin. With G the running sum of g inside the token's
document and tile, all tiles of a slab are prepared at once (the WY form of arXiv 2510.26692)::

    [L; P] = [K*e^G; Q*e^G] (K*e^-G)^T       L strictly lower, P lower, both inside documents
    A      = (I + diag(beta) L)^-1 diag(beta)
    W, U   = A R (K*e^G), A V                R keeps the rows of the document that the incoming state S belongs to

only the state passes from tile to tile, and the outputs follow for all tiles at once::

    Y = U - W S        S' = Diag(d) S + (K*F)^T Y        O = R (Q*e^G) S + P Y

``F_j`` is the decay from token j to the tile's end for the document that goes on, ``d`` that of the whole tile. The
diagonal of P is ``<q, k>``, free of G, and the gradient of F goes to the g behind token j alone. So no two large equal
terms cancel in the gradient of g, which stays good to float32's own rounding at the hardest decay.

A slab is 128 tokens. Its backward is written by hand, starts from the slab's inputs and is plain torch, so it can be
differentiated again. Nothing lives between forward and backward but the op's inputs and one state per slab.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from k31fn.autodiff import custom_vjp
from k31fn.kernels.kda.recurrence import TILE, KdaOut, recurrence
from k31fn.precision import island, upcast
from k31fn.typing import Bool, Float, Int, Tensor

__all__ = ["kda", "recurrence"]

_SLAB = 8  # tiles


class _Masks(NamedTuple):
    """Who sees whom; n tiles of C tokens, 1 stands for all heads. Floats are 0 or 1."""

    prefix: Float[Tensor, "n B 1 C C"]  # G = prefix @ g
    suffix: Float[Tensor, "n B 1 C C"]  # log F = suffix @ g
    whole: Float[Tensor, "n B 1 C 1"]  # log d = the sum of whole * g
    strict: Bool[Tensor, "n B 1 1 C C"]  # strictly earlier token of the same document
    valid: Float[Tensor, "n B 1 C"]
    enters: Float[Tensor, "n B 1 C 1"]  # the token reads the incoming state
    leaves: Float[Tensor, "n B 1 C 1"]  # the token writes the outgoing state
    keep: Float[Tensor, "n B 1 1"]  # the incoming state survives the tile


class _Tiles(NamedTuple):
    """What a slab is made of before any state is known."""

    kq: Float[Tensor, "n B H 2 C K"]  # k, q
    v: Float[Tensor, "n B H C V"]
    beta: Float[Tensor, "n B H C"]
    decay: Float[Tensor, "n B H C K"]  # e^G
    grow: Float[Tensor, "n B H C K"]  # e^-G
    to_end: Float[Tensor, "n B H C K"]  # F
    whole: Float[Tensor, "n B H K 1"]  # d
    kq_decayed: Float[Tensor, "n B H 2C K"]  # K*e^G, Q*e^G
    low: Float[Tensor, "n B H C C"]  # L
    p: Float[Tensor, "n B H C C"]
    inverse: Float[Tensor, "n B H C C"]  # (I + diag(beta) L)^-1


def kda(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    ids: Int[Tensor, "B T"],
    initial_state: Float[Tensor, "B H K V"] | tuple[()] = (),
) -> KdaOut:
    """The chunked form; contract in :mod:`k31fn.kernels.kda`."""
    batch, length, heads, width = k.shape
    tile = min(TILE, length)
    masks = _masks(ids, tile, island(v.dtype))
    if isinstance(initial_state, tuple):
        state = torch.zeros(batch, heads, width, v.shape[-1], dtype=island(v.dtype), device=v.device)
    else:
        state = upcast(initial_state)
    tokens = zip(*(x.split(_SLAB * tile, dim=1) for x in (q, k, v, g, beta)), strict=True)
    slabs = zip(*(m.split(_SLAB) for m in masks), strict=True)
    outputs = []
    for xs, mask in zip(tokens, slabs, strict=True):
        o, state = _slab(*xs, state, _Masks(*mask))
        outputs.append(o)
    return KdaOut(torch.cat(outputs, dim=1), state)


def _masks(ids: Int[Tensor, "B T"], tile: int, dtype: torch.dtype) -> _Masks:
    """Masks of every tile; padding, that of the grid included, counts to the document before it but is not valid."""
    batch, length = ids.shape
    ids = torch.nn.functional.pad(ids, (0, -length % tile))
    padding, document = ids == 0, ids.cummax(dim=1).values
    valid, document = (x.reshape(batch, -1, tile).transpose(0, 1)[:, :, None] for x in (~padding, document))
    last = document[..., -1:]
    incoming = torch.cat([document[:1, ..., :1], last[:-1]])
    earlier = torch.ones(tile, tile, dtype=torch.bool, device=ids.device).tril()
    same = (document[..., :, None] == document[..., None, :]) & valid[..., None, :]
    leaves, keep = document == last, incoming == last
    return _Masks(
        prefix=(same & earlier).to(dtype),
        suffix=(same & ~earlier & leaves[..., None]).to(dtype),
        whole=(keep & valid)[..., None].to(dtype),
        strict=(same & earlier.tril(-1) & valid[..., None])[:, :, :, None],
        valid=valid.to(dtype),
        enters=((document == incoming) & valid)[..., None].to(dtype),
        leaves=(leaves & valid)[..., None].to(dtype),
        keep=keep.to(dtype),
    )


def _to_tiles(x: Float[Tensor, "B T H K"], masks: _Masks) -> Float[Tensor, "n B H C K"]:
    n, _, _, tile = masks.valid.shape
    if short := n * tile - x.shape[1]:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, short))
    return x.unflatten(1, (n, tile)).permute(1, 0, 3, 2, 4)


def _from_tiles(x: Float[Tensor, "n B H C K"], like: Float[Tensor, "B T H K"]) -> Float[Tensor, "B T H K"]:
    return x.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : like.shape[1]].to(like.dtype)


def _prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, masks: _Masks) -> _Tiles:
    """Everything that does not depend on the state, for all tiles at once."""
    k, q, v, g = (_to_tiles(upcast(x), masks) for x in (k, q, v, g))
    beta = _to_tiles(upcast(beta)[..., None], masks)[..., 0] * masks.valid
    tile = v.shape[3]
    kq = torch.stack([k, q], dim=3)
    k, q = kq.unbind(3)
    total = masks.prefix @ g
    decay, grow = total.exp(), (-total).exp()
    kq_decayed = (kq * decay[:, :, :, None]).flatten(3, 4)
    products = (kq_decayed @ (k * grow).mT).unflatten(3, (2, tile))
    low, p = torch.where(masks.strict, products, 0).unbind(3)
    eye = torch.eye(tile, dtype=g.dtype, device=g.device)
    p = torch.addcmul(p, eye, ((q * k).sum(-1) * masks.valid)[..., None])
    inverse = torch.linalg.solve_triangular(low * beta[..., None], eye.expand_as(low), upper=False, unitriangular=True)
    at_end = decay[..., -1:, :]
    to_end = grow * (masks.leaves * at_end)
    whole = masks.keep[..., None] * at_end.mT
    return _Tiles(kq, v.contiguous(), beta, decay, grow, to_end, whole, kq_decayed, low, p, inverse)


class _Operands(NamedTuple):
    """Factors of the recurrence and of the outputs."""

    a: Float[Tensor, "n B H C C"]
    a_read: Float[Tensor, "n B H C C"]  # A R
    k: Float[Tensor, "n B H C K"]  # K*e^G
    w: Float[Tensor, "n B H C K"]
    q: Float[Tensor, "n B H C K"]  # R (Q*e^G)
    out: Float[Tensor, "n B H C K"]  # K*F


def _operands(t: _Tiles, masks: _Masks) -> _Operands:
    k, q = t.kq_decayed.unflatten(3, (2, -1)).unbind(3)
    a = t.inverse * t.beta[..., None, :]
    a_read = a * masks.enters.mT
    return _Operands(a, a_read, k, a_read @ k, q * masks.enters, t.kq[:, :, :, 0] * t.to_end)


class _Run(NamedTuple):
    """Result of a scan: the state that comes into each tile, Y, and the state that leaves the last tile."""

    states: Float[Tensor, "n B H K V"]
    y: Float[Tensor, "n B H C V"]
    last: Float[Tensor, "B H K V"]


def _scan(decay: Tensor, w: Tensor, out: Tensor, u: Tensor, state: Tensor) -> _Run:
    """``Y = U - W S; S <- d S + (K*F)^T Y``, tile after tile."""
    heads, s, states, ys = state.shape[:2], state.flatten(0, 1), [], []
    for d_i, w_i, out_i, u_i in zip(*map(_each, (decay, w, out.mT, u)), strict=True):
        states.append(s)
        ys.append(torch.baddbmm(u_i, w_i, s, alpha=-1))
        s = torch.addcmul(out_i @ ys[-1], d_i, s)
    return _Run(_joined(states, heads), _joined(ys, heads), s.unflatten(0, heads))


def _scan_bwd(decay: Tensor, w: Tensor, out: Tensor, d_y: Tensor, d_s: Tensor, d_state: Tensor) -> _Run:
    """The adjoint: ``dU = dY + (K*F) dS; dS <- d dS - W^T dU + (dS from the outputs)``, last tile first.

    In the result ``y`` is dU and ``states`` are the gradients of the states that leave the tiles.
    """
    heads, s, states, d_us = d_state.shape[:2], d_state.flatten(0, 1), [], []
    tiles = list(zip(*map(_each, (decay, w.mT, out, d_y, d_s)), strict=True))
    for d_i, w_i, out_i, d_y_i, d_s_i in reversed(tiles):
        states.append(s)
        d_us.append(torch.baddbmm(d_y_i, out_i, s))
        s = torch.baddbmm(torch.addcmul(d_s_i, d_i, s), w_i, d_us[-1], alpha=-1)
    return _Run(_joined(states[::-1], heads), _joined(d_us[::-1], heads), s.unflatten(0, heads))


def _each(x: Float[Tensor, "n B H *rest"]) -> tuple[Float[Tensor, "BH *rest"], ...]:
    """The tiles, batch and heads folded. ``unbind``: the gradient of n indexings would cost n^2."""
    return x.flatten(1, 2).unbind(0)


def _joined(tiles: list[Tensor], heads: torch.Size) -> Float[Tensor, "n B H *rest"]:
    return torch.stack(tiles).unflatten(1, heads)


def _slab_value(*args: Any) -> tuple[Tensor, Tensor]:
    """Outputs and state of one slab."""
    return _slab_fwd(*args)[0]


def _slab_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, masks: _Masks
) -> tuple[tuple[Tensor, Tensor], tuple[Any, ...]]:
    t = _prepare(q, k, v, g, beta, masks)
    m = _operands(t, masks)
    run = _scan(t.whole, m.w, m.out, m.a @ t.v, state)
    o = _accumulate(m.q @ run.states, t.p, run.y)
    return (_from_tiles(o, v), run.last), (q, k, v, g, beta, state, masks)


def _slab_bwd(residuals: tuple[Any, ...], ct: tuple[Tensor, Tensor]) -> tuple[Tensor | None, ...]:
    q, k, v, g, beta, state, masks = residuals
    t = _prepare(q, k, v, g, beta, masks)
    m = _operands(t, masks)
    run = _scan(t.whole, m.w, m.out, m.a @ t.v, state)
    d_o = _to_tiles(upcast(ct[0]), masks)
    back = _scan_bwd(t.whole, m.w, m.out, t.p.mT @ d_o, m.q.mT @ d_o, ct[1])
    d_u, minus_d_w = back.y, back.y @ run.states.mT
    d_k, d_q, d_g, d_beta = _prepare_bwd(
        t,
        masks,
        d_kq=torch.cat([-m.a_read.mT @ minus_d_w, masks.enters * (d_o @ run.states.mT)], dim=3),
        d_a=d_u @ t.v.mT - (minus_d_w @ m.k.mT) * masks.enters.mT,
        d_p=d_o @ run.y.mT,
        d_out=run.y @ back.states.mT,
        d_whole=(back.states * run.states).sum(-1) * t.whole[..., 0],
    )
    d_beta = _from_tiles(d_beta[..., None], beta[..., None])[..., 0]
    grads = [_from_tiles(x, like) for x, like in ((d_q, q), (d_k, k), (m.a.mT @ d_u, v), (d_g, g))]
    return *grads, d_beta, back.last, None


def _prepare_bwd(
    t: _Tiles, masks: _Masks, d_kq: Tensor, d_a: Tensor, d_p: Tensor, d_out: Tensor, d_whole: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From the gradients of [K*e^G; Q*e^G], A, P, K*F and log d to those of k, q, g and beta."""
    k, q = t.kq.unbind(3)
    d_diagonal = (d_p.diagonal(dim1=-2, dim2=-1) * masks.valid)[..., None]
    strict = masks.strict[:, :, :, 0]
    minus_d_low = t.inverse.mT @ (d_a * t.beta[..., None, :]) @ t.inverse.mT * strict
    d_beta = ((d_a * t.inverse).sum(-2) - (minus_d_low * t.low).sum(-1)) * masks.valid
    d_products = torch.cat([-t.beta[..., None] * minus_d_low, d_p * strict], dim=3)
    d_kq = _accumulate(d_kq, d_products, k * t.grow).unflatten(3, (2, -1)) * t.decay[:, :, :, None]
    d_k_grow = (d_products.mT @ t.kq_decayed) * t.grow
    d_k_out = d_out * t.to_end
    d_g = masks.whole * d_whole[..., None, :]
    for sums, d_sum in ((masks.suffix, d_k_out * k), (masks.prefix, (d_kq * t.kq).sum(3) - d_k_grow * k)):
        d_g = _accumulate(d_g, sums.mT.expand_as(t.low), d_sum)
    d_k, d_q = d_kq.unbind(3)
    d_k = torch.addcmul(d_k, d_diagonal, q) + d_k_grow + d_k_out
    return d_k, torch.addcmul(d_q, d_diagonal, k), d_g, d_beta


def _accumulate(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``x + a b`` over the leading dims n B H."""
    return torch.baddbmm(*(y.flatten(0, 2) for y in (x, a, b))).unflatten(0, x.shape[:3])


_slab = custom_vjp(_slab_value, name="kda").defvjp(_slab_fwd, _slab_bwd)
