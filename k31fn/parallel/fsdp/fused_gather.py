"""PendingTree the weights of a layer without waiting, small ones together.

A layer has dozens of weights, most of them small: each of its own would cost a collective's
latency, not its bytes. The parts of small weights are laid end to end, travel as one, and are taken
apart again::

    rank r sends [a_r | b_r]; all have [a_0 | b_0 | a_1 | b_1 | ...];
    a = cat(a_0, a_1, ...) along its dimension

Gradients take the way back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k31fn import tree
from k31fn.parallel.collectives import all_gather, axis_size, psum, psum_scatter
from k31fn.parallel.fsdp.placement import Placement, Placements, reduce_dtype, spread
from k31fn.parallel.overlap import Pending, start, wait

__all__ = ["PendingTree", "start_gather", "start_scatter", "wait_gather", "wait_scatter"]

_SMALL = 2**20  # bytes of a part that is worth a copy to spare a collective


@dataclass(frozen=True, eq=False)
class PendingTree:
    """A tree on its way: weights for :func:`wait_gather`, or their gradients for
    :func:`wait_scatter`.
    """

    bundles: list[_Bundle]
    pending: list[Pending]
    structure: Any


@dataclass(frozen=True)
class _Bundle:
    """Leaves that travel as one.

    Attributes:
        leaves: their numbers in the tree.
        place: of what travels.
        dims: along which each is gathered.
        shapes: of the parts.
        dtype: of the parts.
    """

    leaves: tuple[int, ...]
    place: Placement
    dims: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype

    def join_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """What this rank sends."""
        return parts[0] if len(parts) == 1 else torch.cat([x.flatten() for x in parts])

    def cut_parts(self, x: Tensor) -> list[Tensor]:
        """The inverse."""
        if len(self.leaves) == 1:
            return [x]
        return [
            y.view(shape)
            for y, shape in zip(x.split([s.numel() for s in self.shapes]), self.shapes, strict=True)
        ]

    def join_whole(self, weights: Sequence[Tensor]) -> Tensor:
        """Whole weights as :meth:`cut_whole` takes them."""
        if len(weights) == 1:
            return weights[0]
        n = axis_size(self.place.gather)
        rows = [
            torch.stack(w.chunk(n, dim)).flatten(1)
            for w, dim in zip(weights, self.dims, strict=True)
        ]
        return torch.cat(rows, 1).flatten()

    def cut_whole(self, x: Tensor) -> list[Tensor]:
        """The whole weights in what was gathered."""
        if len(self.leaves) == 1:
            return [x]
        rows = x.view(axis_size(self.place.gather), -1).split([s.numel() for s in self.shapes], 1)
        each = zip(rows, self.shapes, self.dims, strict=True)
        return [torch.cat(row.unflatten(1, shape).unbind(), dim) for row, shape, dim in each]


def _bundles(values: Sequence[Tensor], places: Sequence[Placement]) -> list[_Bundle]:
    """The leaves of one kind that are small as one, each other alone.

    Of one kind are only leaves that the same axes split: in the simulated mesh, what tp splits and
    what it does not would both vary over tp if they were one tensor.
    """
    kinds: dict[Any, list[int]] = {}
    for i, (x, place) in enumerate(zip(values, places, strict=True)):
        small = place.gather and x.is_floating_point() and x.nbytes <= _SMALL
        key = dataclasses.replace(place, dims=(), dim=0), frozenset(place.axes), x.dtype, x.device
        kinds.setdefault(key if small else i, []).append(i)

    def bundle(leaves: list[int]) -> _Bundle:
        first, dims = places[leaves[0]], tuple(places[i].dim for i in leaves)
        place = first if len(leaves) == 1 else dataclasses.replace(first, dim=0)
        return _Bundle(
            tuple(leaves),
            place,
            dims,
            tuple(values[i].shape for i in leaves),
            values[leaves[0]].dtype,
        )

    return [bundle(leaves) for leaves in kinds.values()]


def start_gather(params: Any, placements: Placements) -> PendingTree:
    """Issues :func:`k31fn.parallel.fsdp.gather` and returns without waiting for it.

    Raises:
        ValueError: ``placements`` is not a tree like ``params``.
    """
    values, structure = tree.flatten(params)
    bundles = _bundles(values, tree.leaves(tree.map(lambda _, place: place, params, placements)))
    pending = []
    for b in bundles:
        x, dtype, grad_dtype = spread(b.join_parts([values[i] for i in b.leaves]), b.place)
        pending.append(
            start(all_gather, x, b.place.gather, b.place.dim, dtype=dtype, grad_dtype=grad_dtype)
        )
    return PendingTree(bundles, pending, structure)


def wait_gather(gathering: PendingTree) -> Any:
    """The weights that :func:`start_gather` issued."""
    values: dict[int, Tensor] = {}
    for b, pending in zip(gathering.bundles, gathering.pending, strict=True):
        values.update(zip(b.leaves, b.cut_whole(wait(pending)), strict=True))
    return tree.unflatten(gathering.structure, [values[i] for i in range(len(values))])


def start_scatter(grads: Any, placements: Placements, params: Any) -> PendingTree:
    """Issues the transpose of gathering, on the gradients of what was gathered.

    Args:
        grads: like the gathered weights; None for leaves that have none: frozen, or not floating.
        placements: of these weights.
        params: the parts that were gathered.
    """
    values, structure = tree.flatten(grads, allow_none=True)
    parts = tree.leaves(params)
    bundles = [
        b for b in _bundles(parts, tree.leaves(placements)) if values[b.leaves[0]] is not None
    ]
    pending = []
    for b in bundles:
        g = b.join_whole([values[i] for i in b.leaves]).to(
            reduce_dtype(parts[b.leaves[0]], b.place)
        )
        scatter = b.place.gather, b.place.dim
        pending.append(
            start(psum_scatter, g, *scatter) if b.place.gather else start(psum, g, b.place.vary)
        )
    return PendingTree(bundles, pending, structure)


def wait_scatter(scattering: PendingTree) -> Any:
    """The gradients of this rank's parts, which :func:`start_scatter` issued."""
    values: list[Tensor | None] = [None] * scattering.structure.num_leaves
    for b, pending in zip(scattering.bundles, scattering.pending, strict=True):
        g = psum(wait(pending), b.place.vary if b.place.gather else ()).to(b.dtype)
        for i, part in zip(b.leaves, b.cut_parts(g), strict=True):
            values[i] = part
    return tree.unflatten(scattering.structure, values)
