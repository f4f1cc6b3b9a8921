"""Softmax attention of each query over one interval of keys, with no order among them: inside
images.

``interval_attention(q, k, v, start, stop, scale)``::

    o[t, h] = sum_s softmax_s(scale <q[t, h], k[s, h]>) v[s, h]    over start[t] <= s < stop[t]

Source: the vision tower of arXiv 2607.24653 (bidirectional inside one image or clip, many of them
packed in a row).

Shapes: ``q [B T H K]``, ``k [B S H K]``, ``v [B S H V]``; the result is ``[B T H V]`` in float32
(float64 for float64 inputs).

Mask: ``start, stop [B T]``, the first key and one past the last key of the query's image; any
interval inside ``[0, S]`` is allowed, also keys after the query. ``start == stop`` is a padding
query: its output is 0 and has no gradient.

Gradients: to ``q, k, v``, to any order. A padding query sends none; a key that no query sees
receives zero.
"""

import torch

from k31fn.kernels.interval_attention.reference import interval_attention as _reference
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op
from k31fn.kernels.vendor import adapter

__all__ = ["interval_attention"]

_OPERATORS = ("npu_fusion_attention", "npu_fusion_attention_grad")
_DTYPES = (torch.bfloat16, torch.float32)
interval_attention = Op("interval_attention", _reference)
interval_attention.register(
    adapter(
        "interval_attention",
        "interval_attention",
        *_OPERATORS,
        dtypes=_DTYPES,
        no_capture="CANN's operator takes the lengths of images from the host",
    )
)
_TRITON = "k31fn.kernels.interval_attention.triton"
interval_attention.register(
    Implementation(
        "triton",
        ("cuda",),
        lazily(_TRITON, "interval_attention"),
        lazily(_TRITON, "accepts"),
        dtypes=_DTYPES,
        by_default=(torch.bfloat16,),  # of float32 no tensor core makes exact products
        on_request=ON_REQUEST,
        missing=missing_triton,
        kernels=_TRITON,
    )
)
