"""Sums over the ranks that hold the same part of a weight: once per step."""

from __future__ import annotations

from typing import Any

import torch

from k31fn import tree
from k31fn.parallel.collectives import psum, pvary
from k31fn.parallel.fsdp.placement import Placements, reduce_dtype

__all__ = ["enter_step", "sum_gradients"]

_BUCKET = 2**26  # bytes of gradients that one psum takes at most, besides a larger single leaf


def enter_step(params: Any, placements: Placements) -> Any:
    """This rank's parts as a step differentiates them: varying over all data axes, at least in the
    reduce dtype.

    So gradients are summed over micro-batches in that dtype, and over replicas only by
    :func:`sum_gradients`.
    """
    return tree.map(
        lambda x, place: pvary(x.to(reduce_dtype(x, place)), place.vary), params, placements
    )


def sum_gradients(grads: Any, placements: Placements) -> Any:
    """Sums what a step's micro-batches gave over the ranks that hold the same part, many leaves at
    a time.

    Args:
        grads: like the parameters that :func:`enter_step` returned; leaves may be absent.
        placements: of all parameters.
    """
    values, structure = tree.flatten(grads)
    by_path = dict(tree.flatten_with_paths(placements))
    buckets: dict[Any, list[list[int]]] = {}
    for i, (path, g) in enumerate(zip(tree.paths(grads), values, strict=True)):
        place = by_path[path]
        if not place.vary:
            continue
        kind = buckets.setdefault(
            (place.vary, frozenset(place.axes), g.dtype, g.device), [[]]
        )  # see _bundles in fused_gather.py
        if kind[-1] and sum(values[j].nbytes for j in kind[-1]) + g.nbytes > _BUCKET:
            kind.append([])
        kind[-1].append(i)
    for (vary, *_), kind in buckets.items():
        for bucket in kind:
            rows = [values[i].flatten() for i in bucket]
            flat = psum(torch.cat(rows) if len(rows) > 1 else rows[0], vary)
            for i, part in zip(bucket, flat.split([len(row) for row in rows]), strict=True):
                values[i] = part.view(values[i].shape)
    return tree.unflatten(structure, values)
