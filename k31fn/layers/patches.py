"""Where each patch of the packed images lies: integers made once on the host, as segments are for
text.

A row of a batch holds the patches of its images one image after the other, then padding. Inside an
image the order is frames, then cells of 2 x 2 patches in raster order, then the four patches of a
cell: what the tower merges stands together, so a rank can merge the patches it holds.
:func:`cell_order` brings patches in raster order into it.

A grid is ``(frames, height, width)`` in patches; an image has one frame. Features leave the tower
in slots, one per cell of an image (the frames of a clip share its slots), numbered through the row:
slot i is the i-th image placeholder of the row's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from einops import rearrange

from k31fn import tree
from k31fn.typing import Float, Int, Tensor

__all__ = [
    "MERGE",
    "Grid",
    "Images",
    "Patches",
    "cell_order",
    "from_grids",
    "num_patches",
    "num_slots",
]


def __dir__() -> list[str]:
    return __all__


MERGE = 2  # side of the cells that the tower merges, in patches

Grid = tuple[int, int, int]
"""Frames, height and width of an image in patches."""


@tree.dataclass
class Patches:
    """The layout of a batch of packed patches. Build it with :func:`from_grids`: the constructor
    checks nothing.

    All numbers are those of the whole row, so a slice of it (context parallelism) keeps them.

    Attributes:
        start: the first patch of the patch's image; 0 for padding.
        stop: one past its last patch; 0 for padding.
        row: in its image; 0 for padding.
        column: in its image; 0 for padding.
        height: of its image; 1 for padding.
        width: of its image; 1 for padding.
        frame: 0 in a still image; 1, 2, ... in a clip.
        cells: ``[B N/4 F]``, the cells of up to F frames that make each slot, -1 where there are
            fewer; or ``()`` if no row has a clip: then slot i is cell i.
    """

    start: Int[Tensor, "B N"]
    stop: Int[Tensor, "B N"]
    row: Int[Tensor, "B N"]
    column: Int[Tensor, "B N"]
    height: Int[Tensor, "B N"]
    width: Int[Tensor, "B N"]
    frame: Int[Tensor, "B N"]
    cells: Any


@tree.dataclass
class Images:
    """The images of a batch of rows, as a model takes them beside the tokens.

    Attributes:
        pixels: of the patches, in [-1, 1]; 0 in padding.
        patches: where they lie.
        slots: whose feature each token takes (:func:`k31fn.layers.projector.slots`); -1 for a token
            that is no placeholder.
    """

    pixels: Float[Tensor, "B N X"]
    patches: Patches
    slots: Int[Tensor, "B T"]


def num_patches(grid: Grid) -> int:
    """Patches of an image."""
    return grid[0] * grid[1] * grid[2]


def num_slots(grid: Grid) -> int:
    """Features that the text gets for an image."""
    return grid[1] * grid[2] // MERGE**2


def cell_order(grid: Grid) -> np.ndarray:
    """``raster[cell_order(grid)]`` are the patches of raster order (frame, row, column) in the
    order of this module.
    """
    t, h, w = grid
    raster = np.arange(t * h * w)
    # (h p) rows and (w q) columns of patches: cell (h, w) holds the patches (p, q).
    cells = "(t h p w q) -> (t h w p q)"
    return rearrange(raster, cells, t=t, h=h // MERGE, p=MERGE, w=w // MERGE, q=MERGE)


def from_grids(
    rows: Sequence[Sequence[Grid]],
    length: int,
    *,
    max_frames: int = 1,
    device: torch.device | str | None = None,
) -> Patches:
    """Rows of ``length`` patches from the grids of their images; the rest of a row is padding.

    A row without images is all padding: it costs the same work and the same collectives as any
    other.

    Args:
        rows: the grids of each row's images, in the order of their placeholders in the text.
        length: patches of a row, a multiple of 4 (times the ranks that split it).
        max_frames: 1: images only, and ``cells`` is ``()``. More: room for clips of up to so many
            frames.
        device: of the result.

    Raises:
        ValueError: no row, a length that is no multiple of 4, a grid that is odd, empty or has too
            many frames, or images longer than the row; names row and image.
    """
    if not rows or length < MERGE**2 or length % MERGE**2:
        raise ValueError(
            f"{len(rows)} rows of length={length} patches: needs a row, and a positive multiple "
            "of 4"
        )
    fields = np.zeros((len(rows), length, 7), np.int64)
    # Height and width of padding: they are divided by, so 0 would not do.
    fields[..., 4:6] = 1
    cells = np.full((len(rows), length // MERGE**2, max_frames), -1, np.int64)
    for number, grids in enumerate(rows):
        # The next free patch and the next free slot of the row.
        at = slot = 0
        for index, grid in enumerate(grids):
            _check(grid, max_frames, f"rows[{number}][{index}]")
            size = num_patches(grid)
            slots = num_slots(grid)
            if at + size > length:
                raise ValueError(
                    f"rows[{number}]: image {index} ends at patch {at + size}, after "
                    f"length={length}; leave images out or make the row longer"
                )
            fields[number, at : at + size] = _of_image(grid, at)
            # Frame after frame in the row, and beside each other in a slot.
            image_cells = at // MERGE**2 + np.arange(grid[0] * slots)
            image_cells = rearrange(image_cells, "(frame slot) -> slot frame", frame=grid[0])
            cells[number, slot : slot + slots, : grid[0]] = image_cells
            at += size
            slot += slots
    columns = torch.from_numpy(fields).to(device).unbind(-1)
    return Patches(*columns, cells=torch.from_numpy(cells).to(device) if max_frames > 1 else ())


def _of_image(grid: Grid, at: int) -> np.ndarray:
    """The fields of an image's patches, in their order in :class:`Patches`."""
    t, h, w = grid
    frame, row, column = (a.ravel()[cell_order(grid)] for a in np.indices((t, h, w)))
    ones = np.ones_like(row)
    return np.stack(
        [
            at * ones,
            (at + t * h * w) * ones,
            row,
            column,
            h * ones,
            w * ones,
            # 0 is a still image, which gets no time row, so a clip counts from 1.
            frame + 1 if t > 1 else 0 * ones,
        ],
        -1,
    )


def _check(grid: Grid, max_frames: int, name: str) -> None:
    t, h, w = grid
    if min(t, h, w) < 1 or h % MERGE or w % MERGE:
        raise ValueError(
            f"{name}={grid}: frames, height and width in patches; height and width must be even "
            "and positive, so pad images to a multiple of 28 pixels"
        )
    if t > max_frames:
        raise ValueError(
            f"{name}={grid} has {t} frames, more than max_frames={max_frames}; take fewer frames"
        )
