"""Layers one after the other, whose weights are gathered just in time.

One reverse rule over the whole chain. Forward: the weights of layer i + 1 are asked for, then layer
i runs. Backward, from the last layer: the weights of layer i - 1 are asked for, layer i runs again
and backward, then its gradients start to be reduce-scattered, behind the backward of layer i - 1::

    forward   gather 0 | gather 1, run 0 | gather 2, run 1 | ...
    backward  gather n | gather n-1, pull n | scatter n, gather n-2, pull n-1 | ...

At most two layers' weights are there at once. What is kept of a layer is what it added to the carry
(a tensor that several carries share is kept once), its decisions, and of the functions inside those
that :class:`RematPlan` names. With ``every`` carries are kept at every so many layers only; those
between are made again, from the first of such a run on, before its backward::

    backward  light n-7 .. n-1, carry n-7 .. n | gather n | ...

For that only the part of the weights is gathered that layers need when their functions are kept
(``light``). It needs no cotangent: :func:`rebuilds` lets the caller begin before one is there.

Where weights are frozen the backward does what that of a loop would: no product is computed and
nothing sent for them, no cotangent goes below the first layer that it is for, and a layer through
which none has to pass is not gathered, run or kept again. What a carry depends on is known from the
forward, which notes it on a graph of one layer at a time where some weights of a layer are trained
and its carry depends on none yet.

Files: ``forward`` (the rule), ``backward``, ``prefetch`` (weights on their way), ``kept_layers``
(what lives in between), ``dependence`` (what needs a gradient at all), ``plan``.
"""

from k31fn.parallel.scan.forward import scan
from k31fn.parallel.scan.kept_layers import rebuilds
from k31fn.parallel.scan.plan import RematPlan, Step
from k31fn.parallel.scan.prefetch import Prefetch

__all__ = ["Prefetch", "RematPlan", "Step", "rebuilds", "scan"]
