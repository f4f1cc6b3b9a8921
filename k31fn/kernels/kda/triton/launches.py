# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
"""What the launches of KDA's kernels share: operands, workspaces, and how a row is cut.

A segment is what is prepared at once, so workspaces are as large as one. Where heads are few, their
scans are too few programs for the device: then a segment is cut into pieces, which are scanned side
by side (:mod:`~.scans`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from k31fn.kernels.kda.recurrence import TILE
from k31fn.kernels.kda.triton.prepare import kda_prepare
from k31fn.kernels.kda.triton.tiles import TILES, Shape, constants, kind_of
from k31fn.kernels.launch import INTERPRETED

__all__ = ["Factors", "Inputs", "Plan", "folded"]

# tiles times heads of a segment: at widths of 128 in bfloat16 each takes 68 KB in the backward, so
# 1.3 GB, and 23 KB of factors, which are those of all segments where they are kept
_SEGMENT = 18432
_SHORTEST = 16  # tiles of a segment: each costs a state, and the scans some time to begin
# programs that scan side by side. A number of the kind and not of the device at hand, so that the
# cut, and with it each bit, follows from the shape alone. CUDA: 2 for each core of an H200.
# Ascend's 24 cores are full with one piece a head
_SCANS = {"cuda": 264, "cuda32": 264, "npu": 0, "cpu": 0}


class Plan(NamedTuple):
    """How the tiles of a row are cut; a function of the shape and the kind of device.

    Attributes:
        piece: tiles of a piece.
        side: pieces of a segment.
        pieces: of the row.
    """

    piece: int
    side: int
    pieces: int

    @property
    def segment(self) -> int:
        """Tiles of a segment."""
        return self.piece * self.side

    @classmethod
    def of(cls, shape: Shape, kind: str, blocks: int, most: int) -> Plan:
        """``blocks``: programs that scan a head; ``most``: tiles of a segment times heads."""
        wanted = triton.cdiv(shape.tiles, max(_SHORTEST, most // shape.lines))
        segment = triton.cdiv(shape.tiles, wanted)
        # the relay is a chain over the pieces, a scan one over the tiles of a piece: some root of
        # their number makes both short
        side = min(_SCANS[kind] // (shape.lines * blocks), math.isqrt(2 * segment))
        # a piece is scanned twice, the first time with the columns of its transition too: two
        # would take as long as one
        side = side if side > 2 else 1
        piece = triton.cdiv(segment, side)
        side = triton.cdiv(segment, piece)
        return cls(piece, side, triton.cdiv(shape.tiles, piece))


class Factors(NamedTuple):
    """What :func:`kda_prepare` writes, for the tiles of a segment."""

    wq: Tensor
    kf: Tensor
    u: Tensor
    p: Tensor
    inverse: Tensor
    d: Tensor
    norm: Tensor

    @classmethod
    def of_segment(cls, kept: Sequence[Tensor], segment: int) -> Factors:
        """Those of a segment among those of all, one after another."""
        count = len(cls._fields)
        return cls(*kept[count * segment : count * (segment + 1)])


def folded(operands: Sequence[Tensor]) -> tuple[Shape, list[Tensor]]:
    """Sizes, and the operands, of which q is the first and v the third, with groups and rows as one
    dimension.

    What samples share under vmap is copied for each.
    """
    groups = max(x.shape[0] for x in operands)
    if groups > 1:
        operands = [x.expand(groups, *x.shape[1:]) for x in operands]
    shape = Shape(groups, *operands[0].shape[1:], operands[2].shape[-1])
    return shape, [x.flatten(0, 1).contiguous() for x in operands]


class Inputs(NamedTuple):
    """Operands, groups and rows as one dimension.

    Of ``kda_gated``: ``g`` and ``beta`` are projections, ``rate`` and ``bias`` the parameters A_log
    and dt_bias for each row again, ``numbers`` the bound, eps and scale. Else the numbers are 0 and
    nobody reads the parameters.
    """

    shape: Shape
    kind: str
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    ids: Tensor
    stop: Tensor
    rate: Tensor
    bias: Tensor
    numbers: tuple[float, ...]

    @property
    def gated(self) -> bool:
        """Whether norms and gates are made inside: a scale is not 0."""
        return self.numbers[2] != 0.0

    @classmethod
    def fold(
        cls,
        operands: tuple[Tensor, ...],
        parameters: tuple[Tensor, ...] = (),
        numbers: tuple[float, ...] = (0.0, 0.0, 0.0),
    ) -> tuple[Inputs, list[Tensor]]:
        """Of q, k, v, g, beta and ids; and the other operands. ``stop``: tokens of each row before
        its padding.
        """
        shape, inputs = folded(operands)
        stop = (inputs[5] > 0).sum(-1, dtype=torch.int32)
        rate, bias = inputs[:2]
        if parameters:
            rate, bias = (
                x[:, None].expand(shape.groups, shape.rows, *x.shape[1:]).flatten(0, 1).contiguous()
                for x in parameters
            )
        return cls(shape, kind_of(inputs[0]), *inputs[:6], stop, rate, bias, numbers), inputs[6:]

    def given(self, name: str, tiles: int = 0) -> dict[str, Any]:
        """Constants and options of a launch, of so many tiles where the cut depends on them."""
        shape = self.shape._replace(tokens=tiles * TILE) if tiles else self.shape
        found = constants(self.kind, name, shape, self.q.dtype)
        return {**found, "num_warps": TILES[self.kind].of(name).warps}

    def low(self, tiles: int, *size: int) -> Tensor:
        """Room for a matrix for each tile, as the kernels multiply it: the interpreter cannot
        multiply bfloat16.
        """
        dtype = torch.float32 if INTERPRETED else self.q.dtype
        return self.q.new_empty((self.shape.lines, tiles, *size), dtype=dtype)

    def wide(self, *size: int) -> Tensor:
        """Room for float32 numbers of each head."""
        return self.q.new_empty((self.shape.lines, *size), dtype=torch.float32)

    def transitions(self, pieces: int) -> Tensor:
        """Room for those of the pieces of each head, as the relay multiplies them: bfloat16 as two
        numbers each.
        """
        return self.low(pieces, self.given("relay")["PARTS"], self.shape.width, self.shape.width)

    def factors(self, tiles: int) -> Factors:
        """Room for the factors of so many tiles."""
        C, K, V = TILE, self.shape.width, self.shape.columns
        parts = self.given("prepare")["PARTS"]
        sizes = ((2 * C, K), (parts * C, K), (V, C), (parts * C, C), (parts * C, C))
        low = [self.low(tiles, *size) for size in sizes]
        return Factors(*low, self.wide(tiles, K), self.wide(tiles if self.gated else 0, 2, C))

    def prepare(self, factors: Factors, first: int, tiles: int) -> None:
        """Launches :func:`kda_prepare` for so many tiles from the ``first``."""
        # by the room that there is: a last segment of fewer tiles is no other kernel
        room = factors.d.shape[1]
        given = self.given("gated_prepare" if self.gated else "prepare", room)
        kda_prepare[(self.shape.lines * triton.cdiv(tiles, given["PER"]),)](
            self.q,
            self.k,
            self.v,
            self.g,
            self.beta,
            self.ids,
            self.stop,
            self.rate,
            self.bias,
            *factors,
            self.shape.tokens,
            first,
            tiles,
            *self.numbers,
            **given,
        )

    def grid(self, given: dict[str, Any], columns: int, pieces: int) -> tuple[int]:
        """Programs that scan so many columns of each piece."""
        return (self.shape.lines * pieces * (columns // given["BLOCK"]),)

    def plan(self, name: str, most: int = 0) -> Plan:
        """How the row is cut for the scan of this name; ``most``: tiles of a segment times heads,
        0: as many as ``kda`` has.
        """
        given = self.given(name)
        columns = given.get("N", self.shape.columns)
        return Plan.of(self.shape, self.kind, columns // given["BLOCK"], most or _SEGMENT)
