"""The lightning indexer of Gated DSA: scores that say which keys a query should attend to.

Equations (DeepSeek-V3.2, arXiv 2512.02556; no rotation, and no Hadamard transform, which changes no
score)::

    q = sg(cq) W_q  [T J I]  k = LayerNorm(sg(x) W_k)  [T I]  w = sg(x) W_w * J^-0.5  [T J], float32
    I[t, s] = sum_j w[t, j] relu(I^-0.5 <q[t, j], k[s]>)

``sg`` stops the gradient: the indexer learns from its own loss only and sends nothing back to the
trunk. The two scales change no choice of keys but do change softmax(I), hence the loss.

On a mesh each rank projects its own tokens, with the whole weights: it scores its own queries
against the keys of all, so this work is split by tokens over tensor-parallel ranks too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple

import torch

from k31fn import tree
from k31fn.autodiff.replay import stop_gradient
from k31fn.kernels.norm import layer_norm
from k31fn.layers.linear import linear, split_heads
from k31fn.parallel.collectives import pvary
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import Constant, Normal, ParamSpec
from k31fn.params import init as init_params
from k31fn.precision import upcast
from k31fn.typing import Float, Leaf, Tensor

__all__ = ["Config", "IndexerOut", "Params", "apply", "init", "specs"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Config:
    """The lightning indexer.

    Attributes:
        hidden_size: width of the layer's input.
        q_lora_rank: width of the query latent of the attention.
        num_heads: index heads.
        head_dim: dims of an index head.
        norm_eps: of the key LayerNorm.
        score_scale: on ``<q, k>``; None: ``head_dim^-0.5``.
        weight_scale: on the head weights; None: ``num_heads^-0.5``.
        init_std: of the weights.
    """

    hidden_size: int
    q_lora_rank: int
    num_heads: int = 32
    head_dim: int = 128
    norm_eps: float = 1e-5
    score_scale: float | None = None
    weight_scale: float | None = None
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("hidden_size", "q_lora_rank", "num_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"indexer.Config.{name}={getattr(self, name)} must be positive; set it to 1 "
                    "or more"
                )
        for name in ("norm_eps", "score_scale", "weight_scale", "init_std"):
            value = getattr(self, name)
            # `not >` and not `<=`: it refuses NaN too.
            if value is not None and not value > 0:
                raise ValueError(
                    f"indexer.Config.{name}={value} must be positive; leave it out for the default"
                )

    @property
    def scale(self) -> float:
        """The scale on ``<q, k>``."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale


@tree.dataclass
class Params(Generic[Leaf]):
    """``w_q [Rq JI]  w_k [D I]  k_norm_weight [I]  k_norm_bias [I]  w_w [D J]``."""

    w_q: Leaf
    w_k: Leaf
    k_norm_weight: Leaf
    k_norm_bias: Leaf
    w_w: Leaf


class IndexerOut(NamedTuple):
    """Index queries, keys and scaled head weights of each token."""

    q: Float[Tensor, "B T J I"]
    k: Float[Tensor, "B T I"]
    w: Float[Tensor, "B T J"]


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares the parameters."""

    # Columns have no axis name, so that no rule splits the heads: see the module.
    def matrix(rows: int, columns: int, axis: str) -> ParamSpec:
        return ParamSpec(
            (rows, columns), (axis, ""), Normal(cfg.init_std), tags=frozenset({"matrix"})
        )

    def vector(value: float) -> ParamSpec:
        return ParamSpec((cfg.head_dim,), ("",), Constant(value), tags=frozenset({"no_decay"}))

    return Params(
        w_q=matrix(cfg.q_lora_rank, cfg.num_heads * cfg.head_dim, "rank"),
        w_k=matrix(cfg.hidden_size, cfg.head_dim, "hidden"),
        k_norm_weight=vector(1.0),
        k_norm_bias=vector(0.0),
        w_w=matrix(cfg.hidden_size, cfg.num_heads, "hidden"),
    )


def init(cfg: Config, key: Tensor, *, dtype: torch.dtype | None = None) -> Params[Tensor]:
    """Draws the initial values on the key's device; ``dtype`` as :func:`k31fn.params.init` says."""
    return init_params(specs(cfg), key, dtype=dtype)


def apply(
    params: Params[Tensor],
    x: Float[Tensor, "B T D"],
    cq: Float[Tensor, "B T Rq"],
    cfg: Config,
    *,
    sh: Sharding = UNSHARDED,
) -> IndexerOut:
    """Projects each token; the scores are :func:`k31fn.kernels.indexer.index_scores` of the result.

    Gradients: to ``params`` only; ``x`` and ``cq`` receive exactly zero.

    Args:
        params: as :func:`specs` declares.
        x: input of the attention layer.
        cq: its query latent.
        cfg: the indexer's config.
        sh: sharding.
    """
    # All heads of this rank's tokens: each weight is whole, and its gradient a sum over the ranks.
    params = tree.map(lambda w: pvary(w, sh.sequence), params)
    # The trunk is trained by the language model's loss alone, the indexer by its own.
    x = stop_gradient(x)
    cq = stop_gradient(cq)
    weight_scale = cfg.num_heads**-0.5 if cfg.weight_scale is None else cfg.weight_scale
    return IndexerOut(
        q=split_heads(linear(cq, params.w_q), cfg.num_heads, cfg.head_dim, "indexer w_q"),
        k=layer_norm(linear(x, params.w_k), params.k_norm_weight, params.k_norm_bias, cfg.norm_eps),
        # An island as the equations say: the head weights multiply every score.
        w=linear(upcast(x), params.w_w) * weight_scale,
    )
