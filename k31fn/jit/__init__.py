"""Pure functions of trees, captured as one graph of a device and launched as one.

    step = jit(step, donate=(0,))
    state, numbers = step(state, batch, lr)

The first call runs as it is, the second under a check that names what a graph cannot hold, the
third is captured; every later one copies its arguments in and launches the graph. The host then
costs nothing that grows with the function.
"""

from k31fn.jit.function import CaptureError, describe, jit

__all__ = ["CaptureError", "describe", "jit"]


def __dir__() -> list[str]:
    return __all__
