"""Clipping of gradients by their global norm."""

from __future__ import annotations

from typing import Any

import torch

from k31fn import precision, tree
from k31fn.parallel.axis import Axes, Axis, active
from k31fn.parallel.collectives import pmax, psum
from k31fn.parallel.fsdp.placement import Placements
from k31fn.typing import Float, Tensor

__all__ = ["clip_by_global_norm", "global_norm"]


def global_norm(
    grads: Any,
    specs: Any = (),
    *,
    placements: Placements = (),
    stages: Axes = (),
    p: float | int = 2,
    empty: Float[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """The p-norm of all elements of all leaves, on the device, accumulated in at least float32.

    On a mesh every element counts once, whatever its leaf is split over and however many ranks hold
    it, and all ranks get the same bits.

    Args:
        grads: gradients; leaves may be absent.
        specs: the tree of ParamSpecs; leaves that it tags ``frozen`` do not count. ``()``: all
            count.
        placements: where the parts are that this rank holds (:mod:`k31fn.parallel.fsdp`), of all
            parameters; gradients are summed over ranks that hold the same part. ``()``: leaves are
            whole.
        stages: pipeline axes, whose ranks hold other leaves; of a leaf that two of them hold, one
            leaves it out.
        p: 2, or inf for the largest magnitude (inf also if an element is NaN on a mesh).
        empty: zero, of the norm's dtype and device: what a stage has of which no leaf counts.

    Raises:
        ValueError: no leaf counts and there is no ``empty``, or another ``p``.
    """
    if p not in (2, float("inf")):
        raise ValueError(f"p={p} must be 2 or inf")
    frozen = {path for path, spec in tree.flatten_with_paths(specs) if "frozen" in spec.tags}
    counted = [(path, g) for path, g in tree.flatten_with_paths(grads) if path not in frozen]
    if not counted and empty is None:
        raise ValueError("grads: no leaf to take the norm of")
    places = dict(tree.flatten_with_paths(placements))
    split: dict[tuple[Axis, ...], list[Tensor]] = {}
    for path, g in counted:
        axes = places[path].axes if placements else ()
        norm = torch.linalg.vector_norm(g, ord=p, dtype=precision.island(g.dtype))
        split.setdefault(tuple(sorted(axes, key=lambda a: a.name)), []).append(norm)
    norms = [_over(axes, _of(own, p), p) for axes, own in split.items()]
    norms += [] if empty is None else [empty]
    return _over(active(stages), _of(norms, p), p)


def _of(norms: list[Tensor], p: float | int) -> Float[Tensor, ""]:
    """The norm of the parts that have these norms."""
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), ord=p)


def _over(axes: tuple[Axis, ...], norm: Tensor, p: float | int) -> Float[Tensor, ""]:
    """The norm of the parts of all ranks."""
    if not axes:
        return norm
    if p == 2:
        return psum(norm.square(), axes).sqrt()
    return pmax(
        norm.nan_to_num(nan=float("inf"), posinf=float("inf")), axes
    )  # some backends' maximum drops NaN


def clip_by_global_norm(
    grads: Any,
    max_norm: float,
    *,
    specs: Any = (),
    placements: Placements = (),
    stages: Axes = (),
    p: float | int = 2,
    empty: Float[Tensor, ""] | None = None,
) -> tuple[Any, Float[Tensor, ""]]:
    """``(grads, norm)``: gradients times ``min(1, max_norm / (norm + 1e-6))``, and the norm before.

    If a gradient is infinite or NaN so is the norm, and the returned gradients are useless: skip
    the step (``skip=non_finite(norm)``). Keywords as in :func:`global_norm`. Not in place: two
    leaves of a gradient tree may be one tensor (those of a and b in a + b), which would be scaled
    twice.

    Raises:
        ValueError: ``max_norm`` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be positive; inf does not clip")
    norm = global_norm(grads, specs, placements=placements, stages=stages, p=p, empty=empty)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return tree.map(lambda g: g * scale, grads), norm
