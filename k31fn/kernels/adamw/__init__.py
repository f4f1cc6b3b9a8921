"""One step of AdamW in place: ``adamw_step(p [*shape], g, mu, nu, step, lr, constants, scale, skip,
draws) -> (p, mu, nu)``, the tensors that it was given.

With ``g' = scale g`` and t the number of the step, all in float32 (float64 of float64)::

    mu <- beta1 mu + (1 - beta1) g'
    nu <- beta2 nu + (1 - beta2) g'^2
    p <- (1 - lr decay) p - lr mu / (1 - beta1^t) / (sqrt(nu / (1 - beta2^t)) + eps)

``g``, ``mu`` and ``nu`` may be bfloat16: they are widened where they are read, moments are rounded
to nearest where they are written. ``p`` is float32 or float64; or bfloat16, then it comes with
``draws`` and is rounded stochastically (:mod:`k31fn.kernels.philox`), the same on every mesh.

``lr`` is a number or a scalar, ``scale`` (a clip factor) and ``skip`` are scalars on the device or
None: the host waits for none of them. Where ``skip`` is true nothing changes, bit for bit.

Nothing is widened as a whole. The reference and ``library`` work slice by slice
(:func:`k31fn.precision.slices`): what they hold at once is below 256 MiB, and the slices change no
bit. No gradient: :func:`k31fn.kernels.adamw.reference.stepped` is the differentiable form.
"""

import torch

from k31fn.kernels.adamw import library
from k31fn.kernels.adamw.reference import Constants, stepped
from k31fn.kernels.adamw.reference import adamw_step as _adamw_step
from k31fn.kernels.launch import ON_REQUEST, lazily, missing_triton
from k31fn.kernels.registry import Implementation, Op

__all__ = ["Constants", "adamw_step", "stepped"]

_TRITON = "k31fn.kernels.adamw.triton"
adamw_step = Op("adamw_step", _adamw_step, differentiable=False)
adamw_step.register(
    Implementation(
        "triton",
        ("cuda",),
        lazily(_TRITON, "adamw_step"),
        accepts=lazily(_TRITON, "accepts"),
        dtypes=(torch.bfloat16, torch.float32),
        on_request=("npu", *ON_REQUEST),
        no_vmap="it writes in place",
        missing=missing_triton,
        kernels=_TRITON,
    )
)
adamw_step.register(
    Implementation(
        "library",
        ("cpu", "cuda"),
        library.adamw_step,
        no_vmap="it writes in place",
        missing=library.missing,
    )
)
