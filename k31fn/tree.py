"""Pytrees: the containers that every k31fn function takes and returns.

A tree is built from tuples, lists, dicts, NamedTuples and frozen dataclasses made with
:func:`dataclass`. Every such dataclass is known both to ``optree`` (which k31fn uses) and to
``torch.utils._pytree`` (which ``torch.func`` uses), so the same object passes through
``torch.func.grad`` and through our own transforms.

``None`` is not a leaf and is refused wherever k31fn flattens a tree: ``torch.func`` rejects it, and
a silently dropped leaf is a wrong gradient. An absent part is the empty tuple ``()``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import optree
import torch

# torch.func flattens with this one; register_pytree_node: torch 2.11-2.14
import torch.utils._pytree as torch_pytree

__all__ = [
    "add",
    "dataclass",
    "flatten",
    "flatten_with_paths",
    "leaves",
    "map",
    "map_with_path",
    "paths",
    "scale",
    "static",
    "unflatten",
    "vdot",
    "zeros_like",
]


def __dir__() -> list[str]:
    return __all__


_NAMESPACE = "k31fn"
_C = TypeVar("_C", bound=type)


def static(**kwargs: Any) -> Any:
    """A field of a :func:`dataclass` that is part of the tree's structure instead of a child (must
    be hashable).
    """
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
def dataclass(cls: _C) -> _C:
    """Makes ``cls`` a frozen dataclass and a pytree node of both optree and
    ``torch.utils._pytree``.

    Fields are children in the order of their declaration; fields made with :func:`static` are
    structure. Rebuilding a node skips ``__init__``, so a tree may hold any kind of leaf (specs,
    names, gradients).
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)
    children = tuple(f.name for f in fields if not f.metadata.get("static"))
    statics = tuple(f.name for f in fields if f.metadata.get("static"))

    def split(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
        child_values = [getattr(node, name) for name in children]
        static_values = tuple(getattr(node, name) for name in statics)
        return child_values, static_values

    def rebuild(aux: Any, values: Any) -> Any:
        # Not cls(...): its checks are for a user's values, and a tree of specs or names has others.
        node = object.__new__(cls)
        for name, value in zip(children + statics, (*values, *aux), strict=True):
            object.__setattr__(node, name, value)
        return node

    def optree_split(node: Any) -> tuple[list[Any], tuple[Any, ...], tuple[str, ...]]:
        return (*split(node), children)

    def torch_split(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
        # torch's pytree takes None for a leaf and hands it on; torch.func then fails elsewhere.
        for name in children:
            if getattr(node, name) is None:
                raise ValueError(
                    f"{cls.__qualname__}.{name} is None: None is not a leaf; write () for an "
                    "absent part"
                )
        return split(node)

    def split_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        child_values, static_values = split(node)
        rows = zip(children, child_values, strict=True)
        return [(torch_pytree.GetAttrKey(name), value) for name, value in rows], static_values

    # With both libraries: k31fn's functions use the first, torch.func the second.
    optree.register_pytree_node(
        cls, optree_split, rebuild, path_entry_type=optree.GetAttrEntry, namespace=_NAMESPACE
    )
    torch_pytree.register_pytree_node(
        cls,
        torch_split,
        lambda values, aux: rebuild(aux, values),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=split_with_keys,
    )
    return cls


def flatten(
    tree: Any, *, is_leaf: Callable[[Any], bool] | None = None, allow_none: bool = False
) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves of ``tree`` in order, and its structure.

    Raises:
        ValueError: a leaf is None and ``allow_none`` is not set (gradients may be absent); names
            its path.
    """
    # None counts as a leaf for optree, so that it is seen here: by default it is dropped.
    values, structure = optree.tree_flatten(
        tree, is_leaf=is_leaf, none_is_leaf=True, namespace=_NAMESPACE
    )
    # The paths are made for the message only: they cost more than the leaves.
    if not allow_none and any(v is None for v in values):
        for path, value in flatten_with_paths(tree, is_leaf=is_leaf, allow_none=True):
            if value is None:
                raise ValueError(
                    f"tree leaf {path!r} is None: None is not a leaf; write () for an absent part"
                )
    return values, structure


def unflatten(structure: optree.PyTreeSpec, values: Any) -> Any:
    """The tree of ``structure`` with these leaves."""
    return optree.tree_unflatten(structure, values)


def leaves(
    tree: Any, *, is_leaf: Callable[[Any], bool] | None = None, allow_none: bool = False
) -> list[Any]:
    """Leaves of ``tree`` in order."""
    return flatten(tree, is_leaf=is_leaf, allow_none=allow_none)[0]


def map(
    f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """``f`` over corresponding leaves of trees with the same structure.

    Raises:
        ValueError: the structures differ (the message names both), or a leaf is None.
    """
    values, structure = flatten(tree, is_leaf=is_leaf)
    columns = [values]
    for other in rest:
        other_values, other_structure = flatten(other, is_leaf=is_leaf)
        if other_structure != structure:
            raise ValueError(_difference(tree, other, is_leaf))
        columns.append(other_values)
    return unflatten(structure, [f(*row) for row in zip(*columns, strict=True)])


def flatten_with_paths(
    tree: Any, *, is_leaf: Callable[[Any], bool] | None = None, allow_none: bool = False
) -> list[tuple[str, Any]]:
    """``(path, leaf)`` pairs in order; a path reads ``layers.3.attn.w_q``, with a NamedTuple's
    field names.
    """
    accessors, values, _ = optree.tree_flatten_with_accessor(
        tree, is_leaf=is_leaf, none_is_leaf=True, namespace=_NAMESPACE
    )
    if not allow_none and any(v is None for v in values):
        flatten(tree, is_leaf=is_leaf)  # raises, with the path
    pairs: list[tuple[str, Any]] = []
    for accessor, value in zip(accessors, values, strict=True):
        pairs.append((".".join(_name(entry) for entry in accessor), value))
    return pairs


def _name(entry: optree.PyTreeEntry) -> str:
    # optree knows a NamedTuple's entry by its number; a path is for a reader.
    return entry.field if isinstance(entry, optree.NamedTupleEntry) else str(entry.entry)


def paths(tree: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """Paths of the leaves in order."""
    return [p for p, _ in flatten_with_paths(tree, is_leaf=is_leaf)]


def map_with_path(
    f: Callable[..., Any], tree: Any, *, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """``f(path, leaf)`` over the leaves."""
    values = [f(p, v) for p, v in flatten_with_paths(tree, is_leaf=is_leaf)]
    return unflatten(flatten(tree, is_leaf=is_leaf)[1], values)


def zeros_like(tree: Any) -> Any:
    """A tree of zeros of the same structure, shapes, dtypes and devices."""
    return map(torch.zeros_like, tree)


def add(a: Any, b: Any) -> Any:
    """``a + b``, leaf by leaf.

    Raises:
        ValueError: the structures differ.
    """
    return map(torch.add, a, b)


def scale(factor: float | int | torch.Tensor, tree: Any) -> Any:
    """``factor * tree``, leaf by leaf, in the leaves' dtypes; the factor is a number or a scalar
    tensor.

    Raises:
        ValueError: the factor has dimensions.
    """
    if isinstance(factor, torch.Tensor) and factor.ndim:
        raise ValueError(
            f"tree.scale: factor of shape {list(factor.shape)}; it is a number or a scalar tensor, "
            "and the tree comes second"
        )
    return map(lambda x: x * factor, tree)


def vdot(a: Any, b: Any) -> torch.Tensor:
    """The sum of ``conj(a) * b`` over all elements of all leaves, accumulated in at least float32.

    Raises:
        ValueError: the structures differ, or there is no leaf.
    """
    products = leaves(map(_inner, a, b))
    if not products:
        raise ValueError("tree.vdot: the trees have no leaf, so their product has no dtype")
    return functools.reduce(torch.add, products)


def _inner(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.shape != y.shape:
        raise ValueError(f"tree.vdot: leaves of shapes {list(x.shape)} and {list(y.shape)}")
    # In bfloat16 a sum stops growing after some hundred terms.
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    return (x.conj().to(dtype) * y.to(dtype)).sum()


def _difference(a: Any, b: Any, is_leaf: Callable[[Any], bool] | None) -> str:
    left = paths(a, is_leaf=is_leaf)
    right = paths(b, is_leaf=is_leaf)
    only_left = _missing(left, right)
    only_right = _missing(right, left)
    if not only_left and not only_right:
        return (
            "trees differ in structure though their leaves have the same paths: "
            f"{flatten(a, is_leaf=is_leaf)[1]} against {flatten(b, is_leaf=is_leaf)[1]}"
        )
    # Five are enough to see which part is meant: a model has thousands.
    return (
        f"trees differ in structure: {len(left)} against {len(right)} leaves; only in the first: "
        f"{only_left[:5]}; only in the second: {only_right[:5]}"
    )


def _missing(some: list[str], others: list[str]) -> list[str]:
    known = set(others)
    return [path for path in some if path not in known]
