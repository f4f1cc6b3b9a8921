"""Partition specs: which mesh axes split each dimension of a tensor, and what a rank then holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from k31fn import tree
from k31fn.parallel.axis import Axis, axis_names, num_ranks
from k31fn.parallel.mesh import Coordinate, Mesh, MeshAxes, nearest_divisors, row_major

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
        views: list[Views] = []
        for dim in dims:
            if dim is None:
                views.append(())
            else:
                views.append((dim,) if isinstance(dim, str) else tuple(dim))
        # Frozen, so that a P is a key of a dict; the dataclass's own __init__ would take one tuple.
        object.__setattr__(self, "dims", tuple(views))

    def __repr__(self) -> str:
        entries: list[str] = []
        for views in self.dims:
            if not views:
                entries.append("None")
            else:
                entries.append(repr(views[0] if len(views) == 1 else views))
        return f"P({', '.join(entries)})"


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
    dims: list[tuple[Axis, ...]] = []
    used: set[str] = set()
    for views in spec.dims:
        # In the order of the spec, not the mesh's: P(("tp", "fsdp")) leaves each tp rank a
        # contiguous block when gathered.
        split: list[Axis] = []
        for view in views:
            split += axes.view(view)
        dims.append(tuple(split))
        for axis in split:
            # Its ranks would hold only the diagonal tiles, and nobody the others.
            if axis.name in used:
                raise ValueError(
                    f"{spec} uses mesh axis {axis.name!r} twice in one tensor; split one dimension "
                    "by it"
                )
            used.add(axis.name)
    dims += [()] * (ndim - len(dims))
    return tuple(dims)


def local_shape(spec: P, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """The shape that one rank holds of a global ``shape``.

    Raises:
        ValueError: a dimension does not divide evenly.
    """
    dims = resolve(spec, mesh.axes(), len(shape))
    sizes: list[int] = []
    for size, axes in zip(shape, dims, strict=True):
        sizes.append(_divide(spec, size, axes))
    return tuple(sizes)


def tile(spec: P, shape: Sequence[int], mesh: Mesh, coordinate: Coordinate) -> Tile:
    """The slices of a global ``shape`` that the rank at ``coordinate`` holds."""
    slices: list[slice] = []
    for n, axes in zip(shape, resolve(spec, mesh.axes(), len(shape)), strict=True):
        size = _divide(spec, n, axes)
        index, _ = row_major(axes, coordinate)
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
    for spec in specs:
        if not isinstance(spec, P):
            raise ValueError(
                f"partition specs hold {spec!r}; every leaf is a P, such as P('tp') or P()"
            )
    try:
        subtrees = structure.flatten_up_to(full)
    except ValueError as e:
        raise ValueError(f"partition specs do not fit the tree: {e}") from e
    by_leaf: list[P] = []
    for spec, subtree in zip(specs, subtrees, strict=True):
        by_leaf += [spec] * len(tree.leaves(subtree))
    return by_leaf


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
    """The views that split each logical axis of the parameters.

    A layer with an axis of its own has a subclass with a field for it, ``channel: Views = ()``.

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
        """The views of each logical axis."""
        views: dict[str, Views] = {}
        for field in dataclasses.fields(self):
            # These two say what is split further, whatever its logical axis.
            if field.name not in ("spread", "expert_spread"):
                views[field.name] = getattr(self, field.name)
        views[""] = ()  # a dimension without a name, which nothing splits
        return views

    @staticmethod
    def known_axes() -> frozenset[str]:
        """Logical axes of these rules, and of every subclass that adds a field for its own."""
        known, classes = {""}, [AxisRules]
        for rules in classes:
            known.update(field.name for field in dataclasses.fields(rules))
            classes += rules.__subclasses__()
        return frozenset(known - {"spread", "expert_spread"})


def partition(specs: Any, rules: AxisRules, mesh: Mesh) -> Partition:
    """The :class:`P` of each leaf of a tree of ParamSpecs.

    Raises:
        ValueError: a logical axis that the rules do not know, one that does not divide evenly over
            its views, or a mesh axis used twice in one weight; names the weight.
    """
    return tree.map_with_path(lambda path, spec: _leaf_partition(path, spec, rules, mesh), specs)


def _leaf_partition(path: str, spec: _PartitionedSpec, rules: AxisRules, mesh: Mesh) -> P:
    views = rules.views()
    axes = mesh.axes()
    dims: list[Views] = []
    for name in spec.axes:
        if name not in views:
            raise ValueError(
                f"{path}: logical axis {name!r} unknown to AxisRules; known: "
                f"{', '.join(filter(None, views))}"  # '' is a dimension without a name
            )
        dims.append(views[name])
    try:
        local = list(local_shape(P(*dims), spec.shape, mesh))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    spread = rules.expert_spread if "expert" in spec.tags else rules.spread
    ranks = num_ranks(axes.view(*spread))
    if ranks > 1:
        # The first dimension that divides: spread along one only, a weight is one all_gather. Its
        # views come last, inside what compute splits, so that the gathered parts are in order.
        for i, n in enumerate(local):
            if n % ranks == 0:
                dims[i] = (*dims[i], *spread)
                break
    # Again with what was added: rules may spread over a view that splits the weight already.
    try:
        resolve(P(*dims), axes, len(dims))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    return P(*dims)


def _divide(spec: P, size: int, axes: tuple[Axis, ...]) -> int:
    ranks = num_ranks(axes)
    if size % ranks:
        names = " x ".join(axis_names(axes))
        near = nearest_divisors(ranks, size, num_above=1)
        raise ValueError(
            f"{spec}: {names} = {ranks} ranks do not divide a dimension of {size}; nearest: {near}"
        )
    return size // ranks
