"""The simulated mesh: one process, one ``vmap`` per atomic axis, global arrays in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k31fn import _functorch, tree
from k31fn.parallel.axis import Axis, Channel, axis_names
from k31fn.parallel.mesh import Mesh, MeshAxes
from k31fn.parallel.partition import P, broadcast, local_shape, resolve

__all__ = ["compute_all_ranks", "run"]

Dims = tuple[tuple[Axis, ...], ...]
"""The atomic axes that split each dimension of a tensor."""


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
    """Facts about the outputs that the body learns; the same at every level."""

    structure: Any
    specs: list[P]
    dims: list[Dims]


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
    names = axis_names(axes.atoms)
    tensor_indices = [i for i, v in enumerate(values) if isinstance(v, Tensor)]
    stacked: list[Tensor] = []
    split_names: list[set[str]] = []
    for i in tensor_indices:
        local_shape(specs[i], values[i].shape, mesh)  # refuses what does not divide
        x, split = _stack(values[i], resolve(specs[i], axes, values[i].ndim), axes.atoms)
        stacked.append(x)
        split_names.append(split)
    traced = _Traced()

    def body(tokens: tuple[Tensor, ...], xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        args = list(values)
        for i, x in zip(tensor_indices, xs, strict=True):
            args[i] = x
        bound = mesh.axes(_SimulatedHost(names, tokens))
        out = f(bound, *tree.unflatten(structure, args))
        outputs, traced.structure = tree.flatten(out)
        traced.specs = broadcast(out_specs, out)
        traced.dims = []
        for y, spec in zip(outputs, traced.specs, strict=True):
            if not isinstance(y, Tensor):
                raise ValueError(f"shard_map: an output is {y!r}; every leaf must be a tensor")
            traced.dims.append(resolve(spec, axes, y.ndim))
        return tuple(outputs)

    level: Callable[..., tuple[Tensor, ...]] = body
    # From the inside out, so that the outermost axis is the outermost vmap: the rule of the
    # collectives relies on the order.
    for i in reversed(range(len(names))):
        x_dims = [0 if names[i] in split else None for split in split_names]
        level = _over_axis(level, names, i, tuple(x_dims), traced)
    device = stacked[0].device if stacked else None
    # Each level batches one of these and nothing else does: what the others vary over shows in
    # which of them are batched.
    tokens = tuple(torch.arange(a.size, device=device) for a in axes.atoms)
    outputs = level(tokens, tuple(stacked))
    global_outputs: list[Tensor] = []
    for y, dims in zip(outputs, traced.dims, strict=True):
        global_outputs.append(_unstack(y, dims, axes))
    return tree.unflatten(traced.structure, global_outputs), traced.specs


def _over_axis(
    f: Callable[..., tuple[Tensor, ...]],
    names: tuple[str, ...],
    i: int,
    x_dims: tuple[int | None, ...],
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
            # The token goes out too: vmap wants an output, and those of f may all be equal.
            varying = [tokens[i]]
            for y, spec, dims in zip(outputs, traced.specs, traced.dims, strict=True):
                if _is_split_by(dims, names[i]):
                    varying.append(y)
                elif _functorch.is_batched_here(y):
                    raise ValueError(
                        f"shard_map: an output of shape {list(y.shape)} has out_spec {spec}, "
                        f"which does not name {names[i]!r}, but it varies over it; a psum after it "
                        "or a pvary before is missing"
                    )
            return tuple(varying)

        token_dims: list[int | None] = [None] * len(names)
        token_dims[i] = 0
        in_dims = (tuple(token_dims), x_dims)
        _, *varying = torch.func.vmap(inner, in_dims=in_dims)(tokens, xs)
        for k, dims in enumerate(traced.dims):
            if _is_split_by(dims, names[i]):
                outputs[k] = varying.pop(0)
        return tuple(outputs)

    return over


def _is_split_by(dims: Dims, name: str) -> bool:
    return any(name in axis_names(axes) for axes in dims)


def _stack(x: Tensor, dims: Dims, atoms: tuple[Axis, ...]) -> tuple[Tensor, set[str]]:
    """The tiles of all ranks: leading dimensions are the axes that split ``x``, in the mesh's
    order.
    """
    # Each dimension falls apart into its axes, outermost first, and what a rank has of it; then
    # the axes move to the front.
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


def _unstack(y: Tensor, dims: Dims, axes: MeshAxes) -> Tensor:
    """The inverse of :func:`_stack`."""
    leading = [a.name for a in axes.atoms if _is_split_by(dims, a.name)]
    order: list[int] = []
    sizes: list[int] = []
    for i, split in enumerate(dims):
        tile_dim = len(leading) + i
        size = y.shape[tile_dim]
        for axis in split:
            order.append(leading.index(axis.name))
            size *= axis.size
        order.append(tile_dim)
        sizes.append(size)
    return y.permute(order).reshape(sizes)


def compute_all_ranks(op: str, x: Tensor, kw: Mapping[str, Any]) -> Tensor:
    """A collective on all ranks at once: ``x [n, ...]`` to ``[n, ...]``, or to one value for a
    result that is equal on all ranks.

    Sums name their dtype: torch would add integers in int64, and process groups do not.

    Raises:
        ValueError: a collective whose sizes differ by rank.
    """
    n = x.shape[0]
    parts = x.unbind(0)  # by rank
    match op:
        case "psum":
            return x.sum(0, dtype=x.dtype)
        case "pmax":
            return x.amax(0)
        case "pvary" | "psum_transpose":
            return x
        case "all_gather_invariant":
            return torch.cat(parts, kw["dim"])
        case "all_gather":
            y = torch.cat(parts, kw["dim"])
            return y.unsqueeze(0).expand(n, *y.shape)  # n views of one copy
        case "psum_scatter":
            return torch.stack(x.sum(0, dtype=x.dtype).chunk(n, kw["dim"]))
        case "pslice":
            return torch.stack([part.chunk(n, kw["dim"])[i] for i, part in enumerate(parts)])
        case "all_to_all":
            pieces = [part.chunk(n, kw["split"]) for part in parts]  # [source][target]
            by_target = list(zip(*pieces, strict=True))
            return torch.stack([torch.cat(received, kw["concat"]) for received in by_target])
        case "ppermute":
            y = [torch.zeros_like(parts[0])] * n
            for source, target in kw["perm"]:
                y[target] = parts[source]
            return torch.stack(y)
        case _:
            raise ValueError(
                f"{op} in the simulated mesh: sizes differ by rank; use a padded all_to_all, or "
                "backend threads"
            )
