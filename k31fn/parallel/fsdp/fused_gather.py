"""Gathers of a layer's weights that are waited for later, small weights together.

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

__all__ = ["start_gather", "start_scatter", "wait_gather", "wait_scatter"]

# Bytes of a part up to which a copy is cheaper than a collective more.
_SMALL = 2**20


@dataclass(frozen=True, eq=False)
class _PendingTree:
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

    def pick(self, values: Sequence[Any]) -> list[Any]:
        """The values of these leaves in a list for all leaves."""
        return [values[i] for i in self.leaves]

    def join_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor that this rank sends."""
        if len(parts) == 1:
            return parts[0]  # alone, without the copy
        return torch.cat([x.flatten() for x in parts])

    def cut_parts(self, x: Tensor) -> list[Tensor]:
        """The inverse."""
        if len(self.leaves) == 1:
            return [x]
        flat_parts = x.split(self._sizes())
        return [y.view(shape) for y, shape in zip(flat_parts, self.shapes, strict=True)]

    def join_whole(self, weights: Sequence[Tensor]) -> Tensor:
        """Whole weights as :meth:`cut_whole` takes them."""
        if len(weights) == 1:
            return weights[0]
        n = axis_size(self.place.gather)
        rows: list[Tensor] = []
        for w, dim in zip(weights, self.dims, strict=True):
            rows.append(torch.stack(w.chunk(n, dim)).flatten(1))  # [rank, its part]
        # Side by side, then flat: what rank r is to have of all weights lies together.
        return torch.cat(rows, 1).flatten()

    def cut_whole(self, x: Tensor) -> list[Tensor]:
        """The whole weights in what was gathered."""
        if len(self.leaves) == 1:
            return [x]
        by_rank = x.view(axis_size(self.place.gather), -1)
        rows = by_rank.split(self._sizes(), 1)
        weights: list[Tensor] = []
        for row, shape, dim in zip(rows, self.shapes, self.dims, strict=True):
            weights.append(torch.cat(row.unflatten(1, shape).unbind(), dim))
        return weights

    def _sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]


def _bundles(values: Sequence[Tensor], places: Sequence[Placement]) -> list[_Bundle]:
    """Bundles of the leaves: the small ones of one kind as one, each other alone.

    Of one kind are only leaves that the same axes split: in the simulated mesh, what tp splits and
    what it does not would both vary over tp if they were one tensor.
    """
    # A dict keeps the order of first leaves, which is equal on all ranks: so is that of the
    # collectives.
    kinds: dict[Any, list[int]] = {}
    for i, (x, place) in enumerate(zip(values, places, strict=True)):
        small = place.gather and x.is_floating_point() and x.nbytes <= _SMALL
        # Where it is gathered along is left out: laid end to end, every part is one row.
        use = dataclasses.replace(place, dims=(), dim=0)
        key = (use, frozenset(place.axes), x.dtype, x.device)
        kinds.setdefault(key if small else i, []).append(i)
    bundles: list[_Bundle] = []
    for leaves in kinds.values():
        first = leaves[0]
        place = places[first]
        if len(leaves) > 1:
            place = dataclasses.replace(place, dim=0)
        bundles.append(
            _Bundle(
                leaves=tuple(leaves),
                place=place,
                dims=tuple(places[i].dim for i in leaves),
                shapes=tuple(values[i].shape for i in leaves),
                dtype=values[first].dtype,
            )
        )
    return bundles


def start_gather(params: Any, placements: Placements) -> _PendingTree:
    """Issues :func:`k31fn.parallel.fsdp.gather` and returns without waiting for it.

    Raises:
        ValueError: ``placements`` is not a tree like ``params``.
    """
    values, structure = tree.flatten(params)
    # By map, which refuses a tree that does not fit: leaves alone could pair wrongly.
    places = tree.leaves(tree.map(lambda _, place: place, params, placements))
    bundles = _bundles(values, places)
    pending: list[Pending] = []
    for b in bundles:
        joined = b.join_parts(b.pick(values))
        x, dtype, grad_dtype = spread(joined, b.place)
        pending.append(
            start(all_gather, x, b.place.gather, b.place.dim, dtype=dtype, grad_dtype=grad_dtype)
        )
    return _PendingTree(bundles, pending, structure)


def wait_gather(gathering: _PendingTree) -> Any:
    """The weights that :func:`start_gather` issued."""
    by_leaf: dict[int, Tensor] = {}
    # Waited for in the order in which they were issued, which is that of one stream.
    for b, pending in zip(gathering.bundles, gathering.pending, strict=True):
        by_leaf.update(zip(b.leaves, b.cut_whole(wait(pending)), strict=True))
    return tree.unflatten(gathering.structure, [by_leaf[i] for i in range(len(by_leaf))])


def start_scatter(grads: Any, placements: Placements, params: Any) -> _PendingTree:
    """Issues the transpose of gathering, on the gradients of what was gathered.

    Args:
        grads: like the gathered weights; None for leaves that have none: frozen, or not floating.
        placements: of these weights.
        params: the parts that were gathered.
    """
    values, structure = tree.flatten(grads, allow_none=True)
    parts = tree.leaves(params)
    bundles: list[_Bundle] = []
    pending: list[Pending] = []
    # Bundled by the parts, as the gather was. Leaves of one kind are all frozen or none is, so the
    # first one speaks for its bundle.
    for b in _bundles(parts, tree.leaves(placements)):
        first = b.leaves[0]
        if values[first] is None:
            continue
        joined = b.join_whole(b.pick(values))
        g = joined.to(reduce_dtype(parts[first], b.place))
        bundles.append(b)
        if b.place.gather:
            pending.append(start(psum_scatter, g, b.place.gather, b.place.dim))
        else:
            pending.append(start(psum, g, b.place.vary))
    return _PendingTree(bundles, pending, structure)


def wait_scatter(scattering: _PendingTree) -> Any:
    """The gradients of this rank's parts, which :func:`start_scatter` issued."""
    values: list[Tensor | None] = [None] * scattering.structure.num_leaves
    for b, pending in zip(scattering.bundles, scattering.pending, strict=True):
        g = wait(pending)
        if b.place.gather:
            # Over replicas after the scatter, which leaves 1 / n of the bytes.
            g = psum(g, b.place.vary)
        g = g.to(b.dtype)
        for i, part in zip(b.leaves, b.cut_parts(g), strict=True):
            values[i] = part
    return tree.unflatten(scattering.structure, values)
