"""Kimi Delta Attention: a gated delta rule with one decay per channel, over packed documents.

``kda(q, k, v, g, beta, ids, initial_state) -> KdaOut(o, state)``, for each head::

    S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T        S in R^{K x V}
    o_t = S_t^T q_t                                                 reads the state after the update

Source: Kimi Linear, arXiv 2510.26692, and the Kimi K3 report, arXiv 2607.24653. ``q`` and ``k``
come L2-normalised and ``q`` scaled; no further scale is applied.

Shapes: ``q k [B T H K]``, ``v [B T H V]``, ``g [B T H K]`` (log-decay per channel), ``beta [B T
H]``, ``ids [B T]`` (document numbers, 0 is padding, at the end of a row only), ``initial_state [B H
K V]`` or ``()`` for zeros. The result is ``o [B T H V]`` in the dtype of ``v`` and ``state [B H K
V]`` in float32, as is all arithmetic (float64 for float64 inputs).

Documents: the state is zero at a document's first token, except that ``initial_state`` belongs to
the document of the row's first token. ``state`` is that of the row's last document, after its last
token. Padding (finite values) gives ``o = 0``, changes no state and gets gradient 0. A token never
changes a bit of the output of an earlier token, or of another document in the same grid.

Range: ``g <= 0``, which is not checked here; g below ``MIN_LOG_DECAY`` counts as
``MIN_LOG_DECAY`` and gets gradient 0, so no result depends on how far below it is. Implementations
factor the decay between two tokens of a tile of ``TILE`` as ``exp(G_i) exp(-G_j)``, G the running
sum of g: at -5 per token ``exp(-G)`` reaches e^80 = 5.5e34, which float32 and bfloat16 hold
(3.4e38); beyond it they would overflow. Configs refuse a lower bound below ``MIN_LOG_DECAY``.
:func:`recurrence` has no such limit.

Gradients flow to ``q k v g beta initial_state``, to any order in the reference.

``keep`` is a last argument of ``kda`` and ``kda_gated``: what a fused form keeps for its backward.
``"inputs"``: those, and a state per segment of some thousand tokens and head. ``"factors"``: also
what it made of each tile, 23 KB per tile and head at widths of 128 in bfloat16 (four times as much
as q), which the backward then need not make again. It changes no bit of a result, and the reference
does not read it.

``kda_fragment(k, v, g, beta, ids) -> KdaFragment(state, transition)`` is what the tokens of a
fragment of a row do to the state, for context parallelism (KCP, section 5.1.2 of the K3 report)::

    kda(q, k, v, g, beta, ids, S).state = transition S + state        for every S [B H K V]

``state [B H K V]`` is that of the last document from zero, ``transition [B H K K]`` the product
over the tokens, the last one leftmost, of ``(I - beta k k^T) Diag(exp g)``; both in float32
(float64 for float64 inputs). S belongs to the document of the fragment's first token, so
``transition`` is 0 when another document begins inside. Padding contributes the identity: a
fragment of padding gives ``state = 0`` and ``transition = I``. Range and padding are as above.
Gradients flow to ``k v g beta``, to any order in the reference.

``kda_gated(q, k, v, z, beta, A_log, dt_bias, ids, bound, eps, scale, initial_state) -> KdaOut`` is
``kda`` from projections: of what :func:`~k31fn.kernels.kda_gates.kda_gates` makes of ``q k z beta
A_log dt_bias``, with its shapes and numbers. ``bound`` is at least ``MIN_LOG_DECAY``. Padding may
hold what that of ``kda`` may. Gradients flow to all but ids, to any order in the reference.
``triton`` has norms and gates inside the kernels and does not round q and k in between; ``apart``
calls the two ops.

``triton`` is for K and V of 16 to 128, in bfloat16 (operands; sums in float32) and float32, with
first derivatives only. Padding may hold anything, NaN too.
"""

from typing import Any

import torch

from k31fn.kernels.kda.fragment import kda_fragment as _fragment
from k31fn.kernels.kda.gated import kda_gated as _gated
from k31fn.kernels.kda.recurrence import MIN_LOG_DECAY, TILE, KdaFragment, KdaOut, recurrence
from k31fn.kernels.kda.reference import kda as _reference
from k31fn.kernels.kda_gates import kda_gates
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op

__all__ = [
    "MIN_LOG_DECAY",
    "TILE",
    "KdaFragment",
    "KdaOut",
    "kda",
    "kda_fragment",
    "kda_gated",
    "recurrence",
]

_TRITON = "k31fn.kernels.kda.triton.op"
_FRAGMENT = "k31fn.kernels.kda.triton.fragment"
_GATED = "k31fn.kernels.kda.triton.gated"

kda = Op("kda", _reference)
kda.register(
    Implementation(
        "triton",
        ("cuda", "npu"),
        lazily(_TRITON, "kda"),
        lazily(_TRITON, "kda_accepts"),
        dtypes=(torch.bfloat16, torch.float32),
        on_request=ON_REQUEST,
        missing=missing_triton,
        kernels=_TRITON,
    )
)
kda_fragment = Op("kda_fragment", _fragment)
kda_fragment.register(
    Implementation(
        "triton",
        ("cuda", "npu"),
        lazily(_FRAGMENT, "kda_fragment"),
        lazily(_FRAGMENT, "kda_fragment_accepts"),
        dtypes=(torch.bfloat16, torch.float32),
        on_request=ON_REQUEST,
        missing=missing_triton,
        kernels=_FRAGMENT,
    )
)


def _apart(q: Any, k: Any, v: Any, z: Any, beta: Any, A_log: Any, *others: Any) -> KdaOut:
    """``kda_gated`` by the two ops that it is made of."""
    dt_bias, ids, bound, eps, scale, *rest = others
    x = kda_gates(q, k, z, beta, A_log, dt_bias, bound, eps, scale)
    return kda(x.q, x.k, v, x.g, x.beta, ids, *rest)


kda_gated = Op("kda_gated", _gated)
kda_gated.register(
    Implementation(
        "triton",
        ("cuda",),
        lazily(_GATED, "kda_gated"),
        lazily(_GATED, "kda_gated_accepts"),
        dtypes=(torch.bfloat16, torch.float32),
        on_request=ON_REQUEST,
        missing=missing_triton,
        calls=("kda_gates", "kda"),  # among whose kernels its own are listed
    )
)
kda_gated.register(
    Implementation(
        "apart", ("npu",), _apart, on_request=("cpu", "cuda"), calls=("kda_gates", "kda")
    )
)
