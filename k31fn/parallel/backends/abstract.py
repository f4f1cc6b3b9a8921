"""One rank without the others: collectives that compute shapes, on meta tensors.

    with record_collectives() as record:
        step(abstract_axes(Mesh(fsdp=256, tp=8)), params, batch)    # meta tensors
    print(record.counts, record.nbytes)

So what a rank of any mesh holds and sends is found by running the program itself, without values
and in no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from k31fn.parallel.axis import Channel, axis_names
from k31fn.parallel.mesh import Coordinate, Mesh, MeshAxes, row_major

__all__ = ["abstract_axes"]


def abstract_axes(mesh: Mesh, coordinate: Coordinate | None = None) -> MeshAxes:
    """The axes of one rank of ``mesh``, the first if no ``coordinate`` is given.

    A collective over them gives a meta tensor of the shape and dtype that its result has on that
    rank, is recorded and has its transpose; no other rank exists, no value is exchanged.
    """
    names = axis_names(mesh.axes().atoms)
    return mesh.axes(_AbstractHost(mesh, names, coordinate or mesh.coordinate(0)))


@dataclass(eq=False)
class _AbstractHost:
    mesh: Mesh
    names: tuple[str, ...]
    coordinate: Coordinate

    def token(self, name: str) -> Tensor | None:
        # A rank of its own, as on threads and processes: code that reads its index on the host
        # takes the same path here.
        return None

    def channel(self, names: tuple[str, ...]) -> Channel:
        axes = tuple(a for a in self.mesh.axes().atoms if a.name in names)
        index, size = row_major(axes, self.coordinate)
        return _AbstractChannel(size, index)


@dataclass(eq=False)
class _AbstractChannel:
    size: int
    index: int

    def start(self, op: str, x: Tensor, kw: Mapping[str, Any]) -> Callable[[], Tensor]:
        if not x.is_meta:
            raise ValueError(
                f"{op} on an abstract mesh of a tensor on {x.device}: only meta tensors have no "
                "values"
            )
        # Made at the start, as process groups make their buffers: a count of live bytes is right.
        y = x.new_empty(self._shape(op, list(x.shape), kw))
        return lambda: y

    def send(self, x: Tensor, to: int) -> Callable[[], Tensor]:
        return lambda: x

    def recv(self, into: Tensor, source: int) -> Callable[[], Tensor]:
        return lambda: into

    def _shape(self, op: str, shape: list[int], kw: Mapping[str, Any]) -> list[int]:
        match op:
            case "psum" | "pmax" | "ppermute":
                pass
            case "all_gather" | "all_gather_invariant":
                shape[kw["dim"]] *= self.size
            case "psum_scatter" | "pslice":
                shape[kw["dim"]] //= self.size
            case "all_to_all":
                shape[kw["split"]] //= self.size
                shape[kw["concat"]] *= self.size
            case "ragged_all_to_all":
                shape[0] = sum(kw["recv"])
            case _:
                # A new collective must say its shape: a guess would forecast wrong traffic.
                raise ValueError(f"{op} on an abstract mesh: no such collective")
        return shape
