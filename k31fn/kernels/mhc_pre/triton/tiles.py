"""Tiles of the kernels of the read of hyper-connected streams, and the constants that they are
compiled with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from k31fn.kernels.launch import INTERPRETED, MOST_PROGRAMS, Build, Tile, programs
from k31fn.kernels.mhc_pre.reference import SINKHORN_EPS

__all__ = [
    "MOST_ITERATIONS",
    "MOST_SPLITS",
    "TILES",
    "accepts",
    "dealt",
    "filling",
    "given",
    "listed",
    "of_streams",
]

MOST_SPLITS = 16  # of a sum: each is a part in memory that another kernel adds
MOST_ITERATIONS = 64  # whose sums a program of the backward keeps in registers
_MANY = 65535  # pieces of work: more than a device runs side by side
_BUSY = 0.8  # share of the device; to fill the rest, a split more would cost more than it gains
_ALIGNED = ("width", "flat", "chunk", "x_group", "phi_group", "ct_group", "ct_x_group")


class _KernelTiles(NamedTuple):
    """One per kernel, for bfloat16. ``rows`` of ``project`` and ``streams`` are at least 16: sides
    of a product.
    """

    project: Tile
    mix: Tile
    backward_mix: Tile
    streams: Tile
    sums: Tile


# chosen by measurement on an H200 (benchmarks/mhc.py --tune); on Ascend by its memory
TILES = {
    "cuda": _KernelTiles(
        project=Tile(warps=8, per_core=2, rows=128, columns=64, stages=4),
        mix=Tile(warps=2, per_core=16, rows=8, columns=512, stages=3),
        backward_mix=Tile(warps=1, per_core=16, rows=4, columns=256, stages=4),
        streams=Tile(warps=4, per_core=2, rows=32, columns=128, stages=3),
        sums=Tile(warps=4, per_core=8, columns=1024),
    ),
    "npu": _KernelTiles(
        project=Tile(rows=64, columns=128),
        mix=Tile(per_core=2, rows=8, columns=2048),
        backward_mix=Tile(per_core=2, rows=4, columns=1024, stages=1),
        streams=Tile(rows=32, columns=128, stages=1),
        sums=Tile(per_core=2, columns=1024),
    ),
    "cpu": _KernelTiles(
        project=Tile(rows=16, columns=16),
        mix=Tile(rows=4, columns=16),
        backward_mix=Tile(rows=4, columns=16),
        streams=Tile(rows=16, columns=32),
        sums=Tile(columns=64),
    ),
}


def accepts(
    x: Tensor, phi: Tensor, scale: Tensor, base: Tensor, eps: float, iterations: int
) -> str:
    """Why the kernels cannot run, or nothing."""
    del eps
    if x.ndim != 4 or not x.shape[-1]:
        return f"streams are [B, T, N, D], got {list(x.shape)}"
    n = x.shape[-2]
    if n not in (2, 4, 8):  # sides of Triton's tiles are powers of two
        return f"it has 2, 4 or 8 streams, got {n}"
    if not 1 <= iterations <= MOST_ITERATIONS:
        return f"it keeps the sums of 1 to {MOST_ITERATIONS} iterations, got {iterations}"
    shapes = ((n * x.shape[-1], 2 * n + n * n), (3,), (2 * n + n * n,))
    if (phi.shape, scale.shape, base.shape) != shapes:
        return (
            f"phi {list(phi.shape)}, scale {list(scale.shape)} and base {list(base.shape)} are "
            f"not those of streams {list(x.shape)}"
        )
    return ""


def of_streams(kind: str, itemsize: int) -> Tile:
    """The tile of ``streams``."""
    tile = TILES[kind].streams
    if itemsize == 2:
        return tile
    # products of float32 need more registers: a narrower tile, and more threads for it
    return tile._replace(
        rows=min(32, tile.rows), columns=max(32, tile.columns // 2), warps=2 * tile.warps
    )


def dealt(tile: Tile, x: Tensor, groups: int) -> tuple[int, int]:
    """Programs per group of a kernel with two kinds of work, and how many of them do the first kind
    alone.

    The first kind, of ``rows`` tokens at a time, takes long; the second is for each token. All
    programs do both where there are few.
    """
    tokens = x.shape[1]
    rounds = -(-tokens // tile.rows)
    per_group = programs(x.device, groups, tokens + rounds, tile.per_core)
    return per_group, rounds if 2 * rounds <= per_group else 0


def filling(tile: Tile, x: Tensor, units: int) -> int:
    """Into how many parts of the tokens each unit of work is cut: the fewest that keep most of the
    device busy.
    """
    places = programs(x.device, 1, _MANY, tile.per_core)
    most = max(1, -(-x.shape[1] // tile.rows))  # a split has at least one tile of tokens

    def busy(splits: int) -> float:
        # work comes in rounds of as many programs as run at once; the last may be nearly empty
        rounds = -(-units * splits // places)
        return units * splits / (rounds * places)

    fitting = max(1, MOST_PROGRAMS // units)  # else the launch says that it is too large
    choices = range(1, min(most, MOST_SPLITS, fitting) + 1)
    for splits in choices:
        if busy(splits) >= _BUSY:
            return splits
    return max(choices, key=busy)


def _constants(
    kind: str, tile: Tile, itemsize: int, n: int, iterations: int = 1, splits: int = 1
) -> dict[str, Any]:
    """Constants that kernels of N streams of that item size are compiled with; each takes those
    that it names.

    ``SPLIT``: products are taken as bfloat16 numbers; ``WIDE``: the interpreter cannot multiply
    these. ``HALVES``: as how many numbers the gradient of the products is stored. ``SUMS``,
    ``UNROLLED``: the sums of Sinkhorn's iterations stay in the registers of an unrolled loop, but
    on Ascend. ``FOLD``: on Ascend the squares of a row are summed at once; elsewhere a thread keeps
    sums of the 16 bytes that it loads.
    """
    c = 2 * n + n * n  # of h_pre, h_post and h_res
    on_npu = kind == "npu"
    return {
        "N": n,
        "C": c,
        "PADDED": max(16, _power(c)),
        "SPLIT": itemsize == 2,
        "HALVES": 2 if itemsize == 2 else 1,
        "WIDE": INTERPRETED,
        "SUMS": _power(iterations),
        "UNROLLED": 0 if on_npu else iterations,
        "SPLITS": splits,
        "FOLD": tile.columns if on_npu else 16 // itemsize,
        "EPS": SINKHORN_EPS,
        "ROWS": tile.rows,
        "BLOCK": tile.columns,
        "STAGES": tile.stages,
    }


def given(
    kernel: Any, tile: Tile, x: Tensor, n: int, iterations: int = 1, splits: int = 1
) -> dict[str, Any]:
    """The constants that the kernel names, for streams like ``x``, and its warps."""
    values = _constants(x.device.type, tile, x.itemsize, n, iterations, splits)
    # Triton's interpreter wraps a kernel in something that does not tell its names
    names = getattr(kernel, "arg_names", values)
    return {k: v for k, v in values.items() if k in names} | {"num_warps": tile.warps}


def listed(kind: str, forward: tuple[Any, ...], backward: tuple[Any, ...]) -> list[Build]:
    """Builds of the kernels, in the order of the tiles, for 4 streams of width 5120 and 20
    iterations.
    """
    builds = []
    for dtype, itemsize in (("bf16", 2), ("fp32", 4)):
        tiles = TILES[kind]._replace(streams=of_streams(kind, itemsize))
        for kernel, tile in zip(forward + backward, tiles, strict=True):
            known = _constants(kind, tile, itemsize, 4, iterations=20, splits=MOST_SPLITS)
            known = {k: v for k, v in known.items() if k in kernel.arg_names}
            signature = {}
            for name in kernel.arg_names:
                if name not in known:
                    signature[name] = _type(name, dtype)
            name = f"{kernel.__name__} {dtype} N4 D5120"
            direction = "forward" if kernel in forward else "backward"
            builds.append(Build(name, kernel, signature, known, direction, tile, _ALIGNED))
    return builds


def _type(name: str, dtype: str) -> str:
    """Streams and what goes with them are in the model's dtype; all else is float32, or an
    integer.
    """
    if name in ("x_ptr", "y_ptr", "ct_ptr", "ct_x_ptr", "d_x_ptr", "d_product_ptr"):
        return f"*{dtype}"
    return "*fp32" if name.endswith("_ptr") else "fp32" if name == "norm_eps" else "i32"


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
