# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""How the kernels of KDA are cut on each kind of device, their constants, and what is compiled of
them ahead of time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.kernels.kda.recurrence import MIN_LOG_DECAY, TILE
from k31fn.kernels.kda.triton.fragment_gradients import (
    kda_fragment_adjoint,
    kda_fragment_gradients,
)
from k31fn.kernels.kda.triton.gradients import kda_gradients
from k31fn.kernels.kda.triton.prepare import kda_prepare
from k31fn.kernels.kda.triton.relay import kda_relay
from k31fn.kernels.kda.triton.scans import kda_adjoint, kda_scan, kda_states
from k31fn.kernels.launch import INTERPRETED, Build, Tile

__all__ = ["TILES", "Shape", "builds", "constants", "kind_of"]


class _Tiles(NamedTuple):
    """One per kernel, called after it. ``columns``: of V (of K in ``gradients``, of both in
    ``prepare``) that a program or a step has; ``rows``: the most tiles of tokens that a program
    has. ``per_core``: programs that a core has at once.
    """

    prepare: Tile
    scan: Tile
    states: Tile
    adjoint: Tile
    gradients: Tile
    relay: Tile
    fragment_gradients: Tile

    def of(self, name: str) -> Tile:
        """That of a kernel, or of another form of one."""
        return getattr(self, _FORM_OF.get(name, name))


# kernels that are another form of one, or of a size with one
_FORM_OF = {
    "gated_prepare": "prepare",
    "gated_gradients": "gradients",
    "pieces": "states",
    "pieces_back": "adjoint",
    "relay_back": "relay",
    "fragment": "states",
    "fragment_relay": "relay",
    "fragment_states": "states",
    "fragment_adjoint": "adjoint",
    "fragment_relay_back": "relay",
}


# per kind of device; "cuda32": float32 operands there, whose products run without matrix units.
# H200: a pipelined loop of few warps beats one tile a program (0.56 against 0.97 ms for prepare at
# 8192 tokens of 96 heads, 1.9 against 2.3 for the gradients), since it waits less for loads
TILES = {
    "cuda": _Tiles(
        prepare=Tile(warps=2, per_core=4, rows=16, columns=64, stages=3),
        scan=Tile(warps=4, columns=64, stages=5),
        states=Tile(warps=4, columns=64, stages=4),
        adjoint=Tile(warps=4, columns=64, stages=4),
        gradients=Tile(warps=1, per_core=8, rows=8, columns=32, stages=2),
        relay=Tile(warps=4, columns=64, stages=2),
        fragment_gradients=Tile(warps=1, per_core=8, rows=8, columns=32, stages=2),
    ),
    "cuda32": _Tiles(
        prepare=Tile(warps=4, columns=64, stages=1),
        scan=Tile(warps=4, columns=32, stages=1),
        states=Tile(warps=4, columns=32, stages=1),
        adjoint=Tile(warps=4, columns=32, stages=1),
        gradients=Tile(warps=4, columns=32, stages=1),
        relay=Tile(warps=8, columns=32, stages=1),
        fragment_gradients=Tile(warps=4, columns=32, stages=1),
    ),
    "npu": _Tiles(
        prepare=Tile(rows=4, columns=64, stages=1),
        scan=Tile(columns=8, stages=1),
        states=Tile(columns=16, stages=1),
        adjoint=Tile(columns=16, stages=1),
        gradients=Tile(rows=4, columns=32, stages=1),
        relay=Tile(columns=8, stages=1),
        fragment_gradients=Tile(rows=4, columns=32, stages=1),
    ),
    "cpu": _Tiles(*(Tile(rows=2, columns=16, stages=1),) * 7),
}


class Shape(NamedTuple):
    """Sizes of a launch. A line is a head of a row of a group."""

    groups: int
    rows: int
    tokens: int
    heads: int
    width: int
    columns: int

    @property
    def lines(self) -> int:
        """Heads of all rows and groups."""
        return self.groups * self.rows * self.heads

    @property
    def tiles(self) -> int:
        """Tiles of tokens of a row."""
        return triton.cdiv(self.tokens, TILE)


def kind_of(q: Tensor) -> str:
    """The key of ``TILES``: float32 on CUDA has its own."""
    wide = q.dtype == torch.float32 and q.device.type == "cuda"
    return "cuda32" if wide else q.device.type


# kernels and their constants
_STATES = "K V N WIDE C BLOCK STAGES FRESH INNER PARTS LOW"
_ADJOINT = "H K V C BLOCK STAGES FRESH PARTS LOW"
_RELAY = "K WIDE ADDED BLOCK STAGES BACK PARTS LOW"
_PREPARE = "H K V C BLOCK VBLOCK PER STAGES LEAST LOW HALF PARTS GATED"
_GRADIENTS = "H K V C BLOCK PER STAGES LEAST LOW HALF GATED"
_KERNELS = {
    "prepare": (kda_prepare, _PREPARE),
    "gated_prepare": (kda_prepare, _PREPARE),
    "scan": (kda_scan, "H K V C BLOCK STAGES STACKED PARTS LOW"),
    "pieces": (kda_states, _STATES),
    "relay": (kda_relay, _RELAY),
    "states": (kda_states, _STATES),
    "adjoint": (kda_adjoint, _ADJOINT),
    "pieces_back": (kda_adjoint, _ADJOINT),
    "relay_back": (kda_relay, _RELAY),
    "gradients": (kda_gradients, _GRADIENTS),
    "gated_gradients": (kda_gradients, _GRADIENTS),
    "fragment": (kda_states, _STATES),
    "fragment_relay": (kda_relay, _RELAY),
    "fragment_states": (kda_states, _STATES),
    "fragment_adjoint": (kda_fragment_adjoint, "H K V N C BLOCK STAGES PARTS LOW"),
    "fragment_relay_back": (kda_relay, _RELAY),
    "fragment_gradients": (
        kda_fragment_gradients,
        "H K N C BLOCK STEP PER STAGES LEAST LOW HALF",
    ),
}
# of rows in pieces, which no launch on Ascend is cut into
_PIECES = ("pieces", "relay", "pieces_back", "relay_back")
# that differ from one of kda's in a size alone, where those are compiled
_TWINS = ("fragment_states", "fragment_relay", "fragment_relay_back")
# of a kind, and not of the device at hand: so each launch, and with it each bit, follows from the
# shape alone. H200; Ascend runs one program a core and is full with any head
_CORES = {"cuda": 132, "cuda32": 132, "npu": 0, "cpu": 0}
_FORWARD = ("prepare", "gated_prepare", "scan", "pieces", "relay", "fragment", "fragment_relay")


