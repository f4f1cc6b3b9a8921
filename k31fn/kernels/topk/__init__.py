"""Top-k with a fixed rule for ties: among equal scores the lowest position wins.

``topk(scores, k, eligible=..., ordered=True)`` returns the positions of the k greatest eligible
scores of each row in descending order of score, equal scores in ascending order of position, -0.0
equal to +0.0. Rows with fewer than k eligible positions end in -1. With ``ordered=False`` the same
positions and -1 come in any order. ``torch.topk`` takes any of the tied positions, and which
depends on device and size; ties are common (an indexer with few heads scores 0 wherever every ReLU
is closed).

Shapes: ``scores [..., S]``, ``eligible [..., S]`` bool (all, if left out); the result is int64
``[..., min(k, S)]``. Scores must not be NaN; -inf is never selected. Exact in every dtype.
Integers: no gradient flows; wrap calls in :func:`k31fn.autodiff.decision`.
"""

from k31fn.kernels.registry import Op
from k31fn.kernels.topk.reference import topk as _reference
from k31fn.kernels.vendor import declined

__all__ = ["topk"]

topk = Op("topk", _reference)
topk.register(declined("npu_moe_gating_top_k", "which of equal scores it takes is not documented"))
