"""Gated MLP with SiTU: ``y = situ(x W_gate, x W_up) W_down`` (Kimi K3 report, arXiv 2607.24653).

The dense feed-forward of the first layers and, at its own width, the shared experts of the MoE
layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import torch

from k31fn import tree
from k31fn.kernels.situ import situ_glu
from k31fn.layers.arguments import check_call
from k31fn.layers.kind import ChannelMixer, Output
from k31fn.layers.linear import linear
from k31fn.parallel.collectives import all_gather, psum_scatter
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import Normal, ParamSpec
from k31fn.params import init as init_params
from k31fn.segments import Segments
from k31fn.typing import Float, Leaf, Tensor

__all__ = ["KIND", "Config", "Params", "apply", "init", "inner", "outer", "specs"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Config:
    """Gated MLP ``hidden_size -> intermediate_size -> hidden_size``.

    Attributes:
        beta: bound of SiTU's gate.
        linear_beta: bound of its linear branch.
        init_std: standard deviation of the initial weights.
    """

    hidden_size: int
    intermediate_size: int
    beta: float = 4.0
    linear_beta: float = 25.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"mlp.Config.{name}={getattr(self, name)}: a width is at least 1")
        for name in ("beta", "linear_beta"):
            # `not >` and not `<=`, here and below: it refuses NaN too.
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"mlp.Config.{name}={getattr(self, name)}: a bound is positive; K3 has 4.0 "
                    "and 25.0"
                )
        if self.init_std < 0:
            raise ValueError(f"mlp.Config.init_std={self.init_std}: must not be negative")


@tree.dataclass
class Params(Generic[Leaf]):
    """``w_gate [D F]``, ``w_up [D F]``, ``w_down [F D]``."""

    w_gate: Leaf
    w_up: Leaf
    w_down: Leaf


def specs(cfg: Config) -> Params[ParamSpec]:
    """The three matrices; the inner width is split under tensor parallelism."""
    D, F = cfg.hidden_size, cfg.intermediate_size
    init = Normal(cfg.init_std)
    matrix = frozenset({"matrix"})
    # Gate and up are two leaves and not one of twice the width: a rank's share of either is a
    # block of its columns, and Muon orthogonalises each by itself.
    return Params(
        w_gate=ParamSpec((D, F), ("hidden", "mlp"), init, tags=matrix),
        w_up=ParamSpec((D, F), ("hidden", "mlp"), init, tags=matrix),
        w_down=ParamSpec((F, D), ("mlp", "hidden"), init, tags=matrix),
    )


def init(cfg: Config, key: Tensor, *, dtype: torch.dtype | None = None) -> Params[Tensor]:
    """Draws the initial values on the key's device; ``dtype`` as :func:`k31fn.params.init` says."""
    return init_params(specs(cfg), key, dtype=dtype)


def apply(
    params: Params[Tensor],
    x: Float[Tensor, "B T D"],
    cfg: Config,
    *,
    segments: Segments | None = None,
    sh: Sharding = UNSHARDED,
) -> Output:
    """``situ(x W_gate, x W_up) W_down``. Tokens are independent: ``segments`` changes nothing.

    On a mesh ``x`` and ``y`` are this rank's tokens.
    """
    check_call(params, x, cfg, (Params, Config), segments=segments, sh=sh)
    del segments
    return Output(outer(params, inner(params, x, cfg, sh=sh), sh=sh))


def inner(
    params: Params[Tensor], x: Float[Tensor, "B T D"], cfg: Config, *, sh: Sharding = UNSHARDED
) -> Float[Tensor, "B S F"]:
    """``situ(x W_gate, x W_up)``: the columns that this rank has, of all tokens of the slice of the
    context.
    """
    # The weights' columns are split over the ranks, so each one's are needed by all tokens. They
    # need no pvary: a rank has columns of its own, whose gradient is whole.
    x = all_gather(x, sh.sequence, 1)
    return situ_glu(linear(x, params.w_gate), linear(x, params.w_up), cfg.beta, cfg.linear_beta)


def outer(
    params: Params[Tensor], h: Float[Tensor, "B S F"], *, sh: Sharding = UNSHARDED
) -> Float[Tensor, "B T D"]:
    """``h W_down`` of this rank's tokens, summed over the ranks' columns.

    Between :func:`inner` and this, a caller may do something else.
    """
    # A rank's columns give a part of every token's sum; of the sum each keeps its own tokens.
    return psum_scatter(linear(h, params.w_down), sh.sequence, 1)


KIND = ChannelMixer(
    name="mlp",
    label="dense",
    config=Config,
    specs=specs,
    apply=apply,
    parts=((".*", "dense MLP"),),
    tensor_parallel=lambda cfg: {"intermediate_size": cfg.intermediate_size},
    splits=frozenset({"tp", "cp"}),
)
