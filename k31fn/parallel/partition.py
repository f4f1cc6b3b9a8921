"""Partition specs: which mesh axes split each dimension of a tensor, and what a rank then holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from k31fn import tree
from k31fn.parallel.axis import Axis
from k31fn.parallel.mesh import Coordinate, Mesh, MeshAxes

__all__ = [
    "AxisRules",
    "P",
    "Partition",
    "broadcast",
    "local_shape",
    "partition",
    "resolve",
    "tile",
    "tiles",
]

Views = tuple[str, ...]
Tile = tuple[slice, ...]


@dataclass(frozen=True, init=False)
class P:
    """One entry per dimension: None (whole), a view (``"tp"``) or a tuple of views, outermost
    first.

    Dimensions after the last entry are whole, so ``P()`` is a tensor that every rank holds.
    """

    dims: tuple[Views, ...]

    def __init__(self, *dims: str | Sequence[str] | None) -> None:
        views = tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in dims)
        object.__setattr__(self, "dims", views)

    def __repr__(self) -> str:
        shown = [repr(d[0]) if len(d) == 1 else repr(d) if d else "None" for d in self.dims]
        return f"P({', '.join(shown)})"


def resolve(spec: P, axes: MeshAxes, ndim: int) -> tuple[tuple[Axis, ...], ...]:
    """The atomic axes of each of ``ndim`` dimensions.

    Raises:
        ValueError: more entries than dimensions, an unknown view, or a mesh axis used twice in the
            tensor.
    """
    if len(spec.dims) > ndim:
        raise ValueError(
            f"{spec} has {len(spec.dims)} entries for a tensor of {ndim} dimensions; drop the "
            "last ones"
        )
    # in the order of the spec, not the mesh's: P(("tp", "fsdp")) leaves each tp rank a contiguous
    # block when gathered
    found = [tuple(a for view in views for a in axes.view(view)) for views in spec.dims]
    found += [()] * (ndim - len(found))
    names = [a.name for dim in found for a in dim]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ValueError(
            f"{spec} uses mesh axis {twice[0]!r} twice in one tensor; split one dimension by it"
        )
    return tuple(found)


def local_shape(spec: P, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """What one rank holds of a global ``shape``.

    Raises:
        ValueError: a dimension does not divide evenly.
    """
    dims = resolve(spec, mesh.axes(), len(shape))
    return tuple(_divide(spec, n, axes) for n, axes in zip(shape, dims, strict=True))


def tile(spec: P, shape: Sequence[int], mesh: Mesh, coordinate: Coordinate) -> Tile:
    """The slices of a global ``shape`` that the rank at ``coordinate`` holds."""
    slices = []
    for n, axes in zip(shape, resolve(spec, mesh.axes(), len(shape)), strict=True):
        size, index = _divide(spec, n, axes), 0
        for axis in axes:
            index = index * axis.size + coordinate[axis.name]
        slices.append(slice(index * size, (index + 1) * size))
    return tuple(slices)


def tiles(
    specs: Any, partition: Any, mesh: Mesh, coordinate: Coordinate
) -> Callable[[str, Any], Tile]:
    """The ``tile=`` argument of :func:`k31fn.params.init` for one rank: it draws its own part of
    each weight only.
    """
    paths = tree.paths(specs)
    by_path = dict(zip(paths, broadcast(partition, specs), strict=True))
    return lambda path, spec: tile(by_path[path], spec.shape, mesh, coordinate)


def broadcast(prefix: Any, full: Any) -> list[P]:
    """One :class:`P` per leaf of ``full``; a P in ``prefix`` stands for its whole subtree.

    Raises:
        ValueError: ``prefix`` is no prefix of ``full``, or holds something else than a P.
    """
    specs, structure = tree.flatten(prefix)
    if wrong := [s for s in specs if not isinstance(s, P)]:
        raise ValueError(
            f"partition specs hold {wrong[0]!r}; every leaf is a P, such as P('tp') or P()"
        )
    try:
        subtrees = structure.flatten_up_to(full)
    except ValueError as e:
        raise ValueError(f"partition specs do not fit the tree: {e}") from e
    return [
        spec for spec, subtree in zip(specs, subtrees, strict=True) for _ in tree.leaves(subtree)
    ]


@runtime_checkable
class _PartitionedSpec(Protocol):
    """The part of a ``ParamSpec`` that partitioning reads."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def tags(self) -> frozenset[str]: ...


Partition = Any
"""A tree of :class:`P` with the structure of the parameters."""


@dataclass(frozen=True)
class AxisRules:
    """Which views split each logical axis of the parameters.

    Attributes:
        spread: views over which each weight is split further, for memory only (FSDP): along the
            first dimension that then divides evenly; a weight that has none stays whole on them.
        expert_spread: the same for leaves tagged ``expert``.
    """

    hidden: Views = ()
    heads: Views = ("tp",)
    kv: Views = ()
    rank: Views = ()
    mlp: Views = ("tp",)
    experts: Views = ("ep",)
    expert_mlp: Views = ("etp",)
    latent: Views = ()
    vocab: Views = ("tp",)
    head_dim: Views = ()
    conv: Views = ()
    spread: Views = ("fsdp", "cp")
    expert_spread: Views = ("efsdp",)

    def views(self) -> Mapping[str, Views]:
        """By logical axis."""
        names = [
            f.name for f in dataclasses.fields(self) if f.name not in ("spread", "expert_spread")
        ]
        return {name: getattr(self, name) for name in names} | {"": ()}


def partition(specs: Any, rules: AxisRules, mesh: Mesh) -> Partition:
    """The :class:`P` of each leaf of a tree of ParamSpecs.

    Raises:
        ValueError: a logical axis that the rules do not know, one that does not divide evenly over
            its views, or a mesh axis used twice in one weight; names the weight.
    """
    return tree.map_with_path(lambda path, spec: _leaf_partition(path, spec, rules, mesh), specs)


def _leaf_partition(path: str, spec: _PartitionedSpec, rules: AxisRules, mesh: Mesh) -> P:
    views, axes = rules.views(), mesh.axes()
    if unknown := [a for a in spec.axes if a not in views]:
        raise ValueError(
            f"{path}: logical axis {unknown[0]!r} unknown to AxisRules; known: {', '.join(views)}"
        )
    dims = [views[a] for a in spec.axes]
    try:
        local = list(local_shape(P(*dims), spec.shape, mesh))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    spread = rules.expert_spread if "expert" in spec.tags else rules.spread
    ranks = math.prod(a.size for a in axes.view(*spread))
    if ranks > 1:
        fitting = [i for i, n in enumerate(local) if n % ranks == 0]
        if fitting:
            dims[fitting[0]] = (*dims[fitting[0]], *spread)
    try:
        resolve(P(*dims), axes, len(dims))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    return P(*dims)


def _divide(spec: P, size: int, axes: tuple[Axis, ...]) -> int:
    ranks = math.prod(a.size for a in axes)
    if size % ranks:
        names = " x ".join(a.name for a in axes)
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        near = [n for n in divisors if n < ranks][-1:] + [n for n in divisors if n > ranks][:1]
        raise ValueError(
            f"{spec}: {names} = {ranks} ranks do not divide a dimension of {size}; nearest: "
            f"{', '.join(map(str, near))}"
        )
    return size // ranks
