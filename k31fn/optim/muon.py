"""Muon (Jordan 2024): momentum whose matrices are orthogonalised.

Scale and decoupled decay are those of Moonlight (Liu et al. 2025).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from k31fn import precision, tree
from k31fn.optim.matrices import Matrices
from k31fn.optim.matrix_owners import MatrixOwners
from k31fn.optim.matrix_work import on_every_rank, on_owners
from k31fn.optim.storage import Storage
from k31fn.optim.transform import Leaves, Transform, rates
from k31fn.parallel.axis import Axis
from k31fn.parallel.fsdp.placement import Placement, Placements
from k31fn.params import ParamSpec
from k31fn.typing import Bool, Float, Tensor

__all__ = ["muon", "orthogonalize"]

# Jordan's: the steepest slope at 0 for which five steps still end near 1. They do not converge; an
# update needs no singular values closer to each other than that.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_RMS = 0.2  # root mean square of an update: that of AdamW, so both share learning rate and decay


@tree.dataclass
class _MuonState:
    """Everything that Muon remembers.

    Attributes:
        momentum: like the stepped parameters; kept as :class:`~k31fn.optim.storage.Storage` says.
        master: float32 copies of the parameters that are narrower.
    """

    momentum: Any
    master: Any


def muon(
    specs: Any,
    *,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    ns_steps: int = 5,
    ns_dtype: torch.dtype | None = None,
    storage: Storage = Storage(),  # noqa: B008 (frozen, so one default for all calls is safe)
    placements: Placements = (),
) -> Transform:
    """Muon on the leaves tagged ``matrix`` that are not ``frozen``; combine it with AdamW for the
    others.

    With momentum b, for each matrix of a leaf::

        m <- b m + g
        p <- (1 - lr weight_decay) p - lr 0.2 sqrt(max(rows, columns)) orthogonalize(g + b m)

    without the decay on leaves tagged ``no_decay``. A leaf ``[..., in, out]`` is a batch of
    matrices (experts); one tagged ``per_head`` is a matrix ``[in, head_dim]`` per head, cut along
    ``out``.

    With ``placements``, parameters, gradients and state are one rank's parts. The matrices of all
    leaves are dealt out among the ranks that hold them, whole or in part: each is put together on
    its owner (:mod:`k31fn.optim.matrix_owners`) and its result cut again, in the dtype of
    Newton-Schulz. So the work is split evenly, replicas get equal bits, and no rank has more than
    one matrix in work, the largest, and another arriving.

    Args:
        specs: the tree of ParamSpecs.
        momentum: b.
        weight_decay: decoupled.
        ns_steps: of :func:`orthogonalize`.
        ns_dtype: of :func:`orthogonalize`.
        storage: of the momentum.
        placements: of the parameters (:mod:`k31fn.parallel.fsdp`); ``()``: they are whole.

    Raises:
        ValueError: a number out of its range, a ``matrix`` leaf with fewer than two dimensions, or
            a ``per_head`` leaf that ``head_dim`` does not divide.
    """
    if not (0 <= momentum < 1 and weight_decay >= 0 and ns_steps >= 1):
        raise ValueError(
            f"momentum={momentum} must be in [0, 1), weight_decay={weight_decay} at least 0, "
            f"ns_steps={ns_steps} at least 1"
        )
    storage.check_decay(momentum=momentum)
    leaves = Leaves(specs, lambda path, spec: "matrix" in spec.tags)
    heads = [_head_dim(path, spec) for path, spec in zip(leaves.paths, leaves.specs, strict=True)]
    places = leaves.of_params(placements) if placements else [None] * len(heads)
    orthogonal = _Orthogonal(heads, places, ns_steps, ns_dtype)
    decays = leaves.decays(weight_decay)
    rule = _Muon(leaves, momentum, decays, storage, ns_dtype, orthogonal)
    return Transform(rule.init, rule.update, frozenset(leaves.paths))


@dataclass(frozen=True, eq=False)
class _Muon:
    """The two functions of :func:`muon`, whose arguments these are."""

    leaves: Leaves
    momentum: float
    decays: list[float]
    storage: Storage
    ns_dtype: torch.dtype | None
    orthogonal: _Orthogonal

    def init(self, params: Any) -> _MuonState:
        copies = self.leaves.init_masters(params)
        masters = self.leaves.masters(params, copies)
        return _MuonState(self.leaves.to_tree(list(map(self.storage.zeros, masters))), copies)

    def update(
        self,
        grads: Any,
        state: _MuonState,
        params: Any,
        *,
        lr: float | Tensor,
        skip: Bool[Tensor, ""] | None = None,
        donate: bool = True,
    ) -> tuple[Any, _MuonState]:
        leaves = self.leaves
        masters = leaves.masters(params, state.master)
        stored_momenta = tree.leaves(state.momentum)
        # A pipeline stage may have no matrix.
        if not masters:
            return params, state
        # A donated step writes in place, which autograd must not see.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not donate):
            new_momenta, directions = [], []
            for p, g, stored in zip(masters, leaves.of_grads(grads), stored_momenta, strict=True):
                g = g.to(p.dtype)
                old = self.storage.fetch(stored, p)
                m = _unless(skip, old, self.momentum * old + g)
                new_momenta.append(self.storage.store(stored, m, donate=donate))
                # From ``m`` with the digits that storage may drop. Rounded here already to the
                # dtype of Newton-Schulz, so that ranks exchange half the bytes.
                directions.append((g + self.momentum * m).to(_working_dtype(p, self.ns_dtype)))
            new_masters = list(masters)
            factors: dict[Any, tuple[float | Tensor, float | Tensor]] = {}
            for i, y in self.orthogonal(directions):
                p = masters[i]
                kind = (self.decays[i], p.dtype)
                # once for all leaves alike: a rate on a device costs a launch for each operation
                if kind not in factors:
                    factors[kind] = rates(lr, *kind)
                shrunk, rate = factors[kind]
                new_p = _unless(skip, p, shrunk * p - rate * y.to(p.dtype))
                new_masters[i] = p.copy_(new_p) if donate else new_p
            params, copies = leaves.with_masters(params, new_masters, donate=donate)
            self.storage.settle(masters[0].device)
        return params, _MuonState(leaves.to_tree(new_momenta), copies)


class _Orthogonal:
    """Orthogonalises matrices of which ranks have parts, and scales them; who does which is settled
    at the first call.

    Args:
        heads: of each leaf, columns of one matrix, or 0.
        places: of each leaf; None: it is whole.
        steps: of :func:`orthogonalize`.
        dtype: of :func:`orthogonalize`.
    """

    def __init__(
        self, heads: list[int], places: list[Any], steps: int, dtype: torch.dtype | None
    ) -> None:
        self._heads = heads
        self._places = places
        self._axes = _axes_of([place for place in places if place is not None])
        self._work = functools.partial(orthogonalize, steps=steps, dtype=dtype)
        self._owners: MatrixOwners | None = None

    def __call__(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """``0.2 sqrt(max(rows, columns)) U V^T``: for each leaf its number and this rank's part, as
        they come.
        """
        matrices: list[Matrices] = []
        flat: list[Tensor] = []
        for x, head_dim, place in zip(parts, self._heads, self._places, strict=True):
            matrices.append(Matrices.of(x.shape, head_dim, place, self._axes))
            flat.append(x.reshape(-1, *x.shape[-2:]))  # what comes before is a batch of matrices
        for i, y in self._results(flat, matrices):
            # The longer side of the whole matrix, not of this rank's part.
            scale = _RMS * math.sqrt(max(matrices[i].shape))
            yield i, scale * precision.upcast(y).reshape(parts[i].shape)

    def _results(
        self, flat: list[Tensor], matrices: list[Matrices]
    ) -> Iterator[tuple[int, Tensor]]:
        """Parts of the orthogonalised matrices, by the number of their leaf."""
        if self._simulated:
            for i, x in enumerate(flat):
                yield i, on_every_rank(self._work, x, matrices[i])
            return
        # Once: parts have the same shapes at every step.
        if self._owners is None:
            self._owners = MatrixOwners(matrices, self._axes)
        yield from on_owners(self._work, flat, self._owners)

    @property
    def _simulated(self) -> bool:
        """Whether vmap stands for the ranks, which then cannot do different things."""
        for axis in self._axes:
            if axis.host is not None and axis.host.token(axis.name) is not None:
                return True
        return False


def orthogonalize(
    x: Float[Tensor, "... rows columns"], *, steps: int = 5, dtype: torch.dtype | None = None
) -> Float[Tensor, "... rows columns"]:
    """About ``U V^T`` of ``x = U S V^T``: nonzero singular values end between 0.68 and 1.14.

    Those below some 1e-3 of the Frobenius norm stay smaller. Newton-Schulz: ``X <- a X + (b A + c A
    A) X`` with ``A = X X^T``, from X of norm 1 with the smaller side as rows. A zero matrix stays
    zero.

    Args:
        x: matrices.
        steps: of the iteration.
        dtype: in which ``x`` is taken and iterated. None: that of ``x``, but for float32 on other
            devices than the CPU (where bfloat16 is slow) bfloat16.
    """
    a, b, c = _COEFFICIENTS
    y = x.to(_working_dtype(x, dtype))
    # In float32 at least: a bfloat16 sum of a million squares would be wrong by percents.
    norm = torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True, dtype=precision.island(y.dtype))
    y = (y / norm.clamp(min=1e-7)).to(y.dtype)
    # The smaller side as rows: A is the smaller of the two products that would do.
    tall = x.shape[-2] > x.shape[-1]
    y = (y.mT if tall else y).reshape(-1, *sorted(x.shape[-2:]))
    for _ in range(steps):
        A = torch.bmm(y, y.mT)
        y = torch.baddbmm(y, torch.baddbmm(A, A, A, beta=b, alpha=c), y, beta=a)
    y = (y.mT if tall else y).reshape(x.shape)
    return y.to(x.dtype)


def _working_dtype(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    # Tensor cores are what Newton-Schulz is for; a float64 run stays float64.
    return torch.bfloat16 if x.dtype == torch.float32 and not (x.is_cpu or x.is_meta) else x.dtype


def _unless(skip: Bool[Tensor, ""] | None, old: Tensor, new: Tensor) -> Tensor:
    """``new``, or ``old`` where ``skip`` says so: chosen on the device, without a wait."""
    return new if skip is None else torch.where(skip, old, new)


def _head_dim(path: str, spec: ParamSpec) -> int:
    """Columns of one matrix of a leaf that has one per head, else 0."""
    if len(spec.shape) < 2:
        raise ValueError(
            f"{path}: tagged matrix, but its shape is {spec.shape}; it needs at least two "
            "dimensions"
        )
    if "per_head" not in spec.tags:
        return 0
    if not spec.head_dim or spec.shape[-1] % spec.head_dim:
        raise ValueError(
            f"{path}: tagged per_head, but head_dim={spec.head_dim} does not divide "
            f"{spec.shape[-1]}"
        )
    return spec.head_dim


def _axes_of(places: Sequence[Placement]) -> tuple[Axis, ...]:
    """The axes along which ranks hold other parts, or the same part, of one of these leaves.

    In the order of the mesh.
    """
    axes: set[Axis] = set()
    for place in places:
        axes.update(place.axes, place.vary)
    return tuple(sorted(axes, key=lambda a: a.host.names.index(a.name) if a.host else 0))
