"""Parameters over the data axes: FSDP, HSDP and DDP as one rule per leaf.

A :class:`Placement` says what becomes of one rank's part of a weight where the model uses it. Along
the axes that spread it for memory only (``fsdp``, ``cp``; ``efsdp`` for experts) it is gathered,
and its gradient reduce-scattered (ZeRO-3, Rajbhandari et al. 2020, arXiv 1910.02054); along the
data axes on which all ranks hold the same part (``dp``, and all of them for a weight too small to
spread) it is marked as varying, and its gradient summed. So it is over the axes that split a weight
of which it is a low-rank factor, and do not split the factor itself::

    w = all_gather(pvary(part, vary), gather, dim)   in the compute dtype; the gradient in
                                                       the reduce dtype

What splits a weight for compute (``tp``, ``ep``, ``etp``) stays split: that is the layer's
business.

:func:`gather` does all of it, for one use; :mod:`k31fn.parallel.fsdp.fused_gather` does it ahead of
the use. A training step sums over replicas once, however many micro-batches and layers it has::

    held = enter_step(params, places)                   # pvary
    for batch in batches:                               # the model gathers, layer by layer
        grads += value_and_grad(loss)(held, batch, gather_only(places))
    grads = sum_gradients(grads, places)                # psum
"""

from k31fn.parallel.fsdp.placement import Placement, Placements, gather, gather_only, placements
from k31fn.parallel.fsdp.replicas import enter_step, sum_gradients

__all__ = [
    "Placement",
    "Placements",
    "enter_step",
    "gather",
    "gather_only",
    "placements",
    "sum_gradients",
]
