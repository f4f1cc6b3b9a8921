"""Manifold-constrained hyper-connections (mHC) as a residual scheme: N parallel streams, mixed
around every sublayer.

mHC, arXiv 2512.24880; not part of Kimi K3 or K3.1. A sublayer ``f`` reads and updates the streams
``x_1 .. x_N`` so, with ``h_pre``, ``h_post`` and ``h_res`` from the streams of the same token
(:mod:`k31fn.kernels.mhc_pre`)::

    y    = f(sum_i h_pre[i] x_i)
    x'_j = h_post[j] y + sum_i h_res[i, j] x_i             :mod:`k31fn.kernels.mhc_post`

``h_res`` is nearly doubly stochastic, so the mixing neither grows nor shrinks the streams over many
layers. All streams start as the embedding; the final norm reads ``sum_i h_pre[i] x_i`` with
coefficients of its own. Streams are stored in the model dtype, coefficients and their parameters
are float32.

With the initial values below ``h_res`` is nearly uniform and ``h_post`` nearly 1: at first all
streams are the plain residual stream. See :mod:`k31fn.layers.attn_res`, which says what a residual
scheme is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import torch
from einops import repeat

from k31fn import tree
from k31fn.kernels.mhc_post import mhc_post
from k31fn.kernels.mhc_pre import mhc_head, mhc_pre
from k31fn.layers.kind import ResidualScheme
from k31fn.parallel.collectives import pvary
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import Constant, ParamSpec, TruncatedNormal
from k31fn.typing import Float, Leaf, Tensor

__all__ = ["KIND", "Carry", "Config", "Params", "connect", "finish", "specs", "specs_out", "start"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Config:
    """The scheme.

    Attributes:
        num_streams: how many.
        iterations: of Sinkhorn.
        eps: of the norm of the flat streams.
        init_std: standard deviation of the first ``phi``.
        init_scale: first value of the scales, which say how much the coefficients depend on the
            token.
    """

    num_streams: int = 4
    iterations: int = 20
    eps: float = 1e-6
    init_std: float = 0.02
    init_scale: float = 0.01

    def __post_init__(self) -> None:
        for name in ("num_streams", "iterations"):
            value = getattr(self, name)
            # A float, such as 20.0, would fail far from here.
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"mhc.Config.{name}={value} must be a positive integer; set it to 1 or more"
                )
        # `not >` and not `<=`: it refuses NaN too.
        if not self.eps > 0:
            raise ValueError(
                f"mhc.Config.eps={self.eps}: a row of zeros would give NaN; set eps > 0, such as "
                "1e-6"
            )
        if not 0 < self.init_std < math.inf:
            raise ValueError(
                f"mhc.Config.init_std={self.init_std}: a standard deviation; set init_std > 0, "
                "such as 0.02"
            )
        if not math.isfinite(self.init_scale):
            raise ValueError(
                f"mhc.Config.init_scale={self.init_scale} must be finite; set it to some 0.01"
            )


@tree.dataclass
class Params(Generic[Leaf]):
    """``phi [N D, C]``, ``scale`` (one per part) and ``base [C]`` of C coefficients per token."""

    phi: Leaf
    scale: Leaf
    base: Leaf


@tree.dataclass
class Carry:
    """What goes from sublayer to sublayer, and from stage to stage of a pipeline: ``streams [B T N
    D]``.
    """

    streams: Tensor


def specs(cfg: Config, hidden_size: int) -> Params[ParamSpec]:
    """Parameters of one sublayer's coefficients."""
    return _specs(cfg, hidden_size, 3, 2 * cfg.num_streams + cfg.num_streams**2)


def specs_out(cfg: Config, hidden_size: int) -> Params[ParamSpec]:
    """Parameters of the last read, which the final norm reads."""
    return _specs(cfg, hidden_size, 1, cfg.num_streams)


def _specs(cfg: Config, hidden_size: int, parts: int, columns: int) -> Params[ParamSpec]:
    """``phi`` is no ``matrix`` for the optimiser, so AdamW steps it, with decay.

    Its columns are maps of their own, of three kinds with a scale each; orthogonal columns of equal
    size, as Muon would step them, mean nothing to them. Decayed to zero it leaves coefficients that
    do not depend on the token.
    """
    no_decay = frozenset({"no_decay"})
    return Params(
        phi=ParamSpec(
            (cfg.num_streams * hidden_size, columns),
            ("hidden", ""),
            TruncatedNormal(cfg.init_std),
            torch.float32,
        ),
        scale=ParamSpec((parts,), ("",), Constant(cfg.init_scale), torch.float32, no_decay),
        base=ParamSpec((columns,), ("",), Constant(0.0), torch.float32, no_decay),
    )


def start(x: Float[Tensor, "B T D"], cfg: Config) -> Carry:
    """The carry before the first sublayer: all streams are views of the embedding ``x``."""
    # Views take no memory; the first sublayer writes streams of its own.
    return Carry(streams=repeat(x, "b t d -> b t n d", n=cfg.num_streams))


def connect(
    params: Params[Tensor],
    carry: Carry,
    cfg: Config,
    f: Callable[[Tensor], tuple[Tensor, Any]],
    *,
    opens_block: bool,
    sh: Sharding = UNSHARDED,
) -> tuple[Carry, Any]:
    """One sublayer.

    Args:
        params: of this sublayer's coefficients.
        carry: from the sublayer before, or :func:`start`.
        cfg: of the scheme.
        f: the sublayer with its norm, ``h [B T D] -> (y [B T D], aux)``.
        opens_block: of no meaning here.
        sh: sharding; the carry holds this rank's tokens.

    Returns:
        The next carry, and ``aux``.
    """
    del opens_block
    # One op reads the streams once for the input and for all coefficients.
    pre = mhc_pre(carry.streams, *_varying(params, sh), cfg.eps, cfg.iterations)
    y, aux = f(pre.y)
    return Carry(mhc_post(pre.x, y.to(pre.x.dtype), pre.h_post, pre.h_res)), aux


def finish(
    params_out: Params[Tensor], carry: Carry, cfg: Config, *, sh: Sharding = UNSHARDED
) -> Float[Tensor, "B T D"]:
    """What the final norm reads."""
    return mhc_head(carry.streams, *_varying(params_out, sh), cfg.eps)


def _varying(params: Params[Tensor], sh: Sharding) -> tuple[Tensor, ...]:
    # Whole on every rank, for this rank's tokens: pvary sums their gradients over the ranks.
    return tuple(pvary(w, sh.sequence) for w in (params.phi, params.scale, params.base))


KIND = ResidualScheme(
    name="mhc",
    label="mHC",
    config=Config,
    specs=specs,
    specs_out=specs_out,
    start=start,
    connect=connect,
    finish=finish,
)