def _per(kind: str, shape: Shape, tile: Tile, blocks: int) -> int:
    """Tiles of a program, of which ``blocks`` have the same: as even rounds of programs on all
    cores as they can be.
    """
    at_once = _CORES[kind] * tile.per_core // blocks
    if at_once == 0:
        return tile.rows
    work = shape.lines * shape.tiles
    rounds = triton.cdiv(work, at_once * tile.rows)
    return triton.cdiv(work, at_once * rounds)


def constants(kind: str, name: str, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Of a launch of the kernel of this name; see each kernel."""
    tile = TILES[kind].of(name)
    matrix_units = dtype == torch.bfloat16 and not INTERPRETED
    width = shape.width
    columns = shape.columns
    # the columns of a fragment are those of V, then those of the transition
    of_fragment = name.startswith("fragment")
    gated = name.startswith("gated")
    both = of_fragment or name == "pieces"
    block = min(tile.columns, columns, width) if both else min(tile.columns, columns)
    if name.endswith("gradients"):
        block = min(tile.columns, width)
    elif name.endswith("prepare"):  # It holds what it needs again of two blocks of K, and no more.
        block = max(min(tile.columns, width), width // 2)
    known = {
        "H": shape.heads,
        "K": width,
        "V": columns,
        "N": columns + width if both else columns,
        "WIDE": columns + width if of_fragment else columns,
        "ADDED": 0 if name == "fragment_relay_back" else columns,
        "FRESH": name in ("pieces", "pieces_back", "fragment"),
        "INNER": name == "pieces",
        "BACK": name in ("relay_back", "fragment_relay_back"),
        "C": TILE,
        "BLOCK": block,
        "VBLOCK": min(tile.columns, columns),
        "STEP": min(columns, width),
        "PER": _per(kind, shape, tile, width // block if name.endswith("gradients") else 1),
        "STAGES": tile.stages,
        "STACKED": kind.startswith("cuda"),
        "LEAST": MIN_LOG_DECAY,
        "PARTS": 2 if matrix_units else 1,
        "GATED": gated,
        "LOW": tl.bfloat16 if matrix_units else tl.float32,
        "HALF": tl.float16 if matrix_units else tl.float32,
    }
    return {constant: known[constant] for constant in _KERNELS[name][1].split()}


_WIDE = (
    *("d_ptr", "state_ptr", "after_ptr", "d_state_ptr", "part_ptr"),
    *("rate_ptr", "bias_ptr", "norm_ptr", "d_rate_ptr", "d_bias_ptr"),
)
_GATES = ("g_ptr", "beta_ptr", "d_g_ptr")  # where gated they are projections
_ALIGNED = ("line_step", "state_step", "transition_step")


def builds(kind: str, *, fragment: bool = False) -> list[Build]:
    """What is compiled for 96 heads of 128 on a kind of device: of ``kda``, or what
    ``kda_fragment`` has besides.
    """
    shape = Shape(1, 1, 8192, 96, 128, 128)
    dtypes = (torch.bfloat16, torch.float32) if kind == "cuda" else (torch.float32,)
    listed: list[Build] = []
    for dtype in dtypes:
        of = "cuda32" if kind == "cuda" and dtype == torch.float32 else kind
        for name, (kernel, _) in _KERNELS.items():
            others = _PIECES if kind == "npu" else _TWINS
            if name.startswith("fragment") != fragment or name in others:
                continue
            # float32 of the other forms compiles for minutes, and says what bfloat16 says
            if of == "cuda32" and (fragment or name in _PIECES):
                continue
            gated = name.startswith("gated")
            if gated and kind != "cuda":  # nobody runs them elsewhere
                continue
            given = constants(of, name, shape, dtype)
            direction = "forward" if name in _FORWARD else "backward"
            types = {n: _type(n, dtype, gated) for n in kernel.arg_names if n not in given}
            title = f"kda_{name} {str(dtype).removeprefix('torch.')}"
            tile = TILES[of].of(name)
            listed.append(Build(title, kernel, types, given, direction, tile, _ALIGNED))
    return listed


def _type(name: str, dtype: torch.dtype, gated: bool) -> str:
    """Triton's type of a kernel's argument, as the layer calls the op."""
    if not name.endswith("_ptr"):
        return "fp32" if name in ("bound", "eps", "scale") else "i32"
    if name in ("ids_ptr", "stop_ptr"):
        return "*i64" if name == "ids_ptr" else "*i32"
    wide = dtype == torch.float32 or name in _WIDE or (name in _GATES and not gated)
    return "*fp32" if wide else "*bf16"
