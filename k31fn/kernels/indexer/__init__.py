"""The lightning indexer's choice of keys.

``index_topk(q, k, w, start, stop, topk, scale)``::

    I[t, s] = sum_j w[t, j] relu(scale <q[t, j], k[s]>)              start[t] <= s < stop[t]
    S_t     = the min(topk, visible) keys of greatest I[t, :], lowest position first among equals

Source: DeepSeek-V3.2, arXiv 2512.02556. ``w`` may be negative; any scale of it is folded in by the
caller.

Shapes: ``q [B T J I]``, ``k [B S I]``, ``w [B T J]``; scores in float32 (float64 for float64
inputs). The result is int32 ``[B T M]`` with M = min(topk, S), in ascending order of position, and
-1 at the end where fewer keys are visible. It is the same set in every run.

Mask: ``start, stop [B T]`` as in :mod:`k31fn.kernels.attention`; a key outside is never chosen, a
padding query (``start == stop``) chooses none.

Gradients: none. The layer wraps the call in :func:`k31fn.autodiff.decision`; the scores are
differentiated by :mod:`k31fn.kernels.indexer_kl`.
"""

from typing import Any

import torch

from k31fn.kernels.indexer.limits import MOST_KEYS
from k31fn.kernels.indexer.reference import index_scores
from k31fn.kernels.indexer.reference import index_topk as _reference
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op
from k31fn.kernels.vendor import declined

__all__ = ["index_scores", "index_topk"]

index_topk = Op("index_topk", _reference, differentiable=False)
index_topk.register(
    declined("npu_lightning_indexer", "which of equal scores it takes is not documented")
)
_TRITON = "k31fn.kernels.indexer.triton"


def _wide(q: Any, k: Any, *others: Any, **named: Any) -> str:
    del q, others, named
    return "" if k.shape[1] > MOST_KEYS else f"it is for rows of more than {MOST_KEYS} keys"


index_topk.register(
    Implementation(
        "triton",
        ("cuda",),
        lazily(_TRITON, "index_topk"),
        lazily(_TRITON, "accepts"),
        dtypes=(torch.bfloat16, torch.float32),
        by_default=(torch.bfloat16,),  # of float32 no tensor core makes exact products
        on_request=ON_REQUEST,
        missing=missing_triton,
        kernels=_TRITON,
    )
)
# a kernel holds a row of scores in registers; a longer one is plain torch's
index_topk.register(Implementation("wide", ("cuda",), _reference, _wide, dtypes=(torch.bfloat16,)))
