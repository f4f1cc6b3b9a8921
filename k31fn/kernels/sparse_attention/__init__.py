"""Attention over a chosen set of keys per query, and the probabilities that it gave them.

``sparse_attention(q, k, k_shared, v, topk_idx, scale) -> (out, lse)`` and
``head_probs(q, k, k_shared, lse, topk_idx, scale) -> probs``::

    z[t, h, s] = scale <q[t, h], [k[s, h] ; k_shared[s]]>
    lse[t, h]  = log sum_{s in S_t} exp z[t, h, s]          S_t = topk_idx[t] without -1
    out[t, h]  = sum_{s in S_t} exp(z[t, h, s] - lse[t, h]) v[s, h]
    probs[t, m] = sum_h exp(z[t, h, s] - lse[t, h])         s = topk_idx[t, m]

Source: DeepSeek-V3.2, arXiv 2512.02556 (one set for all heads; the head-summed probabilities teach
the indexer). The attention keeps one number per query and head, from which ``head_probs`` makes the
teacher again, tile by tile, where the indexer's loss is made.

Shapes: ``q [B T H K]``, ``k [B S Hk N]``, ``k_shared [B S P]`` with K = N + P, ``v [B S Hk V]``, Hk
= H or 1 (one
head for all: the absorbed form, where ``k`` and ``v`` are both the latent and ``q`` carries the
absorbed weight); ``topk_idx [B T M]`` positions, -1 where there are fewer. ``out [B T H
V]``, ``lse [B T H]`` and ``probs [B T M]`` in float32 (float64 for float64 inputs). Under tensor
parallelism ``probs`` sums over the local heads.

A position that is there twice counts once, in ``out`` and in ``lse``; its slots share its
probability evenly, so that ``probs`` still sums to the number of heads. The sets of
:mod:`k31fn.kernels.indexer` have none, and ``triton`` refuses it: that query's ``probs`` are NaN.

Mask: the set says all; it must hold visible keys only, and if T == S, ``topk_idx[t] <= t``. A query
with none (all -1) has output 0, probs 0 and the finite ``lse`` 1e30, of which every probability is
0; slots of -1 have probs 0.

Gradients: of ``out`` to ``q, k, k_shared, v``, to any order; none through ``lse``, ``probs`` or
``topk_idx``.
"""

import torch

from k31fn.kernels.attention.absorbed import absorbed
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op
from k31fn.kernels.sparse_attention.reference import SparseAttentionOut
from k31fn.kernels.sparse_attention.reference import head_probs as _head_probs
from k31fn.kernels.sparse_attention.reference import sparse_attention as _reference
from k31fn.kernels.vendor import declined

__all__ = ["SparseAttentionOut", "head_probs", "sparse_attention"]

sparse_attention = Op("sparse_attention", _reference)
sparse_attention.register(
    declined(
        "npu_sparse_flash_attention",
        "not bound yet; it takes the absorbed form of 512 and 64 dims with 2^n heads only",
    )
)
head_probs = Op("head_probs", _head_probs, differentiable=False)
for _op, _file in ((sparse_attention, "op"), (head_probs, "probs")):
    _module = f"k31fn.kernels.sparse_attention.triton.{_file}"
    _op.register(
        Implementation(
            "triton",
            ("cuda",),
            lazily(_module, _op.name),
            lazily(_module, "accepts"),
            dtypes=(torch.bfloat16, torch.float32),
            by_default=(torch.bfloat16,),  # of float32 no tensor core makes exact products
            on_request=ON_REQUEST,
            missing=missing_triton,
            kernels=_module,
        )
    )
    _op.register(absorbed(_op.reference))
