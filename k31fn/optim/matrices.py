"""The matrices of one leaf, and the part of them that a rank has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from einops import rearrange

from k31fn.parallel.axis import Axis, num_ranks
from k31fn.parallel.fsdp.placement import Placement
from k31fn.typing import Float, Tensor

__all__ = ["Matrices", "MatrixBlock"]


class MatrixBlock(NamedTuple):
    """Matrices ``start`` to ``stop`` of a leaf, the unit that is dealt out.

    They are counted along the leaf's batch or, where there is a matrix per head, along the heads;
    a block of heads has the whole batch.
    """

    leaf: int
    start: int
    stop: int


@dataclass(frozen=True)
class Matrices:
    """The matrices of one leaf, and this rank's part of them, seen as ``[batch rows columns]``.

    Attributes:
        batch: matrices beside each other, whole or in part: those of this rank's experts.
        rows: of its part.
        columns: of its part.
        head_dim: columns of one matrix, if there is one per head; 0: all columns.
        row_axes: that cut rows, outermost first.
        column_axes: that cut through the columns of a matrix, outermost first.
        group: ranks that can do the work, in the mesh's order: those that hold parts of the same
            matrices.
    """

    batch: int
    rows: int
    columns: int
    head_dim: int
    row_axes: tuple[Axis, ...]
    column_axes: tuple[Axis, ...]
    group: tuple[Axis, ...]

    @classmethod
    def of(
        cls, shape: Sequence[int], head_dim: int, place: Placement | None, axes: tuple[Axis, ...]
    ) -> Matrices:
        """Describes a leaf.

        Args:
            shape: of this rank's part, ``[..., in, out]``.
            head_dim: as the attribute.
            place: of its parts; None: it is whole.
            axes: of the mesh, in its order.
        """
        dims = place.dims if place else ((),) * len(shape)
        *batch, rows, columns = shape
        row_axes = dims[-2]
        between_heads, through_heads = _split_column_axes(dims[-1], columns, head_dim)
        # Ranks that differ along these axes have other matrices and nothing to exchange.
        apart = {*itertools.chain(*dims[:-2]), *between_heads}
        group = tuple(axis for axis in axes if axis not in apart)
        return cls(math.prod(batch), rows, columns, head_dim, row_axes, through_heads, group)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of one whole matrix."""
        rows = self.rows * num_ranks(self.row_axes)
        return rows, self.head_dim or self.joined_columns

    @property
    def joined_columns(self) -> int:
        """Columns that the ranks of ``column_axes`` have together: of whole matrices."""
        return self.columns * num_ranks(self.column_axes)

    @property
    def count(self) -> int:
        """How many pieces blocks can cut the leaf in: its heads, or its batch."""
        return self.joined_columns // self.head_dim if self.head_dim else self.batch

    @property
    def matrices_per_piece(self) -> int:
        """Matrices that one such piece has: a head has one for each element of the batch."""
        return self.batch if self.head_dim else 1

    def piece(self, block: MatrixBlock, coordinate: dict[str, int]) -> tuple[slice, slice, slice]:
        """What the rank at ``coordinate`` has of a block: slices of its part."""
        rows = slice(0, self.rows)
        if not self.head_dim:
            return slice(block.start, block.stop), rows, slice(0, self.columns)
        first = _index(self.column_axes, coordinate) * self.columns

        def local(head: int) -> int:
            # A block may begin before this rank's columns or end after them.
            return min(max(head * self.head_dim - first, 0), self.columns)

        return slice(0, self.batch), rows, slice(local(block.start), local(block.stop))

    def piece_in_block(
        self, block: MatrixBlock, coordinate: dict[str, int]
    ) -> tuple[slice, slice, slice]:
        """The same piece as slices of the whole block ``[batch rows columns]``."""
        batch, _, columns = self.piece(block, coordinate)
        row = _index(self.row_axes, coordinate) * self.rows
        first = _index(self.column_axes, coordinate) * self.columns - block.start * self.head_dim
        return (
            slice(0, batch.stop - batch.start),
            slice(row, row + self.rows),
            slice(columns.start + first, columns.stop + first),
        )

    def piece_shape(self, block: MatrixBlock, coordinate: dict[str, int]) -> list[int]:
        """Sizes of that piece."""
        return [s.stop - s.start for s in self.piece(block, coordinate)]

    def piece_size(self, block: MatrixBlock, coordinate: dict[str, int]) -> int:
        """Elements of that piece."""
        return math.prod(self.piece_shape(block, coordinate))

    def grid_index(self, coordinate: dict[str, int]) -> tuple[int, int]:
        """Row and column of a rank's part in the grid of parts that make up a matrix."""
        return _index(self.row_axes, coordinate), _index(self.column_axes, coordinate)

    def sends(self, source: dict[str, int], owner: dict[str, int]) -> bool:
        """Whether ``source`` sends its part to ``owner``.

        Of all ranks that hold a part, the one most like the owner does: so the work of sending is
        spread, and a part that the owner holds itself does not travel.
        """
        cut = {axis.name for axis in (*self.row_axes, *self.column_axes)}
        return all(
            source[axis.name] == owner[axis.name] for axis in self.group if axis.name not in cut
        )

    def split_heads(
        self, x: Float[Tensor, "batch rows columns"]
    ) -> Float[Tensor, "matrices rows one"]:
        """One matrix per element of the first dimension, out of whole rows."""
        width = self.head_dim or x.shape[-1]
        return rearrange(x, "batch rows (head one) -> (batch head) rows one", one=width)

    def join_heads(
        self, y: Float[Tensor, "matrices rows one"], batch: int
    ) -> Float[Tensor, "batch rows columns"]:
        """Undoes :meth:`split_heads` of a tensor whose first dimension was ``batch``."""
        return rearrange(y, "(batch head) rows one -> batch rows (head one)", batch=batch)


def _split_column_axes(
    axes: tuple[Axis, ...], columns: int, head_dim: int
) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Axes of the last dimension that cut between matrices, and those that cut through one.

    With a matrix per head the outer axes deal out whole heads. As many of the innermost are taken
    together as make whole heads out of this rank's ``columns``.
    """
    if not head_dim:
        return (), axes
    through = 0
    while columns * num_ranks(axes[len(axes) - through :]) % head_dim:
        through += 1
    return axes[: len(axes) - through], axes[len(axes) - through :]


def _index(axes: tuple[Axis, ...], coordinate: dict[str, int]) -> int:
    """The number of a rank along these axes together, the last one running fastest."""
    index = 0
    for axis in axes:
        index = index * axis.size + coordinate[axis.name]
    return index
