# pyright: reportMissingImports=false, reportCallIssue=false
"""What the launches of KDA's kernels share: sizes, tiles, constants, workspaces, and what is
compiled ahead of time.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.kernels.kda.recurrence import MIN_LOG_DECAY, TILE
from k31fn.kernels.launch import INTERPRETED, Build, Tile

__all__ = ["Shape"]


class _Tiles(NamedTuple):
    """One per kernel, called after it. ``columns``: of V (of K in ``gradients``, of both in
    ``prepare``) that a program or a step has; ``rows``: tiles of tokens that a program has, in
    ``scan`` segments of the backward, whose states the forward does not hold.
    """

    prepare: Tile
    scan: Tile
    states: Tile
    adjoint: Tile
    gradients: Tile


# per kind of device; "cuda32": float32 operands there, whose products run without matrix units.
# H200: a pipelined loop of few warps beats one tile a program (0.56 against 0.97 ms for prepare at
# 8192 tokens of 96 heads, 1.9 against 2.3 for the gradients), since it waits less for loads
_TILES = {
    "cuda": _Tiles(
        prepare=Tile(warps=2, rows=16, columns=64, stages=3),
        scan=Tile(warps=4, rows=2, columns=64, stages=5),
        states=Tile(warps=4, columns=64, stages=4),
        adjoint=Tile(warps=4, columns=64, stages=4),
        gradients=Tile(warps=1, rows=8, columns=32, stages=2),
    ),
    "cuda32": _Tiles(
        prepare=Tile(warps=4, columns=64, stages=1),
        scan=Tile(warps=4, columns=32, stages=1),
        states=Tile(warps=4, columns=32, stages=1),
        adjoint=Tile(warps=4, columns=32, stages=1),
        gradients=Tile(warps=4, columns=32, stages=1),
    ),
    "npu": _Tiles(
        prepare=Tile(rows=4, columns=64, stages=1),
        scan=Tile(columns=8, stages=1),
        states=Tile(columns=32, stages=1),
        adjoint=Tile(columns=16, stages=1),
        gradients=Tile(rows=4, columns=32, stages=1),
    ),
    "cpu": _Tiles(*(Tile(rows=2, columns=16, stages=1),) * 5),
}


class _Factors(NamedTuple):
    """What :func:`~.prepare.kda_prepare` writes, for the tiles of a segment."""

    wq: Tensor
    kf: Tensor
    u: Tensor
    p: Tensor
    inverse: Tensor
    d: Tensor


class Shape(NamedTuple):
    """Sizes of a launch, the dtype of its operands and the key of its tiles. A line is a head of a
    row of a group.
    """

    groups: int
    rows: int
    tokens: int
    heads: int
    width: int
    columns: int
    dtype: torch.dtype
    kind: str

    @classmethod
    def fold(cls, operands: tuple[Tensor, ...]) -> tuple[Shape, list[Tensor]]:
        """Sizes, and the operands (q or k first, v third) with groups and rows as one dimension.

        What samples share under vmap is copied for each.
        """
        groups = max(x.shape[0] for x in operands)
        if groups > 1:
            operands = tuple(x.expand(groups, *x.shape[1:]) for x in operands)
        q, v = operands[0], operands[2]
        # float32 on CUDA has tiles of its own
        wide = q.dtype == torch.float32 and q.device.type == "cuda"
        kind = "cuda32" if wide else q.device.type
        shape = cls(groups, *q.shape[1:], v.shape[-1], q.dtype, kind)
        return shape, [x.flatten(0, 1).contiguous() for x in operands]

    @property
    def lines(self) -> int:
        """Heads of all rows and groups."""
        return self.groups * self.rows * self.heads

    @property
    def tiles(self) -> int:
        """Tiles of tokens of a row."""
        return triton.cdiv(self.tokens, TILE)

    def given(self, name: str, kernel: Any) -> dict[str, Any]:
        """Constants and options of a launch; ``name``: of the tile."""
        return {**self._constants(name, kernel), "num_warps": self.tile(name).warps}

    def tile(self, name: str) -> Tile:
        """How a kernel is cut."""
        return getattr(_TILES[self.kind], name)

    def low(self, like: Tensor, tiles: int, *size: int) -> Tensor:
        """A new matrix for each tile, as the kernels multiply it: the interpreter cannot multiply
        bfloat16.
        """
        dtype = torch.float32 if INTERPRETED else self.dtype
        return like.new_empty((self.lines, tiles, *size), dtype=dtype)

    def factors(self, like: Tensor, tiles: int) -> _Factors:
        """Room for the factors of so many tiles."""
        C, K, V = TILE, self.width, self.columns
        sizes = ((2 * C, K), (C, K), (V, C), (C, C), (C, C))
        d = like.new_empty((self.lines, tiles, K), dtype=torch.float32)
        return _Factors(*(self.low(like, tiles, *size) for size in sizes), d)

    def build(self, name: str, kernel: Any, direction: Literal["forward", "backward"]) -> Build:
        """The kernel as it is compiled ahead of time."""
        constants = self._constants(name, kernel)
        types = {n: _type(n, self.dtype) for n in kernel.arg_names if n not in constants}
        title = f"{kernel.__name__} {str(self.dtype).removeprefix('torch.')}"
        return Build(
            title, kernel, types, constants, direction, self.tile(name), aligned=("line_step",)
        )

    def _constants(self, name: str, kernel: Any) -> dict[str, Any]:
        tile = self.tile(name)
        matrix_units = self.dtype == torch.bfloat16 and not INTERPRETED
        block = min(tile.columns, self.columns)
        if name == "gradients":
            block = min(tile.columns, self.width)
        elif name == "prepare":  # It holds what it needs again of two blocks of K, and no more.
            block = max(min(tile.columns, self.width), self.width // 2)
        constants = {
            "H": self.heads,
            "K": self.width,
            "V": self.columns,
            "C": TILE,
            "BLOCK": block,
            "VBLOCK": min(tile.columns, self.columns),
            "PER": tile.rows,
            "STAGES": tile.stages,
            "STACKED": self.kind.startswith("cuda"),
            "MARKS": tile.rows,
            "LEAST": MIN_LOG_DECAY,
            "LOW": tl.bfloat16 if matrix_units else tl.float32,
            "HALF": tl.float16 if matrix_units else tl.float32,
        }
        return {n: constants[n] for n in kernel.arg_names if n in constants}


_WIDE = ("g_ptr", "beta_ptr", "d_ptr", "before_ptr", "state_ptr", "d_state_ptr", "d_g_ptr")


def _type(name: str, dtype: torch.dtype) -> str:
    """Triton's type of a kernel's argument, as the layer calls the op."""
    if not name.endswith("_ptr"):
        return "i32"
    if name in ("ids_ptr", "stop_ptr"):
        return "*i64" if name == "ids_ptr" else "*i32"
    wide = dtype == torch.float32 or name in (*_WIDE, "part_ptr")
    return "*fp32" if wide else "*bf16"
