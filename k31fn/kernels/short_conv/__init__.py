"""Short causal depthwise convolutions and SiLU over packed documents, several inputs at once.

``short_conv(inputs, weights, ids, histories)`` gives for each input ``x``, of its ``weight``::

    z[t, c] = sum_{j=0}^{W-1} weight[c, W-1-j] x[t-j, c]
              over the t - j that are in the document of t
    y       = z sigmoid(z)

Source: Kimi Linear, arXiv 2510.26692. ``weight[:, -1]`` meets the token itself, as in
``torch.nn.Conv1d``. No bias.

Shapes: ``inputs``, a tuple of ``[B T channels]``, such as the projections to q, k and v, whose
channels may differ; ``weights``, as many ``[channels W]``; ``ids [B T]`` (document numbers, 0 is
padding, at the end of a row only); ``histories``, as many ``[B W-1 channels]``: the W-1 inputs
before the row, oldest first, which belong to the document of the row's first token; ``()`` for
zeros. The result is a tuple. Computed in float32 (float64 for float64 inputs), rounded once to the
dtype of ``x``.

Documents: a document's history before its first token is zero. Padding (finite values) gives 0 and
gets gradient 0.

Gradients flow to ``inputs weights histories``, to any order in the reference. ``triton`` takes up
to three inputs, of one dtype, in one launch each way.
"""

import torch

from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op
from k31fn.kernels.short_conv.reference import short_conv as _reference

__all__ = ["short_conv"]

_TRITON = "k31fn.kernels.short_conv.triton.op"
short_conv = Op("short_conv", _reference)
short_conv.register(
    Implementation(
        "triton",
        ("cuda", "npu"),
        lazily(_TRITON, "short_conv"),
        lazily(_TRITON, "accepts"),
        dtypes=(torch.bfloat16, torch.float32),
        on_request=ON_REQUEST,
        missing=missing_triton,
        kernels=_TRITON,
    )
)
