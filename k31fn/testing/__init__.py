"""What k31fn is tested with, for testing your own layers.

* :func:`check_grads`: gradients, first and second, against finite differences.
* :func:`assert_close_trees`: two trees of tensors, the worst leaf named first.
* :func:`assert_op_matches`: an implementation of an operator against its reference.
* :func:`live_bytes`: peak memory of live tensors, on any device.

Everything raises ``AssertionError`` for a wrong number and ``ValueError`` for a wrong call.
"""

from k31fn.testing.gradients import check_grads
from k31fn.testing.memory import Largest, LiveBytes, live_bytes
from k31fn.testing.operators import assert_op_matches
from k31fn.testing.trees import assert_close_trees

__all__ = [
    "Largest",
    "LiveBytes",
    "assert_close_trees",
    "assert_op_matches",
    "check_grads",
    "live_bytes",
]
