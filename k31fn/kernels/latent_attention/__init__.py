"""Attention of many heads to a chosen set of latents per query: the absorbed form of DSA.

``latent_attention(q, kv, topk_idx, scale, rank) -> (out, lse)`` and
``latent_probs(q, kv, lse, topk_idx, scale) -> probs``::

    z[t, h, s]  = scale <q[t, h], kv[s]>
    lse[t, h]   = log sum_{s in S_t} exp z[t, h, s]         S_t = topk_idx[t] without -1
    out[t, h]   = sum_{s in S_t} exp(z[t, h, s] - lse[t, h]) kv[s, :rank]
    probs[t, m] = sum_h exp(z[t, h, s] - lse[t, h])         s = topk_idx[t, m]

Source: DeepSeek-V3.2, arXiv 2512.02556; the absorbed form is that of DeepSeek-V2, arXiv 2405.04434.
It is :mod:`k31fn.kernels.sparse_attention` on keys ``c W_uk`` and values ``c W_uv`` if ``kv`` is
``[c ; kr]``, ``q`` is ``[q W_uk^T ; q_r]``, and the caller multiplies ``out`` with ``W_uv``. A pair
costs ``2 R + P`` products a head and not ``N + P + V``; but one row is all that is read of a key
for all heads, so a fused form gathers, reads and multiplies the chosen pairs only.

Shapes: ``q [B T H K]``, ``kv [B S K]``, ``rank`` = R <= K: the first R dims are values too.
``topk_idx [B T M]`` positions in ascending order, then -1 where there are fewer, as
:mod:`k31fn.kernels.indexer` makes them. ``out [B T H R]`` in the dtype of ``q``, since the product
that follows takes it so; ``lse [B T H]`` and ``probs [B T M]`` in float32 (float64 for float64
inputs). Under tensor parallelism ``probs`` sums over the local heads.

A position that is there twice counts once; ``triton`` refuses it, and positions that do not ascend:
that query's ``out``, ``lse`` and ``probs`` are NaN.

Mask: the set says all; it must hold visible keys only, and if T == S, ``topk_idx[t] <= t``. A query
with none (all -1) has output 0, probs 0 and the finite ``lse`` 1e30, of which every probability is
0; slots of -1 have probs 0.

Gradients: of ``out`` to ``q`` and ``kv``, to any order; none through ``lse``, ``probs`` or
``topk_idx``.
"""

import torch

from k31fn.kernels.latent_attention.reference import latent_attention as _reference
from k31fn.kernels.latent_attention.reference import latent_probs as _latent_probs
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op

__all__ = ["latent_attention", "latent_probs"]

latent_attention = Op("latent_attention", _reference)
latent_probs = Op("latent_probs", _latent_probs, differentiable=False)
for _op, _file in ((latent_attention, "op"), (latent_probs, "probs")):
    _module = f"k31fn.kernels.latent_attention.triton.{_file}"
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
