"""KDA in plain torch, chunk by chunk on a fixed grid.

The state passes from tile to tile as :mod:`k31fn.kernels.kda.chunks` has it; the outputs follow for
all tiles of a slab at once::

    O = R (Q*e^G) S + P Y

The diagonal of P is ``<q, k>``, free of G.

A slab is 128 tokens. Its backward is written by hand, starts from the slab's inputs and is plain
torch, so it can be differentiated again. Nothing lives between forward and backward but the op's
inputs and one state per slab.
"""

from __future__ import annotations

from typing import Any

import torch

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.kda.chunks import (
    SLAB,
    Masks,
    Tiles,
    accumulate,
    from_tiles,
    grad_of_decay,
    make_masks,
    operands,
    prepare,
    scan,
    scan_bwd,
    state_bwd,
    to_tiles,
)
from k31fn.kernels.kda.recurrence import TILE, KdaOut
from k31fn.precision import island, upcast
from k31fn.typing import Float, Int, Tensor

__all__ = ["kda"]


def kda(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    ids: Int[Tensor, "B T"],
    initial_state: Float[Tensor, "B H K V"] | tuple[()] = (),
    keep: str = "factors",
) -> KdaOut:
    """The chunked form; contract in :mod:`k31fn.kernels.kda`."""
    del keep
    batch, length, heads, width = k.shape
    tile = max(1, min(TILE, length))
    masks = make_masks(ids, tile, island(v.dtype))
    if isinstance(initial_state, tuple):
        state = torch.zeros(
            batch, heads, width, v.shape[-1], dtype=island(v.dtype), device=v.device
        )
    else:
        state = upcast(initial_state)
    tokens = zip(*(x.split(SLAB * tile, dim=1) for x in (q, k, v, g, beta)), strict=True)
    slabs = zip(*(m.split(SLAB) for m in masks), strict=True)
    outputs = []
    # slab by slab, each with a backward of its own: one state a slab is all that is kept between
    for xs, mask in zip(tokens, slabs, strict=True):
        o, state = _slab(*xs, state, Masks(*mask))
        outputs.append(o)
    return KdaOut(torch.cat(outputs, dim=1), state)


def _slab_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, masks: Masks
) -> tuple[tuple[Tensor, Tensor], tuple[Any, ...]]:
    t = prepare((k, q), v, g, beta, masks)
    q_read, p = _readers(t, masks)
    run = scan(t, operands(t, masks), state)
    o = accumulate(q_read @ run.states, p, run.y)
    return (from_tiles(o, v), run.last), (q, k, v, g, beta, state, masks)


def _slab_bwd(residuals: tuple[Any, ...], ct: tuple[Tensor, Tensor]) -> tuple[Tensor | None, ...]:
    q, k, v, g, beta, state, masks = residuals
    # prepared again: kept, a slab's tiles would be several times its inputs
    t = prepare((k, q), v, g, beta, masks)
    m = operands(t, masks)
    q_read, p = _readers(t, masks)
    run = scan(t, m, state)
    d_o = to_tiles(upcast(ct[0]), masks)
    # the outputs' own gradients of Y and S go into the adjoint scan as it passes their tile
    back = scan_bwd(t, m, ct[1], (p.mT @ d_o, q_read.mT @ d_o))
    d_p = d_o @ run.y.mT
    d = state_bwd(t, m, masks, run, back, (masks.enters * (d_o @ run.states.mT),), (d_p,))
    d_diagonal = (d_p.diagonal(dim1=-2, dim2=-1) * masks.valid)[..., None]
    tiled_k, tiled_q = t.kq.unbind(3)
    # the diagonal of P is <q, k> of one token, on which g has no effect
    d_k = torch.addcmul(d.rows[0], d_diagonal, tiled_q)
    d_q = torch.addcmul(d.rows[1], d_diagonal, tiled_k)
    d_beta = from_tiles(d.beta[..., None], beta[..., None])[..., 0]
    d_q, d_k, d_v = (from_tiles(x, like) for x, like in ((d_q, q), (d_k, k), (d.v, v)))
    return d_q, d_k, d_v, grad_of_decay(d.g, g), d_beta, back.last, None


def _readers(
    t: Tiles, masks: Masks
) -> tuple[Float[Tensor, "n B H C K"], Float[Tensor, "n B H C C"]]:
    """Factors by which the outputs read states and Y: R (Q*e^G) and P."""
    k, q = t.kq.unbind(3)
    eye = torch.eye(k.shape[3], dtype=k.dtype, device=k.device)
    p = torch.addcmul(t.products[:, :, :, 1], eye, ((q * k).sum(-1) * masks.valid)[..., None])
    return t.kq_decayed[:, :, :, k.shape[3] :] * masks.enters, p


_slab = custom_vjp(_slab_fwd, _slab_bwd, name="kda")
