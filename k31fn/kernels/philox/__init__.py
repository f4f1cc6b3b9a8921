"""Random words and stochastic rounding: ``random_bits(draws, size)`` and ``stochastic_round(x
[*shape], draws)``, bit for bit those of :func:`k31fn.random.bits` and
:func:`k31fn.random.stochastic_round`.

Philox4x32-10 (Salmon et al., SC 2011): element ``j`` of the last dimension in the row ``r`` of the
whole tensor, counted over the leading dimensions, has word ``j % 4`` of the counter ``(j // 4, r
low, r high, 0)``. So every rank draws what one device would have at the places that it holds.

``random_bits`` gives words in [0, 2^32) as int64, ``stochastic_round`` rounds float32 to bfloat16
with the upper half of each word. Neither has a gradient.
"""

import torch

from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.philox.reference import Draws
from k31fn.kernels.philox.reference import random_bits as _random_bits
from k31fn.kernels.philox.reference import stochastic_round as _stochastic_round
from k31fn.kernels.registry import Implementation, Op

__all__ = ["Draws", "random_bits", "stochastic_round"]

_BITS = "k31fn.kernels.philox.triton.random_bits"
_ROUND = "k31fn.kernels.philox.triton.stochastic_round"
random_bits = Op("random_bits", _random_bits, differentiable=False)
random_bits.register(
    Implementation(
        "triton",
        ("cuda",),
        lazily(_BITS, "random_bits"),
        accepts=lazily(_BITS, "accepts"),
        on_request=("npu", *ON_REQUEST),
        no_vmap="its kernel takes one key",
        missing=missing_triton,
        kernels=_BITS,
    )
)
stochastic_round = Op("stochastic_round", _stochastic_round, differentiable=False)
stochastic_round.register(
    Implementation(
        "triton",
        ("cuda",),
        lazily(_ROUND, "stochastic_round"),
        accepts=lazily(_ROUND, "accepts"),
        dtypes=(torch.float32,),
        on_request=("npu", *ON_REQUEST),
        no_vmap="its kernel takes one key",
        missing=missing_triton,
        kernels=_ROUND,
    )
)
