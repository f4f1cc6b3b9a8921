"""Histogram of the router's required biases, the statistic of quantile balancing (Kimi K3 report,
arXiv 2607.24653).

Token ``i`` takes expert ``j`` when ``s_ij + b_j`` reaches its cutoff ``alpha_i``, the (k+1)-th
largest biased score, that is when ``b_j`` reaches the required bias ``r_ij = alpha_i - s_ij``. For
scores in (0, 1) and biases in ``[bmin, bmax]`` it lies in ``[bmin - 1, bmax + 1]``, which
:func:`bin_range` cuts into equal bins.

``required_bias_histogram(scores [N E], cutoff [N], valid [N], bias [E], num_bins) -> int32 [E
num_bins]`` counts the tokens whose ``valid`` is true, each once per expert. Integer counts add up
exactly over micro-batches and ranks. No gradient. ``triton`` counts the same numbers: it adds
nothing atomically.
"""

import torch

from k31fn.kernels.histogram.reference import bin_range
from k31fn.kernels.histogram.reference import required_bias_histogram as _required_bias_histogram
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op

__all__ = ["bin_range", "required_bias_histogram"]

required_bias_histogram = Op(
    "required_bias_histogram", _required_bias_histogram, differentiable=False
)
_TRITON = "k31fn.kernels.histogram.triton"
required_bias_histogram.register(
    Implementation(
        "triton",
        ("cuda",),
        lazily(_TRITON, "required_bias_histogram"),
        lazily(_TRITON, "accepts"),
        dtypes=(torch.float32,),
        on_request=("npu", *ON_REQUEST),
        missing=missing_triton,
        kernels=_TRITON,
    )
)
