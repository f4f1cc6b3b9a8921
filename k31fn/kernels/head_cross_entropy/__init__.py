"""Cross-entropy statistics of the head: those of :mod:`k31fn.kernels.cross_entropy` for the logits
``hidden @ w``, which are not handed out.

``head_cross_entropy(hidden, w, labels, logits_bytes=0) -> Statistics(lse, picked)``::

    x = hidden @ w            lse = log sum_z exp(x_z)
    picked = x_y, and 0 where the label y is none of the columns 0 .. Z-1

Shapes: ``hidden [*rows D]``, ``w [D Z]``, ``labels [*rows]``; results ``[*rows]``. Labels count
from the first column of ``w``, so that a rank of a split vocabulary passes its own columns. The
caller joins the ranks' two numbers per token, as in :mod:`k31fn.kernels.cross_entropy`, and knows
what an ignored label means: cotangents of 0 give gradients of 0 where ``hidden`` is finite.

Precision: the product is rounded to the dtype of ``hidden``, all else is float32 (float64 for
float64 inputs). Sums over tokens are taken in float32 and rounded once.

Memory: ``logits_bytes`` bounds what is kept of the logits; 0 is an implementation's own bound.
The reference cuts the vocabulary into pieces, 256 MiB of float32 each, and computes a piece again
in the backward: four products in all.

``triton`` cuts the tokens into chunks, of at most 2.5 GiB of logits in the dtype of ``hidden``:
8,192 tokens of 163,840 columns in bfloat16. The logits of the last chunk stay for the backward,
which writes their gradient over them; those of earlier chunks are computed again there, in the same
memory. So a call of one chunk takes three products, and one of n chunks ``3 + (n - 1) / n``. With
several chunks the gradient of ``w`` is summed in float32, beside 4.4 GiB at 7168 x 163840. Smaller
chunks would need that sum, or one rounded to bfloat16 for each chunk, at 8,192 tokens already.

Gradients flow to ``hidden`` and ``w``, to any order in the reference; ``triton`` has the first.
"""

import torch

from k31fn.kernels.head_cross_entropy.reference import head_cross_entropy as _reference
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op

__all__ = ["head_cross_entropy"]

_TRITON = "k31fn.kernels.head_cross_entropy.triton"
head_cross_entropy = Op("head_cross_entropy", _reference)
head_cross_entropy.register(
    Implementation(
        "triton",
        ("cuda",),
        lazily(_TRITON, "head_cross_entropy"),
        lazily(_TRITON, "accepts"),
        dtypes=(torch.bfloat16, torch.float32),
        on_request=("npu", *ON_REQUEST),
        no_vmap="the gradient of the logits is written over them, which has no batching rule",
        missing=missing_triton,
        kernels=_TRITON,
    )
)
