"""Parameters over the data axes: FSDP, HSDP and DDP as one rule per leaf.

A :class:`Placement` says what becomes of one rank's part of a weight where the model uses it. Along
the axes that spread it for memory only (``fsdp``, ``cp``; ``efsdp`` for experts) it is gathered,
and its gradient reduce-scattered (ZeRO-3, Rajbhandari et al. 2020, arXiv 1910.02054); along the
data axes on which all ranks hold the same part (``dp``, and all of them for a weight too small to
spread) it is marked as varying, and its gradient summed. So it is over the axes that split a weight
of which it is a low-rank factor, and do not split the factor itself::

    w = all_gather(pvary(part, vary), gather, dim)   in the compute dtype; the gradient in
                                                       the reduce dtype

What splits a weight for compute (``tp``, ``ep``, ``etp``) stays split: that is the layer's
business.

:func:`gather` does all of it, for one use; :mod:`k31fn.parallel.bundle` does it ahead of the use. A
training step sums over replicas once, however many micro-batches and layers it has::

    held = enter_step(params, places)                   # pvary
    for batch in batches:                               # the model gathers, layer by layer
        grads += value_and_grad(loss)(held, batch, gathers(places))
    grads = sum_gradients(grads, places)                # psum
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from k31fn import precision, tree
from k31fn.autodiff import stop_gradient
from k31fn.parallel.axis import Axis
from k31fn.parallel.collectives import all_gather, psum, pvary
from k31fn.parallel.mesh import MeshAxes
from k31fn.parallel.partition import AxisRules, Partition, broadcast, resolve

__all__ = [
    "Placement",
    "Placements",
    "enter_step",
    "gather",
    "gathers",
    "placements",
    "sum_gradients",
]

_RULES = AxisRules()
_BUCKET = (
    2**26
)  # bytes of gradients that one psum takes at most, besides a single leaf that is larger


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
class _Declared(Protocol):
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


def _split_beside(spec: _Declared, axes: MeshAxes, rules: AxisRules) -> tuple[Axis, ...]:
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


def gathers(placements: Placements) -> Placements:
    """The same without ``vary``: for the inside of a step that :func:`enter_step` began."""
    return tree.map(lambda place: dataclasses.replace(place, vary=()), placements)


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
        )  # see bundle.py
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
