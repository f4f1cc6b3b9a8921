"""Multi-token prediction: one more decoder layer that predicts the token after the next.

For the trunk's state ``h_t`` and the next token's embedding ``e_{t+1}``::

    u_t = W_eh [RMSNorm_e(e_{t+1}) ; RMSNorm_h(h_t)]
    y_t = RMSNorm_out(Layer(u)_t),   scored by the shared head against token t + 2

as in DeepSeek-V3 (arXiv 2412.19437, section 2.2) and the public loaders of K3. The layer has a
plain residual: it stands behind the trunk's final mix, outside of the AttnRes blocks. ``e_{t+1}``
is zero for the last token of a document, which has no label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from k31fn import tree
from k31fn.layers import block, embedding, norm, plain_residual
from k31fn.layers.kind import Aux
from k31fn.layers.linear import linear
from k31fn.layers.losses import IGNORED
from k31fn.parallel.axis import Axes
from k31fn.parallel.collectives import axis_size, ppermute, pslice, pvary
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import Normal, ParamSpec
from k31fn.params import init as init_params
from k31fn.segments import Segments
from k31fn.typing import Float, Int, Leaf

__all__ = ["Config", "Output", "Params", "apply", "init", "labels", "specs"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Config:
    """A multi-token-prediction layer around ``layer``, whose residual must be plain."""

    layer: block.Config
    init_std: float = 0.02

    def __post_init__(self) -> None:
        # The layer stands behind the trunk's last mix: it has no blocks or streams to read.
        if self.layer.residual != plain_residual.Config():
            raise ValueError(
                f"mtp.Config.layer.residual={self.layer.residual} must be plain_residual.Config()"
            )


@tree.dataclass
class Params(Generic[Leaf]):
    """Norms of both inputs, the projection ``w_join [2 D, D]``, the layer and the norm before the
    head.
    """

    embedding_norm: norm.Params[Leaf]
    hidden_norm: norm.Params[Leaf]
    w_join: Leaf
    layer: block.Params[Leaf]
    final_norm: norm.Params[Leaf]


class Output(NamedTuple):
    """Hidden states for the shared head, and the layer's reports (``()`` where it has no such
    part).
    """

    hidden: Float[Tensor, "B T D"]
    aux: Aux


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares the parameters."""
    size = cfg.layer.hidden_size
    normed = norm.specs(_norm(cfg))
    join = ParamSpec(
        (2 * size, size), ("", "hidden"), Normal(cfg.init_std), tags=frozenset({"matrix"})
    )
    return Params(normed, normed, join, block.specs(cfg.layer), normed)


def init(cfg: Config, key: Tensor, *, dtype: torch.dtype | None = None) -> Params[Tensor]:
    """Draws the initial values on the key's device; ``dtype`` as :func:`k31fn.params.init` says."""
    return init_params(specs(cfg), key, dtype=dtype)


def apply(
    params: Params[Tensor],
    h: Float[Tensor, "B T D"],
    tokens: Int[Tensor, "B S"],
    cfg: Config,
    *,
    embed: embedding.Params[Tensor],
    segments: Segments | None = None,
    bias: Any = (),
    sh: Sharding = UNSHARDED,
) -> Output:
    """States that predict token t + 2 from the trunk's state ``h`` at t and token t + 1.

    Args:
        params: as :func:`specs` declares.
        h: the trunk's state after the final mix, of this rank's tokens.
        tokens: the trunk's tokens, all of the slice of the context.
        cfg: the config.
        embed: the trunk's embedding, shared.
        segments: packed documents; None: one document per row.
        bias: the router's balance bias ``[E]`` of an MoE layer, else ``()``.
        sh: sharding.
    """
    vocab = embedding.Config(embed.weight.shape[0], cfg.layer.hidden_size)
    ids = torch.ones_like(tokens) if segments is None else segments.ids
    # Both in one message: the next token may be on the next rank, and of another document.
    next_token, next_id = _next(torch.stack([tokens, ids]), sh.context)
    has_next = pslice((ids == next_id) & (ids > 0), sh.sequence, 1)
    # Zero before the norm: whatever token follows a document's last one, it changes no bit.
    next_embedding = embedding.apply(embed, next_token, vocab, sh=sh)
    next_embedding = torch.where(has_next[..., None], next_embedding, 0)
    e = norm.apply(params.embedding_norm, next_embedding, _norm(cfg), sh=sh)
    both = torch.cat([e, norm.apply(params.hidden_norm, h, _norm(cfg), sh=sh)], dim=-1)
    # Whole on every rank, for this rank's tokens: pvary sums its gradient over the ranks.
    u = linear(both, tree.map(lambda w: pvary(w, sh.sequence), params.w_join))
    plain = plain_residual.Config()
    y, aux = block.apply(
        params.layer, plain_residual.start(u, plain), cfg.layer, segments=segments, bias=bias, sh=sh
    )
    y = plain_residual.finish((), y, plain)
    return Output(norm.apply(params.final_norm, y, _norm(cfg), sh=sh), aux)


def labels(next_labels: Int[Tensor, "B T"], *, context: Axes = ()) -> Int[Tensor, "B T"]:
    """Labels of token t + 2 from those of token t + 1, whose -100 already marks the ends of
    documents.

    Where token t + 1 has no label (it ends its document), neither has t: both shifts are the same
    one. ``context``: the ranks, where each has a slice of the tokens.
    """
    # Shifted by IGNORED, so that the 0 that `_next` puts behind the last token means no label.
    shifted = _next(next_labels - IGNORED, context) + IGNORED
    return torch.where(next_labels < 0, torch.full_like(shifted, IGNORED), shifted)


def _next(values: Int[Tensor, "*rows T"], context: Axes) -> Int[Tensor, "*rows T"]:
    """The value of the token after each, on the next rank if that is where it is; 0 after the last
    of the row.
    """
    # Each rank's first token goes to the rank before; the last rank gets zeros.
    first = ppermute(values[..., :1], context, [(i + 1, i) for i in range(axis_size(context) - 1)])
    return torch.cat([values[..., 1:], first], dim=-1)


def _norm(cfg: Config) -> norm.Config:
    return norm.Config(cfg.layer.hidden_size, cfg.layer.norm_eps)
