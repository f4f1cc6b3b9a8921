# pyright: reportMissingImports=false
"""``kda_fragment`` by the kernels of ``kda``: V + K columns through a row, of which the last K
begin as an identity and end as the transition.

Forward: the row's pieces each from [0 | I], segment by segment, then one relay over all of them.
Between forward and backward live the inputs, and for each piece its transition and the columns
before it. The backward begins with the relay of the gradients, which are linear in those of the
results, so that every piece is then on its own. Numbers and order as in :mod:`~.op`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.kda.recurrence import TILE, KdaFragment
from k31fn.kernels.kda.triton.fragment_gradients import (
    kda_fragment_adjoint,
    kda_fragment_gradients,
)
from k31fn.kernels.kda.triton.launches import Inputs
from k31fn.kernels.kda.triton.op import kda_accepts
from k31fn.kernels.kda.triton.relay import kda_relay
from k31fn.kernels.kda.triton.scans import kda_states
from k31fn.kernels.kda.triton.tiles import builds as kda_builds
from k31fn.kernels.launch import Build, grouped

__all__ = ["builds", "kda_fragment", "kda_fragment_accepts"]

# tiles times heads of a segment: with twice the columns of kda each takes twice the bytes
_SEGMENT = 12288


def kda_fragment_accepts(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ids: Tensor) -> str:
    """Why the kernels cannot run, or nothing."""
    return kda_accepts(k, k, v, g, beta, ids)


def kda_fragment(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ids: Tensor) -> KdaFragment:
    """The op; contract in :mod:`k31fn.kernels.kda`."""
    state, transition = _fragment(*(x[None] for x in (k, v, g, beta, ids)))
    return KdaFragment(state.squeeze(0), transition.squeeze(0))


def _fwd(*operands: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    state, transition, *kept = grouped(_launch_forward, *operands)
    return (state, transition), (*operands, *kept)


def _bwd(residuals: tuple[Tensor, ...], ct: tuple[Tensor, Tensor]) -> tuple[Tensor | None, ...]:
    return *grouped(_launch_backward, *residuals, *ct), None


_fragment = custom_vjp(_fwd, _bwd, opaque=True, name="kda_fragment (triton)")


def _inputs(operands: tuple[Tensor, ...]) -> tuple[Inputs, list[Tensor]]:
    """With k in the place of q, whose factors nobody reads."""
    k, v, g, beta, ids, *others = operands
    k = k.contiguous()
    return Inputs.fold((k, k, v, g, beta, ids, *others))


def _launch_forward(*operands: Tensor) -> tuple[Tensor, ...]:
    """State and transition; then the columns before each piece and after the last, and the
    transition of each.
    """
    x, _ = _inputs(operands)
    shape = x.shape
    K, V = shape.width, shape.columns
    plan = x.plan("fragment", _SEGMENT)
    factors = x.factors(min(plan.segment, shape.tiles))
    wq, kf, u, _, _, d, _ = factors
    columns = x.wide(plan.pieces + 1, K, V + K)
    transitions = x.transitions(plan.pieces)
    steps = (columns.stride(0), transitions.stride(0))
    given = x.given("fragment")
    for first in range(0, shape.tiles, plan.segment):
        tiles = min(plan.segment, shape.tiles - first)
        x.prepare(factors, first, tiles)
        at = first // plan.piece
        ends = (columns[:, at:], transitions[:, at:])
        count = triton.cdiv(tiles, plan.piece)
        kda_states[x.grid(given, V + K, count)](
            # u: in the places of what is not written
            wq,
            kf,
            u,
            d,
            *ends,
            u,
            u,
            tiles,
            plan.piece,
            count,
            *steps,
            **given,
        )
    columns[:, 0] = 0
    columns[:, 0, :, V:].diagonal(dim1=-2, dim2=-1).fill_(1)
    given = x.given("fragment_relay")
    kda_relay[x.grid(given, V + K, 1)](
        transitions, columns, plan.pieces, steps[1], steps[0], **given
    )
    lines = (shape.groups, shape.rows, shape.heads)
    results = (columns[:, -1, :, :V], columns[:, -1, :, V:], columns, transitions)
    results = [y.contiguous().unflatten(0, lines) for y in results]
    return tuple(results)


def _launch_backward(*operands: Tensor) -> tuple[Tensor, ...]:
    """Gradients of k, v, g and beta."""
    x, (columns, transitions, d_state, d_transition) = _inputs(operands)
    shape = x.shape
    K, V = shape.width, shape.columns
    columns = columns.flatten(0, 1)
    transitions = transitions.flatten(0, 1)
    plan = x.plan("fragment", _SEGMENT)
    d_columns = x.wide(plan.pieces, K, V + K)
    d_columns[:, -1, :, :V] = d_state.flatten(0, 1)
    d_columns[:, -1, :, V:] = d_transition.flatten(0, 1)
    if plan.pieces > 1:
        given = x.given("fragment_relay_back")
        kda_relay[x.grid(given, V + K, 1)](
            transitions[:, 1:],
            d_columns,
            plan.pieces - 1,
            transitions.stride(0),
            d_columns.stride(0),
            **given,
        )
    size = min(plan.segment, shape.tiles)
    factors = x.factors(size)
    # columns that come into the tiles and minus the gradients of those that leave; Y and dV
    s = x.low(size, V + K, K)
    y = x.low(size, TILE, V + K)
    scanned = (s, torch.empty_like(s), y, torch.empty_like(y))
    given = x.given("fragment_gradients", size)
    blocks = K // given["BLOCK"]
    parts = x.beta.new_empty((blocks, *x.beta.shape), dtype=torch.float32)
    d_k, d_v, d_g = (torch.empty_like(z) for z in (x.k, x.v, x.g))
    for first in range(0, shape.tiles, size):
        tiles = min(size, shape.tiles - first)
        x.prepare(factors, first, tiles)
        between = [z[:, first // plan.piece :] for z in (columns, d_columns)]
        _scan(x, factors, between, (*scanned, d_v), first, tiles, plan.piece)
        kda_fragment_gradients[(shape.lines * triton.cdiv(tiles, given["PER"]) * blocks,)](
            x.k,
            x.g,
            x.beta,
            x.ids,
            x.stop,
            *scanned,
            d_k,
            d_g,
            parts,
            shape.tokens,
            first,
            tiles,
            x.k.shape[0],
            **given,
        )
    grads = (d_k, d_v, d_g, parts.sum(0).to(x.beta.dtype))
    return tuple(z.unflatten(0, (shape.groups, shape.rows)) for z in grads)


def _scan(
    x: Inputs,
    factors: tuple[Tensor, ...],
    between: Sequence[Tensor],
    scanned: tuple[Tensor, ...],
    first: int,
    tiles: int,
    piece: int,
) -> None:
    """Both scans of a segment. ``between``: columns before its pieces, gradients of those after."""
    wq, kf, u, _, inverse, d, _ = factors
    columns, d_columns = between
    s, ds, y, nu, d_v = scanned
    N = columns.shape[-1]
    count = triton.cdiv(tiles, piece)
    given = x.given("fragment_states")
    kda_states[x.grid(given, N, count)](
        wq,
        kf,
        u,
        d,
        columns,
        d,  # not read
        s,
        y,
        tiles,
        piece,
        count,
        columns.stride(0),
        0,
        **given,
    )
    given = x.given("fragment_adjoint")
    kda_fragment_adjoint[x.grid(given, N, count)](
        wq,
        kf,
        inverse,
        d,
        d_columns,
        ds,
        nu,
        d_v,
        x.shape.tokens,
        first,
        tiles,
        piece,
        count,
        d_columns.stride(0),
        **given,
    )


def builds(kind: str) -> list[Build]:
    """What is compiled for 96 heads of 128 on a kind of device, besides ``kda``'s."""
    return kda_builds(kind, fragment=True)
