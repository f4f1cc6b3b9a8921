"""Clipping of gradients by their global norm."""

from __future__ import annotations

from typing import Any

import torch

from k31fn import precision, tree
from k31fn.parallel.axis import Axes, Axis, active
from k31fn.parallel.collectives import pmax, psum
from k31fn.parallel.fsdp.placement import Placements
from k31fn.typing import Float, Tensor

__all__ = ["clip_by_global_norm", "clip_factor", "global_norm", "leaf_norms"]

_WIDENED = 2**26  # elements of a narrow leaf whose norm is taken at once: 256 MiB in float32


def global_norm(
    grads: Any,
    specs: Any = (),
    *,
    placements: Placements = (),
    stages: Axes = (),
    p: float | int = 2,
    empty: Float[Tensor, ""] | None = None,
    norms: Any = (),
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
        norms: :func:`leaf_norms` of the gradients with the same ``p``, where they are known.

    Raises:
        ValueError: no leaf counts and there is no ``empty``, or another ``p``.
    """
    if p not in (2, float("inf")):
        raise ValueError(f"p={p} must be 2 or inf")
    frozen = {path for path, spec in tree.flatten_with_paths(specs) if "frozen" in spec.tags}
    places = dict(tree.flatten_with_paths(placements))
    # Leaves that are split over the same axes are joined before ranks exchange anything: one
    # collective for each such set. Axes that a leaf is not split over, whose ranks have the same
    # part, are not among them, so no element counts twice.
    norms_by_axes: dict[tuple[Axis, ...], list[Tensor]] = {}
    known = dict(tree.flatten_with_paths(norms))
    for path, g in tree.flatten_with_paths(grads):
        if path in frozen:
            continue
        axes = places[path].axes if placements else ()
        norm = known[path] if known else _leaf_norm(g, p)
        key = tuple(sorted(axes, key=lambda axis: axis.name))  # in whatever order it is split
        norms_by_axes.setdefault(key, []).append(norm)
    of_sets: list[Tensor] = []
    for axes, of_axes in norms_by_axes.items():
        of_sets.append(_over_ranks(axes, _joined(of_axes, p), p))
    if empty is not None:
        of_sets.append(empty)
    if not of_sets:
        raise ValueError("grads: no leaf to take the norm of")
    return _over_ranks(active(stages), _joined(of_sets, p), p)


def leaf_norms(grads: Any, *, p: float | int = 2) -> Any:
    """The p-norm of each leaf, of what this rank holds of it: a tree like the gradients."""
    return tree.map(lambda g: _leaf_norm(g, p), grads)


def _leaf_norm(g: Tensor, p: float | int) -> Float[Tensor, ""]:
    """The norm of one leaf, in one pass."""
    # In float32 at least: a sum of squares in bfloat16 stops growing after some hundred terms.
    dtype = precision.island(g.dtype)
    if g.dtype == dtype or g.numel() <= _WIDENED:
        return torch.linalg.vector_norm(g, ord=p, dtype=dtype)
    # a CPU widens what it is given
    norms: list[Tensor] = []
    for index in precision.slices(g.shape, _WIDENED):
        norms.append(torch.linalg.vector_norm(g[index], ord=p, dtype=dtype))
    return _joined(norms, p)


def _joined(norms: list[Tensor], p: float | int) -> Float[Tensor, ""]:
    """The norm of all parts, out of theirs."""
    device = norms[0].device  # some leaves may be elsewhere, such as on the host
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), ord=p)


def _over_ranks(axes: tuple[Axis, ...], norm: Tensor, p: float | int) -> Float[Tensor, ""]:
    """The norm of the parts of all ranks."""
    if not axes:
        return norm
    if p == 2:
        return psum(norm.square(), axes).sqrt()
    # Some backends' maximum drops NaN; the caller asks for one thing only, whether it is finite.
    return pmax(norm.nan_to_num(nan=float("inf"), posinf=float("inf")), axes)


def clip_factor(norm: Float[Tensor, ""], max_norm: float) -> Float[Tensor, ""]:
    """``min(1, max_norm / (norm + 1e-6))``: what clipping multiplies gradients of this norm with,
    as an update takes it (``scale=``).

    Raises:
        ValueError: ``max_norm`` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be positive; inf does not clip")
    # 1e-6, torch's: a gradient of zeros is not divided by zero.
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


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
    twice. Without a second tree of gradients: give :func:`clip_factor` to the update.

    Raises:
        ValueError: ``max_norm`` is not positive.
    """
    norm = global_norm(grads, specs, placements=placements, stages=stages, p=p, empty=empty)
    scale = clip_factor(norm, max_norm)
    # Multiplied also by 1: whether to clip is known on the device only.
    return tree.map(lambda g: g * scale, grads), norm
