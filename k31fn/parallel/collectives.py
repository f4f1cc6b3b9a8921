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

from k31fn.autodiff.custom_vjp import detached
from k31fn.parallel.axis import Axes, Axis, active, axis_names, num_ranks
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


# Every collective returns its operand where no axis has more than one rank, so that a layer on one
# device issues nothing and its graph has no node for the mesh.


def psum(x: Array, axis: Axes) -> Array:
    """The sum of ``x`` over the ranks of ``axis`` (V to I); its transpose hands the cotangent
    back.
    """
    axes = _bound("psum", axis)
    if not axes:
        return x
    return issue(Collective("psum", axes), x)


def pvary(x: Array, axis: Axes) -> Array:
    """Marks an invariant ``x`` as used differently on each rank of ``axis`` (I to V); its transpose
    is :func:`psum`.

    Raises:
        ValueError: ``x`` is no tensor, also where there is no such axis.
    """
    if not isinstance(x, Tensor):
        raise ValueError(
            f"pvary takes one tensor, got a {type(x).__name__}; of a tree: "
            "tree.map(lambda w: pvary(w, axis), params)"
        )
    axes = _bound("pvary", axis)
    if not axes:
        return x
    return issue(Collective("pvary", axes), x)


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
        # One rank casts too: the dtype of a weight in use may not depend on the mesh.
        return x if dtype is None else x.to(dtype)
    kw = {"dim": _dim("all_gather", x, dim), "grad_dtype": grad_dtype, "dtype": dtype}
    return issue(Collective("all_gather", axes, kw), x)


def all_gather_invariant(x: Array, axis: Axes, dim: int = 0) -> Array:
    """The parts of all ranks, concatenated, for a use that is equal on all ranks (S to I); its
    transpose is :func:`pslice`: the ranks hold equal cotangents, a sum would count them n times.
    """
    axes = _bound("all_gather_invariant", axis)
    if not axes:
        return x
    kw = {"dim": _dim("all_gather_invariant", x, dim)}
    return issue(Collective("all_gather_invariant", axes, kw), x)


def pslice(x: Array, axis: Axes, dim: int = 0) -> Array:
    """This rank's part of an invariant ``x`` along ``dim`` (I to S); its transpose is
    :func:`all_gather_invariant`.
    """
    axes = _bound("pslice", axis)
    if not axes:
        return x
    kw = {"dim": _even_dim("pslice", x, dim, axes)}
    return issue(Collective("pslice", axes, kw), x)


def psum_scatter(x: Array, axis: Axes, dim: int = 0) -> Array:
    """This rank's part along ``dim`` of the sum over the ranks (V to S); its transpose is
    :func:`all_gather`.
    """
    axes = _bound("psum_scatter", axis)
    if not axes:
        return x
    kw = {"dim": _even_dim("psum_scatter", x, dim, axes)}
    return issue(Collective("psum_scatter", axes, kw), x)


def all_to_all(x: Array, axis: Axes, split: int, concat: int) -> Array:
    """Sends part i of ``x`` along ``split`` to rank i; what comes is concatenated along ``concat``
    in rank order (S to S).
    """
    axes = _bound("all_to_all", axis)
    if not axes:
        return x
    kw = {
        "split": _even_dim("all_to_all", x, split, axes),
        "concat": _dim("all_to_all", x, concat),
    }
    return issue(Collective("all_to_all", axes, kw), x)


def ragged_all_to_all(x: Array, axis: Axes, send: Sequence[int], recv: Sequence[int]) -> Array:
    """Sends ``send[i]`` rows of ``x``, in order, to rank i; ``recv[i]`` rows come from it, in rank
    order (V to V).

    On real ranks only: in the simulated mesh every rank has the same shapes.

    Raises:
        ValueError: the sizes do not fit ``x`` or the axis, or two ranks disagree.
    """
    axes = _bound("ragged_all_to_all", axis)
    n = axis_size(axes)
    if len(send) != n or len(recv) != n or sum(send) != x.shape[0] or min(*send, *recv) < 0:
        raise ValueError(
            f"ragged_all_to_all: send={list(send)}, recv={list(recv)} for {n} ranks and "
            f"{x.shape[0]} rows; needed is one size per rank, and send adds up to the rows"
        )
    if not axes:
        return x
    # Issued also by a rank that has no row to send: the others wait for it.
    kw = {"send": tuple(send), "recv": tuple(recv)}
    return issue(Collective("ragged_all_to_all", axes, kw), x)


