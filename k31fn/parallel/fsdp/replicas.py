"""Sums over the ranks that hold the same part of a weight: once per step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k31fn import tree
from k31fn.parallel.collectives import psum, pvary
from k31fn.parallel.fsdp.placement import Placement, Placements, reduce_dtype

__all__ = ["enter_step", "sum_gradients"]

_BUCKET = 2**26  # bytes of gradients that one psum takes at most, besides a larger single leaf


def enter_step(params: Any, placements: Placements) -> Any:
    """This rank's parts as a step differentiates them: varying over all data axes, at least in the
    reduce dtype.

    So gradients are summed over micro-batches in that dtype, and over replicas only by
    :func:`sum_gradients`.
    """

    def enter(x: Tensor, place: Placement) -> Tensor:
        # Cast first: micro-batches add up in the dtype of what is differentiated.
        return pvary(x.to(reduce_dtype(x, place)), place.vary)

    return tree.map(enter, params, placements)


def sum_gradients(grads: Any, placements: Placements) -> Any:
    """Sums what a step's micro-batches gave over the ranks that hold the same part, many leaves at
    a time.

    Args:
        grads: like the parameters that :func:`enter_step` returned; leaves may be absent.
        placements: of all parameters.
    """
    values, structure = tree.flatten(grads)
    # By path: grads of the trained weights alone are a tree with holes, placements have all.
    places = dict(tree.flatten_with_paths(placements))
    kinds: dict[Any, list[int]] = {}
    for i, (path, g) in enumerate(zip(tree.paths(grads), values, strict=True)):
        place = places[path]
        if place.vary:
            # Of one kind are leaves that the same axes split, as for a fused gather: in the
            # simulated mesh unlike ones cannot be one tensor.
            kind = (place.vary, frozenset(place.axes), g.dtype, g.device)
            kinds.setdefault(kind, []).append(i)
    for (vary, *_), leaves in kinds.items():
        for bucket in _buckets(leaves, values):
            rows = [values[i].flatten() for i in bucket]
            flat = psum(torch.cat(rows) if len(rows) > 1 else rows[0], vary)
            parts = flat.split([len(row) for row in rows])
            for i, part in zip(bucket, parts, strict=True):
                values[i] = part.view(values[i].shape)
    return tree.unflatten(structure, values)


def _buckets(leaves: list[int], values: list[Tensor]) -> list[list[int]]:
    """The leaves in order, as many together as :data:`_BUCKET` bytes hold.

    Each bucket is copied for its sum, so it bounds what that costs in memory.
    """
    buckets: list[list[int]] = []
    size = 0
    for i in leaves:
        if not buckets or size + values[i].nbytes > _BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append(i)
        size += values[i].nbytes
    return buckets
