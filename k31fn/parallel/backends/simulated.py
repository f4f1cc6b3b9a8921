"""The simulated mesh: one process, one ``vmap`` per atomic axis, global arrays in and out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k31fn import _functorch, tree
from k31fn.parallel.axis import Axis, Channel
from k31fn.parallel.mesh import Mesh, MeshAxes
from k31fn.parallel.partition import P, broadcast, local_shape, resolve

__all__ = ["run"]


@dataclass(frozen=True, eq=False)
class _SimulatedHost:
    names: tuple[str, ...]
    tokens: tuple[Tensor, ...]

    def token(self, name: str) -> Tensor | None:
        return self.tokens[self.names.index(name)]

    def channel(self, names: tuple[str, ...]) -> Channel:
        raise ValueError(
            f"axes {names} of the simulated mesh: a collective ran outside of its shard_map"
        )


class _Traced:
    """What the body learns about its outputs; the same at every level."""

    structure: Any
    specs: list[P]
    dims: list[tuple[tuple[Axis, ...], ...]]


def run(
    f: Callable[..., Any],
    mesh: Mesh,
    specs: list[P],
    values: list[Any],
    structure: Any,
    out_specs: Any,
) -> Any:
    """``f(axes, *args)`` on every rank, ``args`` having these leaves and ``specs``.

    Returns:
        The global outputs and the spec of each of their leaves.
    """
    axes = mesh.axes()
    names = tuple(a.name for a in axes.atoms)
    where = [i for i, v in enumerate(values) if isinstance(v, Tensor)]
    stacked, batched = [], []
    for i in where:
        local_shape(specs[i], values[i].shape, mesh)  # refuses what does not divide
        x, split = _stack(values[i], resolve(specs[i], axes, values[i].ndim), axes.atoms)
        stacked.append(x)
        batched.append(split)
    traced = _Traced()

    def body(tokens: tuple[Tensor, ...], xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        args = list(values)
        for i, x in zip(where, xs, strict=True):
            args[i] = x
        bound = mesh.axes(_SimulatedHost(names, tokens))
        out = f(bound, *tree.unflatten(structure, args))
        outputs, traced.structure = tree.flatten(out)
        if wrong := [o for o in outputs if not isinstance(o, Tensor)]:
            raise ValueError(f"shard_map: an output is {wrong[0]!r}; every leaf must be a tensor")
        traced.specs = broadcast(out_specs, out)
        traced.dims = [resolve(s, axes, o.ndim) for s, o in zip(traced.specs, outputs, strict=True)]
        return tuple(outputs)

    level: Callable[..., tuple[Tensor, ...]] = body
    for i in reversed(range(len(names))):
        level = _over_axis(level, names, i, [names[i] in split for split in batched], traced)
    device = stacked[0].device if stacked else None
    tokens = tuple(torch.arange(a.size, device=device) for a in axes.atoms)
    outputs = level(tokens, tuple(stacked))
    whole = [_unstack(y, dims, axes) for y, dims in zip(outputs, traced.dims, strict=True)]
    return tree.unflatten(traced.structure, whole), traced.specs


def _over_axis(
    f: Callable[..., tuple[Tensor, ...]],
    names: tuple[str, ...],
    i: int,
    batched: list[bool],
    traced: _Traced,
) -> Callable[..., tuple[Tensor, ...]]:
    """``f`` under the ``vmap`` of axis ``i``.

    torch refuses ``out_dims=None`` for an output that an outer level batches (2.11, 2.13), so what
    is equal on all ranks of the axis leaves past the vmap, after the check that it is.
    """

    def over(tokens: tuple[Tensor, ...], xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        outputs: list[Tensor] = []

        def inner(tokens: tuple[Tensor, ...], xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            outputs[:] = f(tokens, xs)
            for y, spec, dims in zip(outputs, traced.specs, traced.dims, strict=True):
                if not _named(dims, names[i]) and _functorch.is_batched_here(y):
                    raise ValueError(
                        f"shard_map: an output of shape {list(y.shape)} has out_spec {spec}, "
                        "which does not name "
                        f"{names[i]!r}, but it varies over it; a psum after it or a pvary before "
                        "is missing"
                    )
            return (
                tokens[i],
                *[y for y, d in zip(outputs, traced.dims, strict=True) if _named(d, names[i])],
            )

        in_dims = (
            tuple(0 if j == i else None for j in range(len(names))),
            tuple(0 if b else None for b in batched),
        )
        _, *varying = torch.func.vmap(inner, in_dims=in_dims)(tokens, xs)
        return tuple(
            varying.pop(0) if _named(d, names[i]) else y
            for y, d in zip(outputs, traced.dims, strict=True)
        )

    return over


def _named(dims: tuple[tuple[Axis, ...], ...], name: str) -> bool:
    return any(a.name == name for axes in dims for a in axes)


def _stack(
    x: Tensor, dims: tuple[tuple[Axis, ...], ...], atoms: tuple[Axis, ...]
) -> tuple[Tensor, set[str]]:
    """The tiles of all ranks: leading dimensions are the axes that split ``x``, in the mesh's
    order.
    """
    position: dict[str, int] = {}
    shape: list[int] = []
    for size, axes in zip(x.shape, dims, strict=True):
        for axis in axes:
            position[axis.name] = len(shape)
            shape.append(axis.size)
            size //= axis.size
        shape.append(size)
    order = [position[a.name] for a in atoms if a.name in position]
    return x.reshape(shape).movedim(order, list(range(len(order)))), set(position)


def _unstack(y: Tensor, dims: tuple[tuple[Axis, ...], ...], axes: MeshAxes) -> Tensor:
    """The inverse of :func:`_stack`."""
    leading = [a.name for a in axes.atoms if _named(dims, a.name)]
    order: list[int] = []
    for i, split in enumerate(dims):
        order += [leading.index(a.name) for a in split] + [len(leading) + i]
    local = y.shape[len(leading) :]
    sizes = [n * _product(split) for n, split in zip(local, dims, strict=True)]
    return y.permute(order).reshape(sizes)


def _product(axes: tuple[Axis, ...]) -> int:
    n = 1
    for axis in axes:
        n *= axis.size
    return n
