"""Parallelism: meshes, partition specs and named-axis collectives.

    mesh = Mesh(fsdp=2, tp=2)

    def layer(axes, params, x):                     # one rank's arrays
        return mlp.apply(params, x, cfg, sh=Sharding.on(axes)).y

    specs = partition(mlp.specs(cfg), AxisRules(spread=()), mesh)
    y = shard_map(layer, mesh, (specs, P("fsdp", "tp")), P("fsdp", "tp"))(params, x)

* :class:`Mesh`, :class:`MeshAxes`: the ranks and the views of them.
* :class:`P`, :class:`AxisRules`, :func:`partition`: how trees of arrays are split.
* :class:`Sharding`: what a layer takes as ``sh``.
* :func:`shard_map` and :mod:`~k31fn.parallel.collectives`: functions of one rank's arrays, in one
  process or many.
* :mod:`~k31fn.parallel.backends`: what a rank is: a sample of vmap, a thread, a process.
* :func:`start`, :func:`wait`: collectives that overlap with what runs between.
* :mod:`~k31fn.parallel.fsdp`: parameters over the data axes; :mod:`~k31fn.parallel.scan`: layers
  that gather ahead.
* :mod:`~k31fn.parallel.pipeline`: schedules of stages; :mod:`~k31fn.parallel.point_to_point`:
  messages between ranks.
* :func:`record_collectives`, :func:`check_invariance`: what tests ask.
"""

from k31fn.parallel.backends.processes import axes_of_process, start_processes, stop_processes
from k31fn.parallel.backends.threads import each_rank
from k31fn.parallel.collective_record import note_event, record_collectives
from k31fn.parallel.collectives import (
    all_gather,
    all_gather_invariant,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    ppermute,
    pslice,
    psum,
    psum_scatter,
    pvary,
    ragged_all_to_all,
)
from k31fn.parallel.invariance import check_invariance
from k31fn.parallel.mesh import Mesh, MeshAxes
from k31fn.parallel.overlap import start, wait
from k31fn.parallel.partition import AxisRules, P, partition
from k31fn.parallel.shard_map import shard_map
from k31fn.parallel.sharding import UNSHARDED, Sharding

__all__ = [
    "UNSHARDED",
    "AxisRules",
    "Mesh",
    "MeshAxes",
    "P",
    "Sharding",
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "axes_of_process",
    "axis_index",
    "axis_size",
    "check_invariance",
    "each_rank",
    "note_event",
    "partition",
    "pmax",
    "ppermute",
    "pslice",
    "psum",
    "psum_scatter",
    "pvary",
    "ragged_all_to_all",
    "record_collectives",
    "shard_map",
    "start",
    "start_processes",
    "stop_processes",
    "wait",
]


def __dir__() -> list[str]:
    return __all__
