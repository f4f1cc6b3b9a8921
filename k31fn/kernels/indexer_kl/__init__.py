"""The indexer's loss: how far its softmax is from the attention's probabilities on the chosen keys.

``indexer_kl(q, k, w, teacher, topk_idx, scale)``::

    I[t, s]  = sum_j w[t, j] relu(scale <q[t, j], k[s]>)
    KL_t     = sum_{s in S_t} p[t, s] (log p[t, s] - log softmax_{S_t}(I[t, :])[s])
    S_t      = topk_idx[t] without -1
    result   = sum_t KL_t

Source: DeepSeek-V3.2, arXiv 2512.02556, equations 3 and 4. No epsilon inside the logarithms (0 log
0 = 0), and slots of -1 take no part in the softmax.

Shapes: ``q [B T J I]``, ``k [B S I]``, ``w [B T J]``, ``teacher [B T M]`` (p on the slots of
``topk_idx [B T M]``; each row sums to 1), which :func:`~k31fn.kernels.sparse_attention.head_probs`
makes: under tensor parallelism its sums over the heads of each rank are added between the two. The
result is a scalar, a plain sum over queries: the caller divides by its own denominator. float32
(float64 for float64 inputs).

A position in several slots is in the set once, with an even share of its probability in each
(``triton`` takes sets without, as ``index_topk`` makes them, and passes on the teacher's NaN).

Mask: a query with an empty set (padding) adds 0. If T == S, ``topk_idx[t] <= t``.

Gradients: ``dL/dI = softmax(I) - p`` to ``q, k, w``, to any order; none to ``teacher``.
"""

import torch

from k31fn.kernels.indexer_kl.reference import indexer_kl as _reference
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op
from k31fn.kernels.vendor import declined

__all__ = ["indexer_kl"]

indexer_kl = Op("indexer_kl", _reference)
indexer_kl.register(
    declined(
        "npu_sparse_lightning_indexer_grad_kl_loss",
        "it makes the teacher from one rank's heads itself, so no sum over tp can be taken",
    )
)
_TRITON = "k31fn.kernels.indexer_kl.triton"
indexer_kl.register(
    Implementation(
        "triton",
        ("cuda",),
        lazily(_TRITON, "indexer_kl"),
        lazily(_TRITON, "accepts"),
        dtypes=(torch.bfloat16, torch.float32),
        by_default=(torch.bfloat16,),  # of float32 no tensor core makes exact products
        on_request=ON_REQUEST,
        missing=missing_triton,
        kernels=_TRITON,
    )
)
