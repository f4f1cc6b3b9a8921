"""RMSNorm with a learned weight: ``y = w * x * rsqrt(mean(x^2) + eps)`` (arXiv 1910.07467)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import torch

from k31fn import tree
from k31fn.kernels.norm import rms_norm
from k31fn.parallel.collectives import pvary
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import Constant, ParamSpec
from k31fn.params import init as init_params
from k31fn.segments import Segments
from k31fn.typing import Float, Leaf, Tensor

__all__ = ["Config", "Params", "apply", "init", "specs"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Config:
    """RMSNorm over ``dim`` features."""

    dim: int
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ValueError(
                f"norm.Config.dim={self.dim}: a norm needs at least one feature; set dim >= 1"
            )
        # `not >` and not `<=`: it refuses NaN too.
        if not self.eps > 0:
            raise ValueError(
                f"norm.Config.eps={self.eps}: a row of zeros would give NaN; set eps > 0, such as "
                "1e-5"
            )


@tree.dataclass
class Params(Generic[Leaf]):
    """``weight [D]``."""

    weight: Leaf


def specs(cfg: Config, *, axis: str = "hidden") -> Params[ParamSpec]:
    """The weight, ones at first. ``axis`` is the logical axis that the norm runs over."""
    # Without decay: pulling a scale towards 0 would fade out the layer behind it.
    return Params(
        weight=ParamSpec((cfg.dim,), (axis,), Constant(1.0), tags=frozenset({"no_decay"}))
    )


def init(cfg: Config, key: Tensor, *, dtype: torch.dtype | None = None) -> Params[Tensor]:
    """Draws the initial values on the key's device; ``dtype`` as :func:`k31fn.params.init` says."""
    return init_params(specs(cfg), key, dtype=dtype)


def apply(
    params: Params[Tensor],
    x: Float[Tensor, "*rows D"],
    cfg: Config,
    *,
    segments: Segments | None = None,
    sh: Sharding = UNSHARDED,
) -> Float[Tensor, "*rows D"]:
    """``w * x * rsqrt(mean(x^2) + eps)`` over the last dim, statistics in float32.

    Each token is normalised by itself: ``segments`` change nothing. On a mesh ``x`` are this rank's
    tokens.
    """
    del segments
    # The weight is whole on every rank and meets its tokens only: pvary sums its gradient.
    return rms_norm(x, pvary(params.weight, sh.sequence), cfg.eps)
