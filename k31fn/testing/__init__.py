"""The checks that k31fn is tested with, for testing your own layers.

* :func:`check_grads`: gradients, first and second, against finite differences.
* :func:`assert_close_trees`: two trees of tensors, the worst leaf named first.
* :func:`assert_op_matches`: an implementation of an operator against its reference.
* :func:`assert_sharded_equals_dense`: a function of one rank's arrays, on a mesh, against one
  device.
* :func:`spawn_ranks`: processes of a gloo group to run it on.
* :func:`live_bytes`: peak memory of live tensors, on any device.
* :func:`captures_on_cpu`: whether a function can be captured as a graph, without a GPU.

Everything raises ``AssertionError`` for a wrong number and ``ValueError`` for a wrong call.
"""

from k31fn.testing.gradients import check_grads
from k31fn.testing.memory import Largest, LiveBytes, live_bytes
from k31fn.testing.operators import assert_op_matches
from k31fn.testing.ranks import Ranks, spawn_ranks
from k31fn.testing.sharded import ShardedReport, assert_sharded_equals_dense
from k31fn.testing.tape import captures_on_cpu
from k31fn.testing.trees import assert_close_trees

__all__ = [
    "Largest",
    "LiveBytes",
    "Ranks",
    "ShardedReport",
    "assert_close_trees",
    "assert_op_matches",
    "assert_sharded_equals_dense",
    "captures_on_cpu",
    "check_grads",
    "live_bytes",
    "spawn_ranks",
]


def __dir__() -> list[str]:
    return __all__
