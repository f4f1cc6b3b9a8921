# pyright: reportMissingImports=false
"""The scans of a segment, in one piece or in several side by side.

Several: what each piece does to any state, by a scan from [0 | I] (backward: from a gradient of 0,
since the transitions are kept); the states between the pieces, by the relay; then all pieces at
once, each from its own state. Exact up to rounding, and each sum has one order.
"""

from __future__ import annotations

import triton
from torch import Tensor

from k31fn.device import Branch
from k31fn.kernels.kda.triton.launches import Inputs, Plan
from k31fn.kernels.kda.triton.relay import kda_relay
from k31fn.kernels.kda.triton.scans import kda_adjoint, kda_scan, kda_states

__all__ = ["scan_backward", "scan_forward"]


def scan_forward(
    x: Inputs,
    plan: Plan,
    factors: tuple[Tensor, ...],
    between: tuple[Tensor, Tensor, Tensor],
    o: Tensor,
    first: int,
    tiles: int,
) -> None:
    """Outputs of so many tiles from the ``first``, whose factors are there.

    ``between``: states before each piece of the row, of which the first is read and the others are
    written, and the one after the last again; transitions of the pieces, where there are several a
    segment.
    """
    wq, kf, u, p, _, d, _ = factors
    shape = x.shape
    at = first // plan.piece
    count = triton.cdiv(tiles, plan.piece)
    states, transitions, after = between[0][:, at:], between[1][:, at:], between[2]
    steps = (states.stride(0), transitions.stride(0))
    pieces = count if plan.side > 1 else 1
    if pieces > 1:
        given = x.given("pieces")
        kda_states[x.grid(given, given["N"], pieces)](
            # u: in the places of what is not written
            wq,
            kf,
            u,
            d,
            states,
            transitions,
            u,
            u,
            tiles,
            plan.piece,
            pieces,
            *steps,
            **given,
        )
    if pieces > 2:
        given = x.given("relay")
        kda_relay[x.grid(given, shape.columns, 1)](
            transitions[:, 1:], states[:, 1:], pieces - 2, steps[1], steps[0], **given
        )
    given = x.given("scan")
    kda_scan[x.grid(given, shape.columns, pieces)](
        wq,
        kf,
        u,
        p,
        d,
        states,
        after,
        o,
        shape.tokens,
        first,
        tiles,
        plan.piece,
        pieces,
        steps[0],
        **given,
    )


def scan_backward(
    x: Inputs,
    plan: Plan,
    factors: tuple[Tensor, ...],
    between: tuple[Tensor, Tensor, Tensor],
    per_tile: tuple[Tensor, ...],
    segment: int,
    tiles: int,
) -> None:
    """States of the tiles of a segment, their gradients, Y and the gradient of v.

    ``between``: states and transitions as the forward left them, and the gradients of the states
    after each piece of the segment: the last is read, and the first becomes that of the state
    before the segment, where an earlier one finds it as its last. ``per_tile``: dO, and what is
    written.
    """
    wq, kf, u, p, inverse, d, _ = factors
    states, transitions, d_states = between
    d_o, s, ds, y, d_v = per_tile
    columns = x.shape.columns
    piece = plan.piece
    pieces = triton.cdiv(tiles, piece)
    at = segment * plan.side
    span = (x.shape.tokens, segment * plan.segment, tiles, piece, pieces)
    # neither scan reads what the other writes, and each alone waits more than it works
    beside = Branch(d_o.device)
    given = x.given("states")
    with beside:
        kda_states[x.grid(given, columns, pieces)](
            wq,
            kf,
            u,
            d,
            states[:, at:],
            d,  # not read
            s,
            y,
            tiles,
            piece,
            pieces,
            states.stride(0),
            0,
            **given,
        )
    read = (wq, kf, p, inverse, d, d_o, x.stop, d_states, ds, d_v, *span, d_states.stride(0))
    if pieces > 1:
        given = x.given("pieces_back")
        kda_adjoint[x.grid(given, columns, pieces - 1)](*read, **given)
        given = x.given("relay_back")
        kda_relay[x.grid(given, columns, 1)](
            transitions[:, at + 1 :],
            d_states,
            pieces - 1,
            transitions.stride(0),
            d_states.stride(0),
            **given,
        )
    given = x.given("adjoint")
    kda_adjoint[x.grid(given, columns, pieces)](*read, **given)
    beside.join()
    if segment and plan.side > 1:
        d_states[:, -1] = d_states[:, 0]
