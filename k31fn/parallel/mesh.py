"""The mesh: atomic axes, and the views that the field's names stand for.

| view | others call it | ranks that differ in it |
|---|---|---|
| ``pp`` | pipeline | hold other layers |
| ``dp`` | ``dp_replicate``, DDP | hold the same parameters, other data |
| ``fsdp`` | ``dp_shard``, ZeRO-3 | hold other shards of the parameters, other data |
| ``cp`` | context, KCP | hold other tokens of the same documents |
| ``tp`` | tensor, with sequence sharding | hold other heads and columns |
| ``ep`` | expert | hold other experts |
| ``efsdp`` | ``dp_shard_mod_ep`` | hold the same experts, other shards of them |
| ``etp`` | expert tensor | hold the same experts, other columns of them |

``ep`` is no axis of its own: it takes the innermost ranks of ``fsdp x cp x tp``; ``etp`` is what is
left of ``tp``, and ``efsdp`` what is left of ``fsdp x cp``. So (fsdp 2, ep 2) is a world of 2, and
(fsdp 4, ep 2) splits ``fsdp`` into two atomic axes, of which ``ep`` is the inner one. Ranks count
with ``tp`` fastest: rank = ((((pp, dp), fsdp), cp), tp).

Rows of a batch are split over ``dp`` and ``fsdp``, its tokens over ``cp`` in contiguous slices;
between the layers each of these slices is split once more over ``tp``. :attr:`MeshAxes.data` are
the ranks that hold other data.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from k31fn.limits import divisors, nearest
from k31fn.parallel.axis import Axis, Host, axis_names, num_ranks

__all__ = ["VIEWS", "Coordinate", "Mesh", "MeshAxes", "nearest_divisors", "row_major"]

VIEWS = ("pp", "dp", "fsdp", "cp", "tp", "ep", "efsdp", "etp")

Coordinate = dict[str, int]
"""A rank's index along each atomic axis."""


@dataclass(frozen=True)
class MeshAxes:
    """The views of a mesh as tuples of atomic axes; an axis of size 1 is left out, so an absent
    view is ``()``.

    A collective takes any of them, a sum of neighbours (``axes.fsdp + axes.cp``) or one atomic
    axis.

    Attributes:
        atoms: all atomic axes, outermost first.
    """

    atoms: tuple[Axis, ...] = ()
    pp: tuple[Axis, ...] = ()
    dp: tuple[Axis, ...] = ()
    fsdp: tuple[Axis, ...] = ()
    cp: tuple[Axis, ...] = ()
    tp: tuple[Axis, ...] = ()
    ep: tuple[Axis, ...] = ()
    efsdp: tuple[Axis, ...] = ()
    etp: tuple[Axis, ...] = ()

    @property
    def data(self) -> tuple[Axis, ...]:
        """``dp``, ``fsdp`` and ``cp``: over these sums of a batch's tokens go, and gradients of
        what they all hold.
        """
        return self.view("dp", "fsdp", "cp")

    def view(self, *names: str) -> tuple[Axis, ...]:
        """The atomic axes of these views together, in the mesh's order.

        Raises:
            ValueError: an unknown view, or two views that share an axis.
        """
        axes: list[Axis] = []
        for name in names:
            if name not in VIEWS:
                raise ValueError(f"mesh axis {name!r} unknown; known: {', '.join(VIEWS)}")
            for axis in getattr(self, name):
                # As fsdp and ep do: a sum over such a pair would count some ranks twice.
                if axis in axes:
                    raise ValueError(
                        f"mesh axes {names}: {name!r} shares axis {axis.name!r} with another; name "
                        "one"
                    )
                axes.append(axis)
        return self.in_order(axes)

    def in_order(self, axes: Collection[Axis]) -> tuple[Axis, ...]:
        """Atomic axes in the mesh's order."""
        return tuple(axis for axis in self.atoms if axis in axes)


