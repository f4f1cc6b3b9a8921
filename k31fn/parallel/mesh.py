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
import math
from collections.abc import Iterator
from dataclasses import dataclass

from k31fn.parallel.axis import Axis, Host

__all__ = ["VIEWS", "Coordinate", "Mesh", "MeshAxes"]

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
        found: list[Axis] = []
        for name in names:
            if name not in VIEWS:
                raise ValueError(f"mesh axis {name!r} unknown; known: {', '.join(VIEWS)}")
            view: tuple[Axis, ...] = getattr(self, name)
            if shared := [a.name for a in view if a in found]:
                raise ValueError(
                    f"mesh axes {names}: {name!r} shares axis {shared[0]!r} with another; name one"
                )
            found += view
        return tuple(a for a in self.atoms if a in found)


@dataclass(frozen=True)
class Mesh:
    """How many ranks each view has; the world is ``pp * dp * fsdp * cp * tp``.

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
        if self._expert_split(self.ep) is None:
            ranks = self.fsdp * self.cp * self.tp
            fitting = [n for n in range(1, ranks + 1) if self._expert_split(n) is not None]
            raise ValueError(
                f"mesh.ep={self.ep} does not divide fsdp x cp x tp = {self.fsdp} x {self.cp} x "
                f"{self.tp} from its "
                f"innermost ranks; nearest: {_nearest(self.ep, fitting)}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.fsdp * self.cp * self.tp

    def axes(self, host: Host | None = None) -> MeshAxes:
        """The axis objects, bound to ``host``; without one they have names and sizes only."""
        split = self._expert_split(self.ep)
        assert split is not None
        views: dict[str, tuple[Axis, ...]] = {
            n: _atoms(n, (getattr(self, n),), host) for n in ("pp", "dp")
        }
        expert: list[Axis] = []
        for name, inner in zip(("fsdp", "cp", "tp"), split, strict=True):
            size = getattr(self, name)
            views[name] = _atoms(
                name, (size,) if inner in (1, size) else (size // inner, inner), host
            )
            expert += views[name][-1:] if inner > 1 else ()
        atoms = tuple(a for view in views.values() for a in view)
        efsdp = tuple(a for n in ("fsdp", "cp") for a in views[n] if a not in expert)
        etp = tuple(a for a in views["tp"] if a not in expert)
        return MeshAxes(atoms, **views, ep=tuple(expert), efsdp=efsdp, etp=etp)

    def coordinates(self) -> Iterator[Coordinate]:
        """Each rank's coordinate, in the order of ranks."""
        atoms = self.axes().atoms
        for index in itertools.product(*(range(a.size) for a in atoms)):
            yield dict(zip((a.name for a in atoms), index, strict=True))

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of ``rank``."""
        found: Coordinate = {}
        for axis in reversed(self.axes().atoms):
            rank, found[axis.name] = divmod(rank, axis.size)
        return dict(reversed(found.items()))

    def check_world(self, world_size: int) -> None:
        """Refuses a world of another size.

        Raises:
            ValueError: names both sizes, and the values of ``mesh.fsdp`` or ``mesh.dp`` that would
                fit.
        """
        if self.world_size == world_size:
            return
        sizes = " x ".join(
            f"{f.name} {getattr(self, f.name)}" for f in dataclasses.fields(self) if f.name != "ep"
        )
        fixed = self.world_size // self.fsdp
        fix = (
            f"mesh.fsdp={world_size // fixed} would fit"
            if world_size % fixed == 0
            else "no mesh.fsdp alone fits"
        )
        raise ValueError(
            f"mesh: {sizes} = {self.world_size} ranks, the world has {world_size}; {fix}"
        )

    def check_divides(self, view: str, **sizes: int) -> None:
        """Refuses a size that does not split evenly over ``view``: ``mesh.check_divides("ep",
        num_experts=896)``.

        Raises:
            ValueError: names the nearest valid values of the view.
        """
        ranks = math.prod(a.size for a in self.axes().view(view))
        for name, size in sizes.items():
            if size % ranks:
                divisors = [n for n in range(1, size + 1) if size % n == 0]
                raise ValueError(
                    f"mesh.{view}={ranks} does not divide {name}={size}; nearest: "
                    f"{_nearest(ranks, divisors)}"
                )

    def _expert_split(self, ep: int) -> tuple[int, int, int] | None:
        """Ranks that ``ep`` takes of fsdp, cp and tp, innermost first; None if it cannot."""
        taken: list[int] = []
        for size in (self.tp, self.cp, self.fsdp):
            inner = size if ep % size == 0 else ep
            if size % inner:
                return None
            taken.append(inner)
            ep //= inner
        return (taken[2], taken[1], taken[0]) if ep == 1 else None


def _atoms(name: str, sizes: tuple[int, ...], host: Host | None) -> tuple[Axis, ...]:
    names = (name,) if len(sizes) == 1 else (f"{name}_outer", f"{name}_inner")
    return tuple(Axis(n, s, host) for n, s in zip(names, sizes, strict=True) if s > 1)


def _nearest(value: int, valid: list[int]) -> str:
    below, above = [v for v in valid if v < value][-1:], [v for v in valid if v > value][:2]
    return ", ".join(map(str, below + above))
