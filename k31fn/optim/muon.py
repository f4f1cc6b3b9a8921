"""Muon (Jordan 2024): momentum whose matrices are orthogonalised.

Scale and decoupled decay are those of Moonlight (Liu et al. 2025).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from k31fn import precision, tree
from k31fn.kernels.adamw.reference import rates
from k31fn.kernels.philox import stochastic_round
from k31fn.kernels.philox.reference import Draws
from k31fn.optim.matrices import Matrices
from k31fn.optim.matrix_owners import MatrixOwners
from k31fn.optim.matrix_work import Part, Piece, joined, on_every_rank, on_owners
from k31fn.optim.newton_schulz import orthogonalize, working_dtype
from k31fn.optim.storage import Storage
from k31fn.optim.transform import Leaves, Transform, refuse_differentiated
from k31fn.parallel.axis import Axis
from k31fn.parallel.fsdp.placement import Placement, Placements
from k31fn.params import ParamSpec
from k31fn.typing import Bool, Float, Tensor

__all__ = ["muon"]

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
    one round in work, and another arriving: matrices of equal shape at once, up to 128 MiB of them
    in bfloat16, or one that is larger. Everything else is done in slices.

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
    """The two functions of :func:`muon`.

    Attributes:
        leaves: that it steps.
        momentum: b.
        decays: of each leaf.
        storage: of the momentum.
        ns_dtype: of :func:`orthogonalize`.
        orthogonal: orthogonalises and scales.
    """

    leaves: Leaves
    momentum: float
    decays: list[float]
    storage: Storage
    ns_dtype: torch.dtype | None
    orthogonal: _Orthogonal

    def init(self, params: Any, *, masters: bool = True) -> _MuonState:
        """The state before the first step."""
        momenta = list(map(self.storage.zeros, self.leaves.of_params(params)))
        copies = self.leaves.init_masters(params, masters)
        return _MuonState(self.leaves.to_tree(momenta), copies)

    def update(
        self,
        grads: Any,
        state: _MuonState,
        params: Any,
        *,
        lr: float | Tensor,
        scale: Float[Tensor, ""] | None = None,
        skip: Bool[Tensor, ""] | None = None,
        draws: Mapping[str, Draws] | None = None,
        donate: bool = False,
    ) -> tuple[Any, _MuonState]:
        """See :class:`~k31fn.optim.transform.Update`."""
        if donate:
            refuse_differentiated(grads, params, lr, scale)
        # A pipeline stage may have no matrix.
        if not self.leaves.paths:
            return params, state
        values = self.leaves.masters(params, state.master, draws)
        factors: list[tuple[float | Tensor, float | Tensor]] = []
        # once for all leaves alike: a rate on a device costs a launch for each operation
        known: dict[Any, tuple[float | Tensor, float | Tensor]] = {}
        for p, decay in zip(values, self.decays, strict=True):
            kind = (decay, precision.island(p.dtype))
            if kind not in known:
                known[kind] = rates(lr, *kind)
            factors.append(known[kind])
        step = _MuonStep(self, self.leaves.of_grads(grads), values, factors, scale, skip)
        momenta = tree.leaves(state.momentum)
        if donate:
            step.in_place(
                momenta, [draws.get(path) if draws else None for path in self.leaves.paths]
            )
            params, copies = self.leaves.with_masters(params, state.master, values)
            self.storage.settle(values[0].device)
        else:
            params, copies = self.leaves.with_new(params, step.apart(momenta), draws)
        return params, _MuonState(self.leaves.to_tree(momenta), copies)


@dataclass(frozen=True, eq=False)
class _MuonStep:
    """One step.

    Attributes:
        rule: whose it is.
        grads: of the leaves.
        values: that are stepped: parameters or their masters.
        factors: of each: what it shrinks by, and the learning rate.
        scale: of the gradients.
        skip: true: nothing changes.
    """

    rule: _Muon
    grads: list[Tensor]
    values: list[Tensor]
    factors: list[tuple[float | Tensor, float | Tensor]]
    scale: Tensor | None
    skip: Tensor | None

    @torch.no_grad()
    def in_place(self, momenta: list[Tensor], draws: list[Draws | None]) -> None:
        """Writes into values and momenta, piece by piece: a momentum where its part is asked for, a
        value where its result comes.
        """
        storage = self.rule.storage
        for i, p in enumerate(self.values):
            momenta[i] = storage.adopt(momenta[i], p)
        grads = list(map(_as_matrices, self.grads))
        values = list(map(_as_matrices, self.values))
        stored = list(map(_as_matrices, momenta))
        placed = [_of_matrices(x, draw) for x, draw in zip(self.values, draws, strict=True)]

        def part(i: int, index: tuple[slice, ...]) -> Tensor:
            g = grads[i][index]
            direction = g.new_empty(g.shape, dtype=self._working(i))
            m = stored[i][index]
            for inner in precision.slices(g.shape):
                old = storage.fetch(m[inner], values[i])
                new, moved = self._momentum(i, g[inner], old)
                storage.store(m[inner], new)
                direction[inner] = moved
            return direction

        for i, index, y in self._orthogonal(part):
            p = values[i][index]
            draw = placed[i]
            of_piece = draw.at(index) if draw is not None else None
            for inner in precision.slices(y.shape):
                new = self._value(i, precision.upcast(p[inner]), y[inner])
                if of_piece is not None:
                    new = stochastic_round(new, of_piece.at(inner))
                p[inner] = new

    def apart(self, momenta: list[Tensor]) -> list[Tensor]:
        """New values; ``momenta`` become the new ones, nothing is written into."""
        storage = self.rule.storage
        directions: list[Tensor] = []
        for i, p in enumerate(self.values):
            m, direction = self._momentum(i, self.grads[i], storage.fetch(momenta[i], p))
            momenta[i] = storage.keep(m)
            directions.append(_as_matrices(direction))
        pieces = self._orthogonal(lambda i, index: directions[i][index])
        new_values = list(self.values)
        for i, y in self.rule.orthogonal.joined(pieces):
            p = precision.upcast(self.values[i])
            new_values[i] = self._value(i, p, y.reshape(p.shape))
        return new_values

    def _orthogonal(self, part: Part) -> Iterator[Piece]:
        shapes = [p.shape for p in self.values]
        return self.rule.orthogonal(shapes, part, self.values[0], self._working(0))

    def _working(self, i: int) -> torch.dtype:
        p = self.values[i]
        return working_dtype(precision.island(p.dtype), p.device, self.rule.ns_dtype)

    def _momentum(self, i: int, g: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        """The new momentum, and the direction in the dtype of Newton-Schulz."""
        wide = precision.island(self.values[i].dtype)
        g = g.to(wide)
        if self.scale is not None:
            g = g * self.scale.to(wide)
        old = old.to(wide)
        m = _unless(self.skip, old, self.rule.momentum * old + g)
        # From ``m`` with the digits that storage may drop. Rounded here already, so that ranks
        # exchange half the bytes.
        return m, (g + self.rule.momentum * m).to(self._working(i))

    def _value(self, i: int, p: Tensor, y: Tensor) -> Tensor:
        """The new value of a part, out of the orthogonal direction."""
        shrunk, rate = self.factors[i]
        change = self.rule.orthogonal.scale(i) * precision.upcast(y)
        return _unless(self.skip, p, shrunk * p - rate * change.to(p.dtype))


class _Orthogonal:
    """Orthogonalises matrices of which ranks have parts; who does which is settled at the first
    call.

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
        self._matrices: list[Matrices] = []

    def __call__(
        self, shapes: Sequence[torch.Size], part: Part, like: Tensor, dtype: torch.dtype
    ) -> Iterator[Piece]:
        """``U V^T`` of parts of these shapes: this rank's pieces, as they come.

        ``like`` is any tensor of the device, ``dtype`` that of the parts.
        """
        self._matrices = []
        for shape, head_dim, place in zip(shapes, self._heads, self._places, strict=True):
            self._matrices.append(Matrices.of(shape, head_dim, place, self._axes))
        if self._simulated:
            return self._on_every_rank(part)
        # Once: parts have the same shapes at every step.
        if self._owners is None:
            self._owners = MatrixOwners(self._matrices, self._axes)
        return on_owners(self._work, part, like.new_empty(0, dtype=dtype), self._owners)

    def _on_every_rank(self, part: Part) -> Iterator[Piece]:
        for i, matrices in enumerate(self._matrices):
            sizes = (matrices.batch, matrices.rows, matrices.columns)
            whole = tuple(slice(0, n) for n in sizes)
            yield Piece(i, whole, on_every_rank(self._work, part(i, whole), matrices))

    def joined(self, pieces: Iterator[Piece]) -> Iterator[tuple[int, Tensor]]:
        """Each leaf's number and the whole of its pieces."""
        return joined(pieces, self._matrices)

    def scale(self, i: int) -> float:
        """``0.2 sqrt(max(rows, columns))``, of the whole matrix and not of this rank's part."""
        return _RMS * math.sqrt(max(self._matrices[i].shape))

    @property
    def _simulated(self) -> bool:
        """Whether vmap stands for the ranks, which then cannot do different things."""
        for axis in self._axes:
            if axis.host is not None and axis.host.token(axis.name) is not None:
                return True
        return False


def _as_matrices(x: Tensor) -> Float[Tensor, "batch rows columns"]:
    """A view: what comes before the last two dimensions is a batch of matrices."""
    return x[None] if x.ndim == 2 else x.flatten(0, -3)


def _of_matrices(x: Tensor, draws: Draws | None) -> Draws | None:
    """The draws of a leaf that is narrow, seen as :func:`_as_matrices` sees it."""
    if draws is None:
        return None
    key, shape, starts = draws
    # Rows are counted over all leading dimensions, so those can be one, but for a part that is cut
    # inside of it.
    if any(a != n for a, n in zip(x.shape[1:-2], shape[1:-2], strict=True)):
        raise ValueError(
            f"a part {list(x.shape)} of a weight {list(shape)}: a bfloat16 weight of more than "
            "three dimensions is split along its first, or its last two"
        )
    batch = math.prod(shape[:-2])
    first = starts[0] * math.prod(shape[1:-2]) if len(shape) > 2 else 0
    return Draws(key, (batch, *shape[-2:]), (first, *starts[-2:]))


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
