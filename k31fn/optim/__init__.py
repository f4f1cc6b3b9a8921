"""Optimisers as pairs of functions over parameter trees (see :mod:`k31fn.optim.transform`).

::

    rest = adamw(specs, where=lambda path, spec: "matrix" not in spec.tags)
    transform = combine(specs, muon(specs), rest)
    state = transform.init(params)

    norm = global_norm(grads, specs)
    scale = clip_factor(norm, 1.0)
    lr = warmup_cosine(step, peak=5e-3, num_steps=1000, warmup_steps=10)
    params, state = transform.update(
        grads, state, params, lr=lr, scale=scale, skip=non_finite(norm)
    )

On a mesh each rank steps its own parts, with a state of their size: ``muon(specs,
placements=places)`` and ``global_norm(grads, placements=places)``, whose places are those of
:mod:`k31fn.parallel.fsdp`.
"""

from k31fn.optim.adamw import adamw
from k31fn.optim.clip import clip_by_global_norm, clip_factor, global_norm, leaf_norms
from k31fn.optim.muon import muon
from k31fn.optim.newton_schulz import orthogonalize
from k31fn.optim.rounding import rounded
from k31fn.optim.schedule import warmup_cosine, warmup_stable_decay
from k31fn.optim.spikes import SpikeState, init_spikes, is_spike, update_spikes
from k31fn.optim.storage import Storage
from k31fn.optim.transform import Transform, combine, non_finite, select

__all__ = [
    "SpikeState",
    "Storage",
    "Transform",
    "adamw",
    "clip_by_global_norm",
    "clip_factor",
    "combine",
    "global_norm",
    "init_spikes",
    "is_spike",
    "leaf_norms",
    "muon",
    "non_finite",
    "orthogonalize",
    "rounded",
    "select",
    "update_spikes",
    "warmup_cosine",
    "warmup_stable_decay",
]


def __dir__() -> list[str]:
    return __all__
