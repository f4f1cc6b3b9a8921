"""The router's choice: the best experts of each token, with a fixed rule for ties.

``choose_experts(scores [*rows E], bias [E], valid [*rows], top_k) -> (topk_idx int64 [*rows top_k],
next_best int64 [*rows 1])``: the experts with the greatest ``scores + bias``, best first and the
lowest number first among equals, and the one that comes next, whose biased score is the cutoff of
balancing (Kimi K3 report, arXiv 2607.24653, appendix C). ``0 < top_k < E``.

Where ``valid`` is false (padding), the experts go round: copy ``j`` of token ``t``, counted over
all rows, goes to expert ``(t top_k + j) mod E``, so that padding lengthens no expert's rows more
than another's. A biased score that is NaN counts as 0, an infinite one as the greatest finite
number of its sign: a step that went wrong ends in a loss that is not finite, never in an index out
of range. Integers: no gradient flows; wrap calls in :func:`k31fn.autodiff.decision`.
"""

import torch

from k31fn.kernels.expert_choice.reference import choose_experts as _reference
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op

__all__ = ["choose_experts"]

choose_experts = Op("choose_experts", _reference, differentiable=False)
_TRITON = "k31fn.kernels.expert_choice.triton"
choose_experts.register(
    Implementation(
        "triton",
        ("cuda",),
        lazily(_TRITON, "choose_experts"),
        lazily(_TRITON, "accepts"),
        dtypes=(torch.float32,),
        on_request=("npu", *ON_REQUEST),
        missing=missing_triton,
        kernels=_TRITON,
    )
)
