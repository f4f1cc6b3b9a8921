"""Global arrays cut into the tiles of ranks, and put together again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k31fn.parallel.collectives import axis_size
from k31fn.parallel.mesh import Coordinate, Mesh
from k31fn.parallel.partition import P, resolve, tile

__all__ = ["assemble", "cut"]


def cut(specs: list[P], values: list[Any], mesh: Mesh, coordinate: Coordinate) -> list[Any]:
    """The tiles of one rank, detached; leaves that are not tensors as they are.

    Raises:
        ValueError: a dimension does not divide evenly.
    """
    tiles: list[Any] = []
    for spec, value in zip(specs, values, strict=True):
        if isinstance(value, Tensor):
            slices = tile(spec, value.shape, mesh, coordinate)
            # As a rank's own weights lie in memory: with strides of the whole, operators may
            # take other paths.
            tiles.append(value.detach()[slices].contiguous())
        else:
            tiles.append(value)
    return tiles


def assemble(parts: list[Tensor], spec: P, mesh: Mesh) -> Tensor:
    """The global tensor that the tiles of all ranks make, in the order of ranks.

    Raises:
        ValueError: shapes differ, or ranks that hold the same tile do not agree on it up to
            rounding.
    """
    coordinates = list(mesh.coordinates())
    shape = parts[0].shape
    for part, coordinate in zip(parts, coordinates, strict=True):
        if part.shape != shape:
            raise ValueError(
                f"shard_map: an output has shape {list(shape)} at {coordinates[0]} and "
                f"{list(part.shape)} at {coordinate}; all ranks must return one shape"
            )
    dims = resolve(spec, mesh.axes(), len(shape))
    sizes: list[int] = []
    for size, axes in zip(shape, dims, strict=True):
        sizes.append(size * axis_size(axes))
    whole = parts[0].new_empty(sizes)
    written: dict[tuple[int, ...], Tensor] = {}
    for part, coordinate in zip(parts, coordinates, strict=True):
        slices = tile(spec, whole.shape, mesh, coordinate)
        key = tuple(s.start for s in slices)
        if key not in written:
            written[key] = whole[slices] = part
        # A tile that several ranks hold must be equal on them: the first one written would hide
        # that the spec leaves out an axis.
        elif not _agree(written[key], part):
            raise ValueError(
                f"shard_map: an output of shape {list(shape)} with out_spec {spec} varies over an "
                f"axis that the spec does not name (seen at {coordinate}); a psum after it or a "
                "pvary before is missing"
            )
    return whole


def _agree(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    # Up to rounding: ranks may compute the same sum in orders of their own.
    wide = torch.promote_types(a.dtype, torch.float32)
    size = float(torch.nan_to_num(a.to(wide)).abs().amax()) if a.numel() else 0.0
    rounding = torch.finfo(wide).eps ** 0.5 * size
    return torch.allclose(a.to(wide), b.to(wide), rtol=0.0, atol=rounding, equal_nan=True)
