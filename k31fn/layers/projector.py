"""The projector from the vision tower to the text model: ``y = RMSNorm(gelu(x W_in) W_out)``, and
where its result goes.

Two products without bias, GELU by the error function, and the norm after them (arXiv 2607.24653).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic

import torch
import torch.nn.functional as F

from k31fn import tree
from k31fn.kernels.norm import rms_norm
from k31fn.layers.linear import linear
from k31fn.parallel.collectives import all_gather, pslice, psum_scatter, pvary
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import Constant, ParamSpec, TruncatedNormal
from k31fn.params import init as init_params
from k31fn.typing import Float, Int, Leaf, Tensor

__all__ = ["Config", "Params", "apply", "init", "place", "slots", "specs"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Config:
    """``input_size -> input_size -> hidden_size``.

    Attributes:
        input_size: width of a merged feature.
        hidden_size: of the text model.
        norm_eps: of the norm after the products.
    """

    input_size: int
    hidden_size: int
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("input_size", "hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"projector.Config.{name}={getattr(self, name)}: a width is at least 1"
                )
        # `not >` and not `<=`: it refuses NaN too.
        if not self.norm_eps > 0:
            raise ValueError(
                f"projector.Config.norm_eps={self.norm_eps} must be positive, such as 1e-5"
            )


@tree.dataclass
class Params(Generic[Leaf]):
    """``w_in [I I]  w_out [I D]  norm [D]``."""

    w_in: Leaf
    w_out: Leaf
    norm: Leaf


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares the parameters; the inner width is split under tensor parallelism."""
    size = cfg.input_size
    matrix = frozenset({"matrix"})
    # He's deviation: the activation between the products halves the variance.
    init = TruncatedNormal(math.sqrt(2 / size))
    return Params(
        w_in=ParamSpec((size, size), ("", "mlp"), init, tags=matrix),
        w_out=ParamSpec((size, cfg.hidden_size), ("mlp", "hidden"), init, tags=matrix),
        norm=ParamSpec(
            (cfg.hidden_size,), ("hidden",), Constant(1.0), tags=frozenset({"no_decay"})
        ),
    )


def init(cfg: Config, key: Tensor, *, dtype: torch.dtype | None = None) -> Params[Tensor]:
    """Draws the initial values on the key's device; ``dtype`` as :func:`k31fn.params.init` says."""
    return init_params(specs(cfg), key, dtype=dtype)


def apply(
    params: Params[Tensor], x: Float[Tensor, "B M I"], cfg: Config, *, sh: Sharding = UNSHARDED
) -> Float[Tensor, "B M D"]:
    """``RMSNorm(gelu(x W_in) W_out)``: features in the text model's width.

    Input and output are split over ``sh.tokens``.
    """
    # The inner width is split: each rank has some columns, for the features of all.
    h = F.gelu(linear(all_gather(x, sh.sequence, 1), params.w_in))
    y = psum_scatter(linear(h, params.w_out), sh.sequence, 1)
    # The norm runs on the whole sum, and its weight is whole: pvary sums the gradient.
    return rms_norm(y, pvary(params.norm, sh.sequence), cfg.norm_eps)


def slots(tokens: Int[Tensor, "B T"], media_token: int) -> Int[Tensor, "B T"]:
    """The slot whose feature each token takes: the i-th ``media_token`` of a row takes slot i; -1
    for any other token.

    Of whole rows, before any cut along T.
    """
    # A running count of placeholders: a row knows its images' order and nothing else of them.
    media = tokens == media_token
    return torch.where(media, media.cumsum(1) - 1, -1)


def place(
    x: Float[Tensor, "B t D"],
    features: Float[Tensor, "B m D"],
    slots: Int[Tensor, "B T"],
    *,
    sh: Sharding = UNSHARDED,
) -> Float[Tensor, "B t D"]:
    """``x`` with the embeddings at placeholders replaced by the features of their slots.

    On a mesh ``x`` and ``features`` are split over ``sh.tokens``, ``slots`` over ``sh.context``.
    Features that no token takes get no gradient, nor does the embedding at a placeholder.
    """
    local_slots = pslice(slots, sh.sequence, 1)[..., None]
    # A token's feature may have been made on any rank that has patches of its row.
    features = all_gather(all_gather(features, sh.sequence, 1), sh.context, 1)
    # A text token reads slot 0 and drops it, so that no shape depends on the tokens.
    image = torch.take_along_dim(features, local_slots.clamp(min=0), 1)
    return torch.where(local_slots >= 0, image.to(x.dtype), x)
