"""Plain torch form of what a fragment of a row does to the state: the scan of ``kda`` without
outputs.

The scan is affine in the state, so one run from ``[0 | I]``, V + K columns of which only the first
V read ``v``, ends in ``[S~ | M]``. As in ``kda`` a slab's backward is written by hand and starts
from the slab's inputs: nothing lives between forward and backward but the op's inputs and one ``[K
V+K]`` per slab and head.
"""

from __future__ import annotations

from typing import Any

import torch

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.kda.chunks import (
    SLAB,
    Masks,
    from_tiles,
    grad_of_decay,
    make_masks,
    operands,
    prepare,
    scan,
    scan_bwd,
    state_bwd,
)
from k31fn.kernels.kda.recurrence import TILE, KdaFragment
from k31fn.precision import island
from k31fn.typing import Float, Int, Tensor

__all__ = ["kda_fragment"]


def kda_fragment(
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    ids: Int[Tensor, "B T"],
) -> KdaFragment:
    """The chunked form; contract in :mod:`k31fn.kernels.kda`."""
    batch, length, heads, width = k.shape
    tile = max(1, min(TILE, length))
    masks = make_masks(ids, tile, island(v.dtype))
    identity = torch.eye(width, dtype=island(v.dtype), device=v.device)
    # [0 | I]: the columns of v, then those that end in the transition
    both = torch.nn.functional.pad(identity, (v.shape[-1], 0)).expand(batch, heads, -1, -1)
    tokens = zip(*(x.split(SLAB * tile, dim=1) for x in (k, v, g, beta)), strict=True)
    slabs = zip(*(m.split(SLAB) for m in masks), strict=True)
    for xs, mask in zip(tokens, slabs, strict=True):
        both = _slab(*xs, both, Masks(*mask))
    return KdaFragment(*both.split([v.shape[-1], width], dim=-1))


def _slab_fwd(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, masks: Masks
) -> tuple[Tensor, tuple[Any, ...]]:
    t = prepare((k,), v, g, beta, masks)
    return scan(t, operands(t, masks), state).last, (k, v, g, beta, state, masks)


def _slab_bwd(residuals: tuple[Any, ...], ct: Tensor) -> tuple[Tensor | None, ...]:
    k, v, g, beta, state, masks = residuals
    # prepared again: kept, a slab's tiles would be several times its inputs
    t = prepare((k,), v, g, beta, masks)
    m = operands(t, masks)
    run = scan(t, m, state)
    back = scan_bwd(t, m, ct)
    d = state_bwd(t, m, masks, run, back)
    d_beta = from_tiles(d.beta[..., None], beta[..., None])[..., 0]
    d_k = from_tiles(d.rows[0], k)
    d_v = from_tiles(d.v, v)
    return d_k, d_v, grad_of_decay(d.g, g), d_beta, back.last, None


_slab = custom_vjp(_slab_fwd, _slab_bwd, name="kda_fragment")
