"""What becomes of one rank's part of a weight where the model uses it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from k31fn import precision, tree
from k31fn.autodiff import stop_gradient
from k31fn.parallel.axis import Axis
from k31fn.parallel.collectives import all_gather, pvary
from k31fn.parallel.mesh import MeshAxes
from k31fn.parallel.partition import AxisRules, Partition, broadcast, resolve

__all__ = [
    "Placement",
    "Placements",
    "gather",
    "gather_only",
    "placements",
    "reduce_dtype",
    "spread",
]

_RULES = AxisRules()


@dataclass(frozen=True)
class Placement:
    """Where the parts of one weight are, and what a use of it does.

    Attributes:
        dims: atomic axes that split each dimension, outermost first.
        dim: along which it is gathered.
        gather: data axes over which; the last ones of ``dims[dim]``. ``()``: it is not.
        vary: data axes whose ranks hold the same part, and ``partial``.
        partial: axes for compute that split the weight of which this is a factor, whose ranks hold
            the same part of the factor: a rank's use of it is a part of the whole use.
        dtype: in which it travels and is used; None: that of the parameter.
        grad_dtype: in which its gradient is summed, at least; None: that of the cotangent.
        frozen: that it has no gradient: nothing is computed or sent for it.
    """

    dims: tuple[tuple[Axis, ...], ...]
    dim: int = 0
    gather: tuple[Axis, ...] = ()
    vary: tuple[Axis, ...] = ()
    partial: tuple[Axis, ...] = ()
    dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    frozen: bool = False

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes whose ranks hold different parts."""
        return tuple(a for split in self.dims for a in split)


Placements = Any
"""A tree of :class:`Placement` with the structure of the parameters."""


@runtime_checkable
class _PlacedSpec(Protocol):
    """The part of a ``ParamSpec`` that placing reads."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def tags(self) -> frozenset[str]: ...
    @property
    def beside(self) -> tuple[str, ...]: ...


def placements(
    specs: Any,
    partition: Partition,
    axes: MeshAxes,
    *,
    compute: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
    rules: AxisRules = _RULES,
) -> Placements:
    """The :class:`Placement` of each leaf of a tree of ParamSpecs.

    Args:
        specs: the declarations; leaves tagged ``frozen`` get no gradient.
        partition: of the same parameters (:func:`~k31fn.parallel.partition`).
        axes: of this rank, as ``shard_map`` hands them out.
        compute: dtype of weights in use; float32 islands stay at least float32. None: that of the
            parameters.
        reduce: dtype in which gradients are summed, at least; None: that of the cotangents.
        rules: by which the partition was made.

    Raises:
        ValueError: data axes that split two dimensions of a weight, or that are not the innermost
            of their dimension in the mesh's order: gathered, its parts would be out of order. Names
            the weight.
    """
    paths, structure = tree.paths(specs), tree.flatten(specs)[1]
    rows = zip(paths, tree.leaves(specs), broadcast(partition, specs), strict=True)
    found = []
    for path, spec, p in rows:
        try:
            dims, beside = resolve(p, axes, len(spec.shape)), _split_beside(spec, axes, rules)
            place = _place(dims, axes, "expert" in spec.tags, beside)
        except ValueError as e:
            raise ValueError(f"{path}: {p}: {e}") from e
        dtype = None if compute is None else precision.storage_dtype(spec.dtype, compute)
        found.append(
            dataclasses.replace(place, dtype=dtype, grad_dtype=reduce, frozen="frozen" in spec.tags)
        )
    return tree.unflatten(structure, found)


def _split_beside(spec: _PlacedSpec, axes: MeshAxes, rules: AxisRules) -> tuple[Axis, ...]:
    return tuple(a for name in spec.beside for a in axes.view(*rules.views()[name]))


def _place(
    dims: tuple[tuple[Axis, ...], ...], axes: MeshAxes, expert: bool, beside: tuple[Axis, ...] = ()
) -> Placement:
    spread = [a for a in axes.data if not (expert and a in axes.ep)]
    split = [i for i, own in enumerate(dims) if any(a in spread for a in own)]
    if len(split) > 1:
        raise ValueError(f"data axes split its dimensions {split}; spread a weight along one")
    gathered = tuple(a for i in split for a in dims[i] if a in spread)
    in_order = tuple(a for a in axes.atoms if a in gathered)
    if split and dims[split[0]][-len(gathered) :] != in_order:
        names = [a.name for a in in_order]
        raise ValueError(f"data axes {names} must come last in their dimension, in this order")
    held = [a for own in dims for a in own]
    partial = tuple(a for a in beside if a not in held)
    vary = tuple(a for a in axes.atoms if a not in held and (a in axes.data or a in partial))
    return Placement(dims, split[0] if split else 0, gathered, vary, partial)


def gather(params: Any, placements: Placements) -> Any:
    """Weights as the layers use them, out of this rank's parts; gradients come back as parts,
    summed.

    Raises:
        ValueError: ``placements`` is not a tree like ``params``.
    """
    return tree.map(_gather_leaf, params, placements)


def _gather_leaf(x: Tensor, place: Placement) -> Tensor:
    x, dtype, grad_dtype = spread(x, place)
    return all_gather(x, place.gather, place.dim, dtype=dtype, grad_dtype=grad_dtype)


def spread(x: Tensor, place: Placement) -> tuple[Tensor, torch.dtype, torch.dtype]:
    """A part, varying over all data axes; the dtype in which it is gathered, and that in which its
    gradient is summed.

    It varies first and is gathered then: so a gradient is scattered first, and summed over replicas
    part by part.
    """
    dtype, grad_dtype = place.dtype or x.dtype, reduce_dtype(x, place)
    x = stop_gradient(x) if place.frozen else x
    return (pvary(x.to(grad_dtype), place.vary) if place.vary else x), dtype, grad_dtype


def reduce_dtype(x: Tensor, place: Placement) -> torch.dtype:
    """In which the gradient of the part ``x`` is summed."""
    if (
        place.grad_dtype is None
        or place.frozen
        or not x.is_floating_point()
        or x.dtype.itemsize < 2
    ):
        return x.dtype
    return torch.promote_types(x.dtype, place.grad_dtype)


def gather_only(placements: Placements) -> Placements:
    """The same without ``vary``: for the inside of a step that :func:`enter_step` began."""
    return tree.map(lambda place: dataclasses.replace(place, vary=()), placements)
