"""Routed experts as one operator: tokens to rows, gated MLPs, and back.

``expert_mlp(x [N D], weights [N G], w_gate [E D F], w_up [E D F], w_down [E F D], order [R],
inverse [N G], sizes [E], beta, linear_beta) -> [N D]``::

    y[n] = sum_g weights[n, g] e_j(x[n])        e_j(u) = situ(u w_gate[j], u w_up[j]) w_down[j]

with ``j`` the expert of the copy ``(n, g)``; ``order``, ``inverse`` and ``sizes`` are those of
:func:`~k31fn.kernels.experts.reference.sort_by_expert`; a copy may be absent, as in
:mod:`k31fn.kernels.experts`. ``weights = ()`` is for ``G = 1`` and rows
that are weighted elsewhere. Sums over a token's copies are in float32.

The reference is made of the operators ``dispatch``, ``grouped_matmul``, ``situ_glu`` and
``combine``. ``reference.of_products`` is the same with a product of its own, for weights that are
no plain tensors. Both keep the rows, gate, up, the activation and the experts' outputs.

``fused`` keeps the inputs, gate and up. It weights the activation, so that the gradient of the
weights needs no output of an expert; the rows are gathered again in the backward. So the weight is
rounded with the activation, and a token's sum adds outputs that are rounded after the weight.
Where a copy's weight is 0 (padding), it computes with a row of zeros: NaN in it stays out of all
outputs and gradients, and its weight has no gradient. First order only.
"""

import torch

from k31fn.kernels.expert_mlp.reference import expert_mlp as _expert_mlp
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op

__all__ = ["expert_mlp"]

_FUSED = "k31fn.kernels.expert_mlp.fused"
expert_mlp = Op("expert_mlp", _expert_mlp)
expert_mlp.register(
    Implementation(
        "fused",
        ("cuda",),
        lazily(_FUSED, "expert_mlp"),
        lazily(_FUSED, "accepts"),
        dtypes=(torch.bfloat16,),
        on_request=ON_REQUEST,
        no_vmap="torch.nn.functional.grouped_mm has no batching rule",
        missing=missing_triton,
        calls=("dispatch", "situ_glu"),  # whose kernels it launches
    )
)
