"""Routed experts as operators on rows sorted by expert.

A token of a batch of ``N`` goes to ``G`` different experts of ``E``. :func:`sort_by_expert` sorts
the ``R = N G`` copies by expert, stably, so that an expert's rows are in token order:

* ``dispatch(x [N D], order, inverse) -> rows [R D]``: ``rows[r] = x[order[r] // G]``.
* ``grouped_matmul(rows [R I], w [E I O], sizes [E]) -> [R O]``: the first ``sizes[0]`` rows times
  ``w[0]``, the next ``sizes[1]`` times ``w[1]``, ... Every row belongs to an expert: ``sizes`` adds
  up to ``R``. An expert may have no row; its weights then get a zero gradient.
* ``permute(rows [R D], index, inverse) -> [R D]``: ``rows[index]``, for a permutation and its
  inverse.
* ``combine(rows [R D], weights [N G], order, inverse) -> [N D]``: ``y[n] = sum_g weights[n, g]
  rows[inverse[n, g]]``, in float32 (float64 in a float64 run) and rounded once to the dtype of
  ``rows``.

A token with nothing to route (padding) has weight zero: it adds exactly nothing to an output or a
gradient.

For ``dispatch`` and ``combine`` a copy may be absent, as where it is computed on another rank: its
``inverse`` is -1, ``order`` has rows for the others only, and ``R`` is the number of those. It has
no row, adds nothing, and the gradient of its weight is 0.

``dispatch``, ``permute`` and ``combine`` are permutations with a known inverse, so their gradients
gather too: no scatter, no atomics, the same bits in every run. The references are differentiable to
any order; ``triton`` reads and writes every row once each way, with first derivatives only.

Implementations of ``grouped_matmul``: the reference has no shape that depends on ``sizes``, so it
runs under ``vmap``, on meta tensors and in the simulated mesh, at about twice the arithmetic;
``ragged`` reads ``sizes`` on the host and does one product per expert; ``grouped_mm`` is the CUDA
library's for bfloat16 and ``npu`` CANN's, without a wait for the device; ``buckets`` reads
``sizes`` on the host too and does one batched product for all experts with similar numbers of rows.
It runs where :func:`~k31fn.kernels.registry.use_impl` asks for it.
"""

import torch

from k31fn.kernels.experts.buckets import bucketed
from k31fn.kernels.experts.grouped import grouped_mm, grouped_mm_accepts, ragged
from k31fn.kernels.experts.reference import ExpertOrder, sort_by_expert
from k31fn.kernels.experts.reference import combine as _combine
from k31fn.kernels.experts.reference import dispatch as _dispatch
from k31fn.kernels.experts.reference import grouped_matmul as _grouped_matmul
from k31fn.kernels.experts.reference import permute as _permute
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op
from k31fn.kernels.vendor import adapter

__all__ = ["ExpertOrder", "combine", "dispatch", "grouped_matmul", "permute", "sort_by_expert"]

dispatch = Op("dispatch", _dispatch)
permute = Op("permute", _permute)
combine = Op("combine", _combine)
grouped_matmul = Op("grouped_matmul", _grouped_matmul)
_TRITON = "k31fn.kernels.experts.triton"


def _of_triton(module: str, fn: str, accepts: str, calls: tuple[str, ...] = ()) -> Implementation:
    """What is in a file of kernels, which lists them unless they are those of ``calls``."""
    return Implementation(
        "triton",
        ("cuda",),
        lazily(module, fn),
        lazily(module, accepts),
        dtypes=(torch.bfloat16, torch.float32),
        on_request=("npu", *ON_REQUEST),
        missing=missing_triton,
        kernels="" if calls else module,
        calls=calls,
    )


dispatch.register(_of_triton(f"{_TRITON}.copies", "dispatch", "accepts_dispatch"))
permute.register(_of_triton(f"{_TRITON}.copies", "permute", "accepts_permute", ("dispatch",)))
combine.register(_of_triton(f"{_TRITON}.combine", "combine", "accepts"))
# `ragged` and `buckets` cut tensors by the counts, so they need them as Python numbers.
_ON_HOST = (
    "the number of rows per expert is read on the host, and under vmap it differs between samples"
)
grouped_matmul.register(
    Implementation(
        "grouped_mm",
        ("cuda",),
        grouped_mm,
        grouped_mm_accepts,
        dtypes=(torch.bfloat16,),
        no_vmap="torch.nn.functional.grouped_mm has no batching rule",
    )
)
_DTYPES = (torch.bfloat16,)
grouped_matmul.register(adapter("experts", "grouped_matmul", "npu_grouped_matmul", dtypes=_DTYPES))
# On request: `dispatch` is the reference's gather with another gradient, and `combine` refuses the
# float32 weights that the router gives beside rows in bfloat16.
dispatch.register(
    adapter("experts", "dispatch", "npu_moe_token_permute_grad_v2", dtypes=_DTYPES, on_request=True)
)
_UNPERMUTE = ("npu_moe_token_unpermute", "npu_moe_token_unpermute_grad")
combine.register(adapter("experts", "combine", *_UNPERMUTE, dtypes=_DTYPES, on_request=True))
_COUNTED = "the number of rows per expert is read on the host"
_ANYWHERE = ("cpu", "cuda", "npu")
grouped_matmul.register(
    Implementation("ragged", _ANYWHERE, ragged, no_vmap=_ON_HOST, no_capture=_COUNTED)
)
grouped_matmul.register(
    Implementation(
        "buckets", (), bucketed, on_request=_ANYWHERE, no_vmap=_ON_HOST, no_capture=_COUNTED
    )
)