def ppermute(x: Array, axis: Axes, perm: Sequence[tuple[int, int]]) -> Array:
    """Sends ``x`` along ``(source, target)`` pairs: each target gets its source's ``x``, a rank
    that is no target gets zeros (V to V).

    Raises:
        ValueError: a rank outside the axis, or one that is source or target twice.
    """
    axes = _bound("ppermute", axis)
    n = axis_size(axes)
    # Numbers of any kind become ints: the pairs are compared, and kept for the transpose.
    pairs = tuple((int(source), int(target)) for source, target in perm)
    sources: set[int] = set()
    targets: set[int] = set()
    for source, target in pairs:
        sources.add(source)
        targets.add(target)
    # Twice a target would be a sum, twice a source a broadcast: no permutation, and no inverse
    # that a gradient could take.
    once = len(sources) == len(pairs) == len(targets)
    if not once or not (sources | targets) <= set(range(n)):
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
    # Stopped on one rank as well: a gradient that appears or goes with the mesh would be a bug
    # that only one of them shows.
    x = detached(x)
    if not axes:
        return x
    return issue(Collective("pmax", axes), x)


def axis_index(axis: Axes) -> Int[Tensor, ""]:
    """This rank's index on ``axis``, row-major over a tuple (V); an int64 scalar, on the CPU for
    real ranks.

    It works on every backend; :func:`own_index` gives a number, on real ranks only.
    """
    index = torch.zeros((), dtype=torch.int64)
    for a in _bound("axis_index", axis):
        assert a.host is not None
        token = a.host.token(a.name)
        # A simulated rank is a sample of vmap: its index is a batched tensor, never a number.
        here = a.host.channel((a.name,)).index if token is None else token
        index = index * a.size + here
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
    names = axis_names(axes)
    for a in axes:
        if a.host is None:
            raise ValueError(
                f"axis {a.name!r} is not bound to ranks; take it from the axes that a rank is given"
            )
        if a.host.token(a.name) is not None:
            raise ValueError(
                f"axes {names} in the simulated mesh, where all ranks run one program: send, recv "
                "and pipelines need real ranks; use backend 'threads' or 'processes'"
            )
    assert axes[0].host is not None
    return axes[0].host.channel(names).index


def axis_size(axis: Axes) -> int:
    """Number of ranks."""
    return num_ranks(active(axis))


def _bound(name: str, axis: Axes) -> tuple[Axis, ...]:
    """The axes of more than one rank, outermost first."""
    axes = active(axis)
    for a in axes:
        if a.host is None:
            raise ValueError(
                f"{name} over axis {a.name!r} of size {a.size}: not bound to ranks; take the axis "
                "from the mesh axes that shard_map hands to its function"
            )
    # In the mesh's order, however a caller names them: ranks that named them in different orders
    # would make different groups, and wait for each other.
    return tuple(sorted(axes, key=lambda a: a.host.names.index(a.name) if a.host else 0))


def _dim(name: str, x: Tensor, dim: int) -> int:
    """The dimension, not negative: a vmap level that comes in front shifts it by one."""
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"{name}: dim={dim} of a tensor of {x.ndim} dimensions; use {-x.ndim} to {x.ndim - 1}"
        )
    return dim % x.ndim


def _even_dim(name: str, x: Tensor, dim: int, axes: tuple[Axis, ...]) -> int:
    """The dimension, not negative, which the ranks divide: parts of unlike sizes would end in a
    backend's own error, or in none.
    """
    dim = _dim(name, x, dim)
    n = axis_size(axes)
    if x.shape[dim] % n:
        raise ValueError(
            f"{name}: {n} ranks do not divide dimension {dim} of {list(x.shape)}; pad it to a "
            "multiple"
        )
    return dim
