"""Named-axis collectives, as layers write them.

Over axes of size 1, or none, each is an identity. I: equal on all ranks of the axes; V: varies;
S(i): the parts, in the order of ranks, of dimension i.

| function | move | transpose |
|---|---|---|
| :func:`psum` | V -> I | to V; refuses a cotangent that varies |
| :func:`pvary` | I -> V | ``psum`` |
| :func:`all_gather` | S -> V | ``psum_scatter``, in ``grad_dtype`` |
| :func:`all_gather_invariant` | S -> I | own slice |
| :func:`pslice` | I -> S | ``all_gather_invariant`` |
| :func:`psum_scatter` | V -> S | ``all_gather`` |
| :func:`all_to_all` | S -> S | itself with the dims swapped |
| :func:`ragged_all_to_all` | V -> V | itself with the sizes swapped |
| :func:`ppermute` | V -> V | the inverse permutation |
| :func:`pmax`, :func:`axis_index` | V -> I, V | none |

A value that is equal on all ranks and used differently on each must pass :func:`pvary`: then its
gradient is the sum over the ranks. Without it the gradient is one rank's part. The simulated mesh
refuses that always, real ranks under :func:`k31fn.parallel.check_invariance`.

Sums are taken in the order of ranks (in the simulated mesh and under threads) or in the backend's
fixed order (process groups), so a run repeats bit for bit, and all ranks hold the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from k31fn.autodiff import stop_gradient
from k31fn.parallel.axis import Axes, Axis, active
from k31fn.parallel.primitive import Collective, issue

__all__ = [
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "axis_index",
    "axis_size",
    "own_index",
    "pmax",
    "ppermute",
    "pslice",
    "psum",
    "psum_scatter",
    "pvary",
    "ragged_all_to_all",
]

Array = Shaped[Tensor, "..."]


def psum(x: Array, axis: Axes) -> Array:
    """The sum of ``x`` over the ranks of ``axis`` (V to I); its transpose hands the cotangent
    back.
    """
    axes = _bound("psum", axis)
    return issue(Collective("psum", axes), x) if axes else x


def pvary(x: Array, axis: Axes) -> Array:
    """Marks an invariant ``x`` as used differently on each rank of ``axis`` (I to V); its transpose
    is :func:`psum`.
    """
    axes = _bound("pvary", axis)
    return issue(Collective("pvary", axes), x) if axes else x


def all_gather(
    x: Array,
    axis: Axes,
    dim: int = 0,
    *,
    dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
) -> Array:
    """The parts of all ranks, concatenated along ``dim`` (S to V); its transpose is
    :func:`psum_scatter`.

    Args:
        x: this rank's part.
        axis: over which.
        dim: along which.
        dtype: in which the parts travel, and of the result; None: that of ``x``.
        grad_dtype: in which the gradient is summed; None: the cotangent's. The gradient has the
            dtype of ``x``.
    """
    axes = _bound("all_gather", axis)
    if not axes:
        return x if dtype is None else x.to(dtype)
    kw = {"dim": _dim("all_gather", x, dim), "grad_dtype": grad_dtype, "dtype": dtype}
    return issue(Collective("all_gather", axes, kw), x)


def all_gather_invariant(x: Array, axis: Axes, dim: int = 0) -> Array:
    """The parts of all ranks, concatenated, for a use that is equal on all ranks (S to I);
    transpose: own slice.
    """
    axes = _bound("all_gather_invariant", axis)
    if not axes:
        return x
    return issue(
        Collective("all_gather_invariant", axes, {"dim": _dim("all_gather_invariant", x, dim)}), x
    )


def pslice(x: Array, axis: Axes, dim: int = 0) -> Array:
    """This rank's part of an invariant ``x`` along ``dim`` (I to S); its transpose is
    :func:`all_gather_invariant`.
    """
    axes = _bound("pslice", axis)
    return (
        issue(Collective("pslice", axes, {"dim": _even("pslice", x, dim, axes)}), x) if axes else x
    )


def psum_scatter(x: Array, axis: Axes, dim: int = 0) -> Array:
    """This rank's part along ``dim`` of the sum over the ranks (V to S); its transpose is
    :func:`all_gather`.
    """
    axes = _bound("psum_scatter", axis)
    return (
        issue(Collective("psum_scatter", axes, {"dim": _even("psum_scatter", x, dim, axes)}), x)
        if axes
        else x
    )


def all_to_all(x: Array, axis: Axes, split: int, concat: int) -> Array:
    """Part i of ``x`` along ``split`` goes to rank i; what comes is concatenated along ``concat``
    in rank order.
    """
    axes = _bound("all_to_all", axis)
    if not axes:
        return x
    kw = {"split": _even("all_to_all", x, split, axes), "concat": _dim("all_to_all", x, concat)}
    return issue(Collective("all_to_all", axes, kw), x)


def ragged_all_to_all(x: Array, axis: Axes, send: Sequence[int], recv: Sequence[int]) -> Array:
    """``send[i]`` rows of ``x``, in order, go to rank i; ``recv[i]`` rows come from it, in rank
    order.

    On real ranks only: in the simulated mesh every rank has the same shapes.

    Raises:
        ValueError: the sizes do not fit ``x`` or the axis, or two ranks disagree.
    """
    axes = _bound("ragged_all_to_all", axis)
    n = axis_size(axes)
    if len(send) != n or len(recv) != n or sum(send) != x.shape[0] or min(*send, *recv) < 0:
        raise ValueError(
            f"ragged_all_to_all: send={list(send)}, recv={list(recv)} for {n} ranks and "
            f"{x.shape[0]} rows; needed is "
            "one size per rank, and send adds up to the rows"
        )
    if not axes:
        return x
    return issue(
        Collective("ragged_all_to_all", axes, {"send": tuple(send), "recv": tuple(recv)}), x
    )


def ppermute(x: Array, axis: Axes, perm: Sequence[tuple[int, int]]) -> Array:
    """``(source, target)`` pairs: each target gets its source's ``x``, a rank that is no target
    gets zeros.

    Raises:
        ValueError: a rank outside the axis, or one that is source or target twice.
    """
    axes = _bound("ppermute", axis)
    n, pairs = axis_size(axes), tuple((int(a), int(b)) for a, b in perm)
    sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
    once = len(set(sources)) == len(sources) and len(set(targets)) == len(targets)
    if not once or any(not 0 <= r < n for r in sources + targets):
        raise ValueError(
            f"ppermute: perm={list(pairs)} over {n} ranks; each rank is source and target at most "
            "once"
        )
    if not axes:
        return x if pairs else torch.zeros_like(x)
    return issue(Collective("ppermute", axes, {"perm": pairs}), x)


def pmax(x: Array, axis: Axes) -> Array:
    """The elementwise maximum over the ranks (V to I), without gradient."""
    axes = _bound("pmax", axis)
    x = stop_gradient(x)
    return issue(Collective("pmax", axes), x) if axes else x


def axis_index(axis: Axes) -> Int[Tensor, ""]:
    """This rank's index on ``axis``, row-major over a tuple (V); an int64 scalar, on the CPU for
    real ranks.
    """
    index = torch.zeros((), dtype=torch.int64)
    for a in _bound("axis_index", axis):
        assert a.host is not None
        token = a.host.token(a.name)
        index = index * a.size + (a.host.channel((a.name,)).index if token is None else token)
    return index


def own_index(axis: Axes) -> int:
    """This rank's index on ``axis`` as a number, which only real ranks have.

    Raises:
        ValueError: the simulated mesh, where a program cannot differ by rank; or an axis that is
            not bound to ranks.
    """
    axes = active(axis)
    if not axes:
        return 0
    names = tuple(a.name for a in axes)
    for a in axes:
        if a.host is None:
            raise ValueError(
                f"axis {a.name!r} is not bound to ranks; take it from the axes that a rank is given"
            )
        if a.host.token(a.name) is not None:
            raise ValueError(
                f"axes {names} in the simulated mesh, where all ranks run one program: send, recv "
                "and pipelines need "
                "real ranks; use backend 'threads' or 'processes'"
            )
    assert axes[0].host is not None
    return axes[0].host.channel(names).index


def axis_size(axis: Axes) -> int:
    """Number of ranks."""
    n = 1
    for a in active(axis):
        n *= a.size
    return n


def _bound(name: str, axis: Axes) -> tuple[Axis, ...]:
    axes = active(axis)
    if unbound := [a for a in axes if a.host is None]:
        raise ValueError(
            f"{name} over axis {unbound[0].name!r} of size {unbound[0].size}: not bound to ranks; "
            "take the axis from "
            "the mesh axes that shard_map hands to its function"
        )
    return tuple(sorted(axes, key=lambda a: a.host.names.index(a.name) if a.host else 0))


def _dim(name: str, x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"{name}: dim={dim} of a tensor of {x.ndim} dimensions; use {-x.ndim} to {x.ndim - 1}"
        )
    return dim % x.ndim


def _even(name: str, x: Tensor, dim: int, axes: tuple[Axis, ...]) -> int:
    dim, n = _dim(name, x, dim), axis_size(axes)
    if x.shape[dim] % n:
        raise ValueError(
            f"{name}: {n} ranks do not divide dimension {dim} of {list(x.shape)}; pad it to a "
            "multiple"
        )
    return dim
