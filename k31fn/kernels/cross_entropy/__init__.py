"""Softmax cross-entropy over some columns of the vocabulary, in two numbers per token.

For logits ``x [*rows, Z]`` and labels ``y [*rows]``:

    lse = log sum_z exp(x_z)            picked = x_y, and 0 where y is not one of the columns 0 ..
    Z-1

The loss of a token is ``lse - picked``. Over pieces of a vocabulary, labels counted from the
piece's first column, the pieces combine as ``log sum exp(lse)`` and ``sum picked``, whether they
are computed one after the other or on several ranks. What an ignored label (any negative one) means
is the caller's business.

Precision: float32 (float64 for float64 logits), whatever the dtype of the logits.
Gradients: to any order. The backward keeps the log-softmax of the columns in float32, so callers
bound their number.
"""

from k31fn.kernels.cross_entropy.reference import Statistics
from k31fn.kernels.cross_entropy.reference import cross_entropy as _cross_entropy
from k31fn.kernels.registry import Op

__all__ = ["Statistics", "cross_entropy"]

cross_entropy = Op("cross_entropy", _cross_entropy)
