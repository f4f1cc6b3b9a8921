"""What becomes of one rank's part of a weight where the model uses it."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from k31fn import precision, tree
from k31fn.autodiff.custom_vjp import detached
from k31fn.parallel.axis import Axis, axis_names
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
    """The place of one weight: where its parts are, and what a use of it does.

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
        return tuple(itertools.chain(*self.dims))


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
    adds: bool = True,
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
        adds: whether gradients of micro-batches are added. Where they are not, and ranks have
            nothing to sum either, a gradient is left in its parameter's dtype.
        rules: by which the partition was made.

    Raises:
        ValueError: data axes that split two dimensions of a weight, or that are not the innermost
            of their dimension in the mesh's order: gathered, its parts would be out of order. Names
            the weight.
    """
    leaves, structure = tree.flatten(specs)
    rows = zip(tree.paths(specs), leaves, broadcast(partition, specs), strict=True)
    places: list[Placement] = []
    for path, spec, p in rows:
        try:
            dims = resolve(p, axes, len(spec.shape))
            place = _place(dims, axes, "expert" in spec.tags, _split_beside(spec, axes, rules))
        except ValueError as e:
            raise ValueError(f"{path}: {p}: {e}") from e
        dtype = None if compute is None else precision.storage_dtype(spec.dtype, compute)
        # a wider copy of a narrow model, and of its gradients, would be for nothing
        grad_dtype = reduce if adds or place.gather or place.vary else None
        frozen = "frozen" in spec.tags
        places.append(dataclasses.replace(place, dtype=dtype, grad_dtype=grad_dtype, frozen=frozen))
    return tree.unflatten(structure, places)


def _split_beside(spec: _PlacedSpec, axes: MeshAxes, rules: AxisRules) -> tuple[Axis, ...]:
    """The axes that split the weight of which this one is a factor."""
    split: list[Axis] = []
    for name in spec.beside:
        split += axes.view(*rules.views()[name])
    return tuple(split)


def _place(
    dims: tuple[tuple[Axis, ...], ...], axes: MeshAxes, expert: bool, beside: tuple[Axis, ...]
) -> Placement:
    # Ranks of ep hold other experts, not other parts of one: an expert is not gathered over them.
    data = [a for a in axes.data if not (expert and a in axes.ep)]
    gathered_dims = [i for i, split in enumerate(dims) if not set(split).isdisjoint(data)]
    if len(gathered_dims) > 1:
        raise ValueError(
            f"data axes split its dimensions {gathered_dims}; spread a weight along one"
        )
    dim = gathered_dims[0] if gathered_dims else 0
    gathered: tuple[Axis, ...] = ()
    if gathered_dims:
        gathered = tuple(axis for axis in dims[dim] if axis in data)
        in_order = axes.in_order(gathered)
        # A gather lays parts end to end in the order of ranks. Only with these axes innermost are
        # they neighbours in what tp and ep leave of the dimension.
        if dims[dim][-len(gathered) :] != in_order:
            names = list(axis_names(in_order))
            raise ValueError(f"data axes {names} must come last in their dimension, in this order")
    splitting = list(itertools.chain(*dims))
    partial = tuple(a for a in beside if a not in splitting)
    # A factor that is whole on ranks whose columns differ gets a part of its gradient on each, as
    # from a part of the batch: the parts are to be summed.
    vary = axes.in_order({*axes.data, *partial}.difference(splitting))
    return Placement(dims, dim, gathered, vary, partial)


def gather(params: Any, placements: Placements) -> Any:
    """Makes weights as the layers use them of this rank's parts; gradients come back as parts,
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
    dtype = place.dtype or x.dtype
    grad_dtype = reduce_dtype(x, place)
    if place.frozen:
        x = detached(x)  # so its transpose, a reduce-scatter, is never issued
    if place.vary:
        # In the reduce dtype before it varies, for the cotangent of pvary is summed in the dtype
        # of its operand.
        x = pvary(x.to(grad_dtype), place.vary)
    return x, dtype, grad_dtype


def reduce_dtype(x: Tensor, place: Placement) -> torch.dtype:
    """The dtype in which the gradient of the part ``x`` is summed."""
    # What has no gradient keeps its dtype: integers, frozen weights, and floats of one byte, which
    # are codes of a quantised weight.
    has_grad = x.is_floating_point() and x.dtype.itemsize > 1 and not place.frozen
    if place.grad_dtype is None or not has_grad:
        return x.dtype
    return torch.promote_types(x.dtype, place.grad_dtype)


def gather_only(placements: Placements) -> Placements:
    """The placements without ``vary``: for the inside of a step that :func:`enter_step` began."""
    return tree.map(lambda place: dataclasses.replace(place, vary=()), placements)
