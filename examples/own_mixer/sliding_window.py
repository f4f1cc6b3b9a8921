"""Sliding-window attention: softmax attention of each token to the last ``window`` of its document.

    q, k, v = x W_q, x W_k, x W_v                                             per head   [T H K]
    o_t     = sum_s softmax_s(K^-0.5 <q_t, k_s>) v_s     over t - window < s <= t, same document
    y       = o W_o

As in Longformer (arXiv 2004.05150), with causal masks and without positions. A padding token's
``y`` is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import torch
from einops import rearrange

from k31fn import tree
from k31fn.kernels.interval_attention import interval_attention
from k31fn.layers import mla
from k31fn.layers.kind import Flops, Output, TokenMixer, mean_keys
from k31fn.layers.linear import linear, split_heads
from k31fn.parallel import UNSHARDED, Sharding, all_gather, psum_scatter
from k31fn.params import Normal, ParamSpec
from k31fn.segments import Segments
from k31fn.typing import Float, Leaf, Tensor

__all__ = ["KIND", "Config", "Params", "State", "apply", "extend", "init_state", "specs"]


@dataclass(frozen=True)
class Config:
    """Sliding-window attention.

    Attributes:
        hidden_size: width of the input and the output.
        num_heads: heads of the whole model.
        head_dim: dims per head of queries, keys and values.
        window: keys that a token sees, its own included.
        init_std: of the weights.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    window: int = 64
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "head_dim", "window"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"sliding_window.Config.{name}={getattr(self, name)} must be positive"
                )


@tree.dataclass
class Params(Generic[Leaf]):
    """``w_q w_k w_v [D HK]``, ``w_o [HK D]``; columns are ordered by head."""

    w_q: Leaf
    w_k: Leaf
    w_v: Leaf
    w_o: Leaf


@tree.dataclass
class State:
    """What decoding keeps: keys and values of the last ``window - 1`` tokens."""

    k: Float[Tensor, "B S H K"]
    v: Float[Tensor, "B S H K"]


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares the weights; ``heads`` is what tensor parallelism splits."""
    D, HK, init = cfg.hidden_size, cfg.num_heads * cfg.head_dim, Normal(cfg.init_std)
    into_heads = ParamSpec(
        (D, HK),
        ("hidden", "heads"),
        init,
        tags=frozenset({"matrix", "per_head"}),
        head_dim=cfg.head_dim,
    )
    out_of_heads = ParamSpec((HK, D), ("heads", "hidden"), init, tags=frozenset({"matrix"}))
    return Params(into_heads, into_heads, into_heads, out_of_heads)


def apply(
    params: Params[Tensor],
    x: Float[Tensor, "B T D"],
    cfg: Config,
    *,
    segments: Segments | None = None,
    sh: Sharding = UNSHARDED,
) -> Output:
    """Attends inside each document. ``segments`` None: one document per row.

    On a mesh ``x`` and ``y`` are the rank's own tokens, ``segments`` those of its slice of the
    context; its heads attend for all tokens of the slice. Gradients: to ``params`` and ``x``, to
    any order.
    """
    q, k, v = _project(params, all_gather(x, sh.sequence, 1), cfg)
    start, stop = mla.visible_range(q, segments, context=sh.context)
    # Keys and values travel side by side: one collective, and one latency, for both.
    k, v = all_gather(torch.cat([k, v], dim=-1), sh.context, 1).split(cfg.head_dim, dim=-1)
    start = torch.maximum(start, stop - cfg.window)
    o = interval_attention(q, k, v, start, stop, cfg.head_dim**-0.5)
    return Output(psum_scatter(_merge(o, params, x), sh.sequence, 1))


def init_state(
    cfg: Config, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
) -> State:
    """The state before a document's first token: nothing cached."""
    nothing = torch.zeros(batch, 0, cfg.num_heads, cfg.head_dim, dtype=dtype, device=device)
    return State(nothing, nothing)


def extend(
    params: Params[Tensor], x: Float[Tensor, "B T D"], cfg: Config, state: State
) -> tuple[Float[Tensor, "B T D"], State]:
    """:func:`apply`'s ``y`` on the next T tokens of one document per row."""
    q, k, v = _project(params, x, cfg)
    k = torch.cat([state.k, k.to(state.k.dtype)], dim=1)
    v = torch.cat([state.v, v.to(state.v.dtype)], dim=1)
    start, stop = mla.visible_range(q, None, cached=state.k.shape[1])
    start = torch.maximum(start, stop - cfg.window)
    o = interval_attention(q, k, v, start, stop, cfg.head_dim**-0.5)
    # The next token sees itself and window - 1 before it.
    first = max(0, k.shape[1] - (cfg.window - 1))
    return _merge(o, params, x), State(k[:, first:], v[:, first:])


def _project(
    params: Params[Tensor], x: Float[Tensor, "B T D"], cfg: Config
) -> list[Float[Tensor, "B T H K"]]:
    """Queries, keys and values of the local heads."""
    projected = []
    for weight in (params.w_q, params.w_k, params.w_v):
        heads = split_heads(linear(x, weight), cfg.num_heads, cfg.head_dim, "sliding_window")
        projected.append(heads)
    return projected


def _merge(
    o: Float[Tensor, "B T H K"], params: Params[Tensor], x: Float[Tensor, "B S D"]
) -> Float[Tensor, "B T D"]:
    """The local heads' part of ``o W_o``; ``o`` is float32 and rounded once, to the dtype of
    ``x``.
    """
    return linear(rearrange(o, "B T H K -> B T (H K)").to(x.dtype), params.w_o)


def _flops(cfg: Config, length: int) -> Flops:
    """Scores and values: ``4 H K`` for each key that a query sees."""
    return Flops(mixing=4.0 * cfg.num_heads * cfg.head_dim * mean_keys(length, cfg.window))


KIND = TokenMixer(
    name="sliding_window",
    label="sliding window",
    config=Config,
    specs=specs,
    apply=apply,
    init_state=init_state,
    extend=extend,
    flops=_flops,
    tensor_parallel=lambda cfg: {"num_heads": cfg.num_heads},
    splits=frozenset({"tp", "cp"}),
)
"""The row in the table of kinds; ``recipe.py`` registers it."""
