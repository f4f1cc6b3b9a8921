"""Gated DeltaNet's recurrence: a delta rule with one decay per head and token, over packed
documents.

``gdn(q, k, v, g, beta, ids, initial_state) -> KdaOut(o, state)``, for each head::

    S_t = e^{g_t} (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T              S in R^{K x V}
    o_t = S_t^T q_t                                                 reads the state after the update

Source: arXiv 2412.06464. It is :mod:`k31fn.kernels.kda` with one g for all channels of a head.
``q`` and ``k`` come L2-normalised and ``q`` scaled; no further scale is applied.

Shapes: ``q k [B T H K]``, ``v [B T H V]``, ``g beta [B T H]``, ``ids [B T]`` (document numbers, 0
is padding, at the end of a row only), ``initial_state [B H K V]`` or ``()`` for zeros. The result
is ``o [B T H V]`` in the dtype of ``v`` and ``state [B H K V]`` in float32, as is all arithmetic
(float64 for float64 inputs).

Documents: the state is zero at a document's first token, except that ``initial_state`` belongs to
the document of the row's first token. ``state`` is that of the row's last document, after its last
token. Padding (finite values) gives ``o = 0``, changes no state and gets gradient 0. A token never
changes a bit of the output of an earlier token, or of another document in the same grid.

Range: any ``g <= 0``. Between two tokens of a tile the decay is one number, ``exp(G_i - G_j)`` with
G the running sum of g, which is at most 1: nothing is factored, so nothing overflows. The sum over
the tokens between is taken by itself and not as a difference, so it is good to float32's rounding
behind the hardest decay too.

Gradients flow to ``q k v g beta initial_state``, to any order in the reference.

``gdn_fragment(k, v, g, beta, ids) -> KdaFragment(state, transition)`` is what the tokens of a
fragment of a row do to the state, for context parallelism, as ``kda_fragment`` is for KDA::

    gdn(q, k, v, g, beta, ids, S).state = transition S + state        for every S [B H K V]

``transition [B H K K]`` is the product over the tokens, the last one leftmost, of ``e^g (I - beta k
k^T)``. S belongs to the document of the fragment's first token, so ``transition`` is 0 when another
document begins inside; a fragment of padding gives ``state = 0`` and ``transition = I``. Gradients
flow to ``k v g beta``, to any order in the reference.
``triton`` is ``gdn`` for K and V of 16 to 128, in bfloat16 (operands; sums in float32) and float32,
with first derivatives only. Between forward and backward it keeps the inputs and one state per
segment of some thousand tokens and head. Padding may hold anything, NaN too.
"""

import torch

from k31fn.kernels.gdn.reference import gdn as _reference
from k31fn.kernels.gdn.reference import gdn_fragment as _fragment
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op

__all__ = ["gdn", "gdn_fragment"]

_TRITON = "k31fn.kernels.gdn.triton.op"

gdn = Op("gdn", _reference)
gdn.register(
    Implementation(
        "triton",
        ("cuda", "npu"),
        lazily(_TRITON, "gdn"),
        lazily(_TRITON, "accepts"),
        dtypes=(torch.bfloat16, torch.float32),
        on_request=ON_REQUEST,
        missing=missing_triton,
        kernels=_TRITON,
    )
)
gdn_fragment = Op("gdn_fragment", _fragment)