_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Mesh:
    """The number of ranks of each view; the world is ``pp * dp * fsdp * cp * tp``.

    Raises:
        ValueError: a size below 1, or an ``ep`` that the ranks of ``fsdp x cp x tp`` cannot be
            split into.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"mesh.{field.name}={getattr(self, field.name)}: a view has at least one "
                    "rank; leave it out for one"
                )
        if self.world_size > _MOST_RANKS:
            raise ValueError(
                f"mesh: {self.world_size} ranks are more than {_MOST_RANKS}; lower one of its views"
            )
        if self._expert_split(self.ep) is None:
            ranks = self.fsdp * self.cp * self.tp
            # what splits them divides their number
            fitting = [n for n in divisors(ranks) if self._expert_split(n) is not None]
            raise ValueError(
                f"mesh.ep={self.ep} does not divide fsdp x cp x tp = {self.fsdp} x {self.cp} x "
                f"{self.tp} from its innermost ranks; nearest: {nearest(self.ep, fitting)}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.fsdp * self.cp * self.tp

    def axes(self, host: Host | None = None) -> MeshAxes:
        """The axis objects, bound to ``host``; without one they have names and sizes only."""
        expert_split = self._expert_split(self.ep)
        assert expert_split is not None
        views = {"pp": _atoms("pp", (self.pp,), host), "dp": _atoms("dp", (self.dp,), host)}
        expert: list[Axis] = []
        for name, inner in zip(("fsdp", "cp", "tp"), expert_split, strict=True):
            size: int = getattr(self, name)
            # Cut in two only where ep takes a part of it: each atom is a group of ranks, and in
            # the simulated mesh a level of vmap.
            cut = inner not in (1, size)
            views[name] = _atoms(name, (size // inner, inner) if cut else (size,), host)
            if inner > 1:
                expert.append(views[name][-1])
        atoms: list[Axis] = []
        for view in views.values():
            atoms += view
        efsdp = tuple(a for a in views["fsdp"] + views["cp"] if a not in expert)
        etp = tuple(a for a in views["tp"] if a not in expert)
        return MeshAxes(tuple(atoms), **views, ep=tuple(expert), efsdp=efsdp, etp=etp)

    def coordinates(self) -> Iterator[Coordinate]:
        """Each rank's coordinate, in the order of ranks."""
        atoms = self.axes().atoms
        names = axis_names(atoms)
        # The last index counts fastest: the order of ranks.
        for index in itertools.product(*(range(a.size) for a in atoms)):
            yield dict(zip(names, index, strict=True))

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of ``rank``."""
        atoms = self.axes().atoms
        coordinate = dict.fromkeys(axis_names(atoms), 0)
        for axis in reversed(atoms):  # innermost first, for it counts fastest
            rank, coordinate[axis.name] = divmod(rank, axis.size)
        return coordinate

    def group_of(self, rank: int, names: tuple[str, ...]) -> list[int]:
        """The ranks that differ from ``rank`` along these atomic axes only, itself among them, in
        order.
        """
        here = self.coordinate(rank)
        ranks: list[int] = []
        for other, coordinate in enumerate(self.coordinates()):
            # Moved along these axes, a rank of the group has the coordinate of this one.
            if coordinate | {name: here[name] for name in names} == here:
                ranks.append(other)
        return ranks

    def check_world(self, world_size: int) -> None:
        """Refuses a world of another size.

        Raises:
            ValueError: names both sizes, and the values of ``mesh.fsdp`` or ``mesh.dp`` that would
                fit.
        """
        if self.world_size == world_size:
            return
        # Without ep, which takes its ranks from the others and adds none.
        views = ("pp", "dp", "fsdp", "cp", "tp")
        sizes = " x ".join(f"{view} {getattr(self, view)}" for view in views)
        fixed = self.world_size // self.fsdp
        if world_size % fixed:
            fix = "no mesh.fsdp alone fits"
        else:
            fix = f"mesh.fsdp={world_size // fixed} would fit"
        raise ValueError(
            f"mesh: {sizes} = {self.world_size} ranks, the world has {world_size}; {fix}"
        )

    def check_divides(self, view: str, **sizes: int) -> None:
        """Refuses a size that does not split evenly over ``view``: ``mesh.check_divides("ep",
        num_experts=896)``.

        Raises:
            ValueError: names the nearest valid values of the view.
        """
        ranks = num_ranks(self.axes().view(view))
        for name, size in sizes.items():
            if size % ranks:
                raise ValueError(
                    f"mesh.{view}={ranks} does not divide {name}={size}; nearest: "
                    f"{nearest_divisors(ranks, size)}"
                )

    def _expert_split(self, ep: int) -> tuple[int, int, int] | None:
        """Ranks that ``ep`` takes of fsdp, cp and tp, innermost first; None if it cannot."""
        taken: list[int] = []
        # tp first: ranks of one node, between which the experts' exchange costs least.
        for size in (self.tp, self.cp, self.fsdp):
            # A view goes to ep whole while more is wanted; the last one is cut.
            inner = size if ep % size == 0 else ep
            if size % inner:
                return None
            taken.append(inner)
            ep //= inner
        if ep > 1:
            return None
        return taken[2], taken[1], taken[0]


def row_major(axes: tuple[Axis, ...], coordinate: Coordinate) -> tuple[int, int]:
    """The index of a coordinate along these axes taken as one, the last counting fastest, and how
    many there are.
    """
    index, size = 0, 1
    for axis in axes:
        index = index * axis.size + coordinate[axis.name]
        size *= axis.size
    return index, size


def _atoms(name: str, sizes: tuple[int, ...], host: Host | None) -> tuple[Axis, ...]:
    """One axis of the view's name, or two; those of one rank are left out."""
    names = (name,) if len(sizes) == 1 else (f"{name}_outer", f"{name}_inner")
    atoms: list[Axis] = []
    for atom_name, size in zip(names, sizes, strict=True):
        if size > 1:
            atoms.append(Axis(atom_name, size, host))
    return tuple(atoms)


def nearest_divisors(ranks: int, size: int, *, num_above: int = 2) -> str:
    """The divisors of ``size`` next to ``ranks``, as text for an error."""
    return nearest(ranks, divisors(size), num_above)
