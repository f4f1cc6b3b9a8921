"""Clipping of gradients by their global norm."""

from __future__ import annotations

from typing import Any

import torch

from k31fn import precision, tree
from k31fn.typing import Float, Tensor

__all__ = ["clip_by_global_norm", "global_norm"]


def global_norm(grads: Any, specs: Any = ()) -> Float[Tensor, ""]:
    """The Euclidean norm of all elements of all leaves, on the device, accumulated in at least float32.

    Args:
        grads: gradients.
        specs: the tree of ParamSpecs; leaves that it tags ``frozen`` do not count. ``()``: all count.

    Raises:
        ValueError: no leaf counts.
    """
    frozen = {path for path, spec in tree.flatten_with_paths(specs) if "frozen" in spec.tags}
    counted = [g for p, g in tree.flatten_with_paths(grads) if p not in frozen] if frozen else tree.leaves(grads)
    if not counted:
        raise ValueError("grads: no leaf to take the norm of")
    norms = [torch.linalg.vector_norm(g, dtype=precision.island(g.dtype)) for g in counted]
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))


def clip_by_global_norm(grads: Any, max_norm: float, *, specs: Any = ()) -> tuple[Any, Float[Tensor, ""]]:
    """``(grads, norm)``: gradients times ``min(1, max_norm / (norm + 1e-6))``, and the norm before.

    If a gradient is infinite or NaN so is the norm, and the returned gradients are useless: skip the step
    (``skip=non_finite(norm)``). ``specs`` as in :func:`global_norm`. Not in place: two leaves of a gradient tree may be
    one tensor (those of a and b in a + b), which would be scaled twice.

    Raises:
        ValueError: ``max_norm`` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be positive; inf does not clip")
    norm = global_norm(grads, specs)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return tree.map(lambda g: g * scale, grads), norm
