"""Causal softmax attention of Gated MLA without positions, inside documents.

``attention(q, k, k_shared, v, start, stop, scale)``::

    o[t, h] = sum_s softmax_s(scale <q[t, h], [k[s, h] ; k_shared[s]]>) v[s, h]
    over start[t] <= s < stop[t]

Source: arXiv 2607.24653 (Gated MLA; NoPE, so the "rope" dims are plain dims shared by the heads),
arXiv 2405.04434.

Shapes: ``q [B T H K]``, ``k [B S Hk N]``, ``k_shared [B S P]`` with K = N + P, ``v [B S Hk V]``, Hk
= H or 1 (one
head for all: the absorbed form, where ``k`` and ``v`` are both the latent and ``q`` carries the
absorbed weight); the result is ``[B T H V]`` in float32 (float64 for float64 inputs): it is gated
before it is rounded.

Mask: ``start, stop [B T]`` bound the keys that a query sees, which are contiguous because documents
are: the first token of its document, and its own index + 1. ``start == stop`` is a padding query:
its output is 0 and has no gradient. If T == S, queries and keys are the same tokens and ``stop[t]
<= t + 1``; with fewer queries than keys (a slice of them, under context parallelism; the next
tokens, in decoding) the bounds are indices of keys all the same.

Gradients: to ``q, k, k_shared, v``, to any order. A padding query sends none; a key that no query
sees receives zero.
"""

import torch

from k31fn.kernels.attention.absorbed import absorbed
from k31fn.kernels.attention.reference import attention as _reference
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op
from k31fn.kernels.vendor import adapter

__all__ = ["attention"]

# float64 is left out: it runs the reference, on any device
_OPERATORS = ("npu_fusion_attention", "npu_fusion_attention_grad")
attention = Op("attention", _reference)
attention.register(
    adapter(
        "attention",
        "attention",
        *_OPERATORS,
        dtypes=(torch.bfloat16, torch.float32),
        no_capture="CANN's operator takes the lengths of documents from the host",
    )
)
_TRITON = "k31fn.kernels.attention.triton.op"
attention.register(
    Implementation(
        "triton",
        ("cuda",),
        lazily(_TRITON, "attention"),
        lazily(_TRITON, "accepts"),
        dtypes=(torch.bfloat16, torch.float32),
        by_default=(torch.bfloat16,),  # of float32 no tensor core makes exact products
        on_request=ON_REQUEST,
        missing=missing_triton,
        kernels=_TRITON,
    )
)
attention.register(absorbed(_reference))
