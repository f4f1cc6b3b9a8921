"""How one weight differs between the checkpoint and the parameter tree.

A transform has ``stored_shape(shape)``, the shape in the checkpoint of a weight that has ``shape`` in the tree;
``load(stored, shape)``, that weight as a view of the stored tensor; and ``export(weight)``, which undoes ``load`` bit
for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k31fn.typing import Tensor

__all__ = ["DEPTHWISE", "HEADS_PADDED", "ROW", "SAME", "TRANSPOSED", "Transform"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Same:
    """Stored as it is."""

    def stored_shape(self, shape: Shape) -> Shape:
        """Unchanged."""
        return shape

    def load(self, stored: Tensor, shape: Shape) -> Tensor:
        """Unchanged."""
        del shape
        return stored

    def export(self, weight: Tensor) -> Tensor:
        """Unchanged."""
        return weight


@dataclass(frozen=True)
class Transposed:
    """Stored ``[out, in]``, used as ``[in, out]``."""

    def stored_shape(self, shape: Shape) -> Shape:
        """Reversed."""
        return shape[::-1]

    def load(self, stored: Tensor, shape: Shape) -> Tensor:
        """``[in, out]``."""
        del shape
        return stored.mT

    def export(self, weight: Tensor) -> Tensor:
        """``[out, in]``."""
        return weight.mT


@dataclass(frozen=True)
class Inserted:
    """Stored with one more dimension of size 1: ``[C, 1, W]`` for ``[C, W]``, ``[1, D]`` for ``[D]``."""

    dim: int

    def stored_shape(self, shape: Shape) -> Shape:
        """With the dimension."""
        return (*shape[: self.dim], 1, *shape[self.dim :])

    def load(self, stored: Tensor, shape: Shape) -> Tensor:
        """Without the dimension."""
        del shape
        return stored.squeeze(self.dim)

    def export(self, weight: Tensor) -> Tensor:
        """With the dimension."""
        return weight.unsqueeze(self.dim)


@dataclass(frozen=True)
class Padded:
    """A vector stored with zeros up to a multiple of ``multiple`` elements; what stands there is not read."""

    multiple: int

    def stored_shape(self, shape: Shape) -> Shape:
        """Rounded up."""
        return (-(-shape[0] // self.multiple) * self.multiple,)

    def load(self, stored: Tensor, shape: Shape) -> Tensor:
        """The first elements."""
        return stored[: shape[0]]

    def export(self, weight: Tensor) -> Tensor:
        """With zeros appended."""
        (length,) = self.stored_shape(tuple(weight.shape))
        return torch.cat([weight, weight.new_zeros(length - weight.shape[0])])


Transform = Same | Transposed | Inserted | Padded
SAME = Same()
TRANSPOSED = Transposed()
DEPTHWISE = Inserted(1)
ROW = Inserted(0)
HEADS_PADDED = Padded(128)
