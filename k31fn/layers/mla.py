"""Gated MLA: multi-head latent attention without positions, with an output gate.

Equations (arXiv 2607.24653; the latent projections are those of DeepSeek-V2, arXiv 2405.04434)::

    cq = RMSNorm(x W_qa)                       q = cq W_qb                       [T H N+P]
    (c, kr) = split(x W_kva, R, P)             c = RMSNorm(c)
    (kn, v) = split(c W_kvb, N, V) per head    k = [kn ; kr for every head]      [T H N+P]
    o = softmax((N + P)^-0.5 q k^T) v          y = (sigmoid(x W_g) * o) W_o

Causal, inside documents. There is no rotation: the P "rope" dims of ``q`` and ``kr`` are plain dims. The softmax, its
output and the gate are float32 islands, rounded once before ``W_o``. A padding token's attention output is 0, so its
``y`` is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple

import torch

from k31fn import tree
from k31fn.kernels.attention import attention
from k31fn.kernels.norm import rms_norm
from k31fn.layers.linear import linear, split_heads
from k31fn.parallel.collectives import psum, pvary
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import Constant, Normal, ParamSpec
from k31fn.precision import upcast
from k31fn.segments import Segments
from k31fn.typing import Float, Int, Leaf, Tensor

__all__ = [
    "Config",
    "Heads",
    "Params",
    "State",
    "apply",
    "extend",
    "gated_output",
    "init_state",
    "project",
    "specs",
    "visible_range",
]


@dataclass(frozen=True)
class Config:
    """Gated MLA.

    Attributes:
        hidden_size: width of the input and the output.
        num_heads: attention heads of the whole model.
        q_lora_rank: width of the query latent.
        kv_lora_rank: width of the key-value latent, which decoding caches.
        qk_nope_head_dim: query and key dims per head that come from the latents.
        qk_rope_head_dim: key dims shared by the heads; never rotated, the checkpoints call them rope.
        v_head_dim: value dims per head.
        latent_norm_eps: eps of the two latent norms; 1e-6 in one family of public code, 1e-5 in another.
        init_std: of the weights.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        sizes = (
            "hidden_size",
            "num_heads",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"mla.Config.{name}={getattr(self, name)} must be positive; set it to 1 or more")
        for name in ("latent_norm_eps", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"mla.Config.{name}={getattr(self, name)} must be positive, such as 1e-6 or 0.02")

    @property
    def scale(self) -> float:
        """Of the attention scores."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5


@tree.dataclass
class Params(Generic[Leaf]):
    """Weights of Gated MLA.

    ``w_qa [D Rq]  q_norm [Rq]  w_qb [Rq H(N+P)]  w_kva [D R+P]  kv_norm [R]  w_kvb [R H(N+V)]  w_g [D HV]``
    ``w_o [HV D]``. Columns of ``w_qb`` are ordered by head, then N dims, then P dims; those of ``w_kvb`` by head, then
    N, then V.
    """

    w_qa: Leaf
    q_norm: Leaf
    w_qb: Leaf
    w_kva: Leaf
    kv_norm: Leaf
    w_kvb: Leaf
    w_g: Leaf
    w_o: Leaf


@tree.dataclass
class State:
    """What decoding keeps of the tokens so far: the normalised latent and the shared dims of the keys."""

    c: Float[Tensor, "B S R"]
    kr: Float[Tensor, "B S P"]


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares the parameters."""
    H, R, P = cfg.num_heads, cfg.kv_lora_rank, cfg.qk_rope_head_dim
    N, V = cfg.qk_nope_head_dim, cfg.v_head_dim

    def matrix(rows: int, columns: int, axes: tuple[str, str], *, head_dim: int = 0) -> ParamSpec:
        tags = frozenset({"matrix", "per_head"} if head_dim else {"matrix"})
        return ParamSpec((rows, columns), axes, Normal(cfg.init_std), tags=tags, head_dim=head_dim)

    def norm(dim: int) -> ParamSpec:
        return ParamSpec((dim,), ("rank",), Constant(1.0), tags=frozenset({"no_decay"}))

    return Params(
        w_qa=matrix(cfg.hidden_size, cfg.q_lora_rank, ("hidden", "rank")),
        q_norm=norm(cfg.q_lora_rank),
        w_qb=matrix(cfg.q_lora_rank, H * (N + P), ("rank", "heads"), head_dim=N + P),
        w_kva=matrix(cfg.hidden_size, R + P, ("hidden", "rank")),
        kv_norm=norm(R),
        w_kvb=matrix(R, H * (N + V), ("rank", "heads"), head_dim=N + V),
        w_g=matrix(cfg.hidden_size, H * V, ("hidden", "heads")),
        w_o=matrix(H * V, cfg.hidden_size, ("heads", "hidden")),
    )


def apply(
    params: Params[Tensor],
    x: Float[Tensor, "B T D"],
    cfg: Config,
    *,
    segments: Segments | None = None,
    sh: Sharding = UNSHARDED,
) -> Float[Tensor, "B T D"]:
    """Attends inside each document. ``segments`` None: one document per row.

    Gradients: to ``params`` and ``x``, to any order.
    """
    _, heads, _ = project(params, x, cfg, sh=sh)
    o = attention(*heads, *visible_range(x, segments), cfg.scale)
    return gated_output(params, x, o, sh=sh)


def init_state(cfg: Config, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None) -> State:
    """The state before the first token: nothing cached."""
    empty = torch.zeros(batch, 0, cfg.kv_lora_rank + cfg.qk_rope_head_dim, dtype=dtype, device=device)
    return State(*empty.split([cfg.kv_lora_rank, cfg.qk_rope_head_dim], dim=-1))


def extend(
    params: Params[Tensor], x: Float[Tensor, "B T D"], cfg: Config, state: State, *, sh: Sharding = UNSHARDED
) -> tuple[Float[Tensor, "B T D"], State]:
    """:func:`apply` on the next T tokens of one document per row; any cuts of a document give the same outputs."""
    _, heads, state = project(params, x, cfg, state, sh=sh)
    bounds = visible_range(x, None, cached=state.c.shape[1] - x.shape[1])
    o = attention(*heads, *bounds, cfg.scale)
    return gated_output(params, x, o, sh=sh), state


class Heads(NamedTuple):
    """Queries, keys without the shared dims, shared dims of the keys, and values, of the local heads."""

    q: Float[Tensor, "B T H K"]
    k: Float[Tensor, "B S H N"]
    kr: Float[Tensor, "B S P"]
    v: Float[Tensor, "B S H V"]


def project(
    params: Params[Tensor],
    x: Float[Tensor, "B T D"],
    cfg: Config,
    state: State | tuple[()] = (),
    *,
    sh: Sharding = UNSHARDED,
) -> tuple[Float[Tensor, "B T Rq"], Heads, State]:
    """Projects the tokens of ``x``, and the keys and values also of the tokens in ``state``.

    Returns:
        The normalised query latent, what the attention takes, and the state that holds the tokens of ``x`` as well.
    """
    cq = rms_norm(linear(x, params.w_qa), params.q_norm, cfg.latent_norm_eps)
    q = linear(pvary(cq, sh.heads), params.w_qb)
    c, kr = linear(x, params.w_kva).split([cfg.kv_lora_rank, cfg.qk_rope_head_dim], dim=-1)
    c = rms_norm(c, params.kv_norm, cfg.latent_norm_eps)
    if isinstance(state, State):
        c = torch.cat([state.c, c.to(state.c.dtype)], dim=1)
        kr = torch.cat([state.kr, kr.to(state.kr.dtype)], dim=1)
    kv = linear(pvary(c, sh.heads), params.w_kvb)
    kv = split_heads(kv, cfg.num_heads, cfg.qk_nope_head_dim + cfg.v_head_dim, "mla w_kvb")
    k, v = kv.split([cfg.qk_nope_head_dim, cfg.v_head_dim], dim=-1)
    q = split_heads(q, cfg.num_heads, cfg.qk_nope_head_dim + cfg.qk_rope_head_dim, "mla w_qb")
    return cq, Heads(q, k, pvary(kr, sh.heads), v), State(c, kr)


def gated_output(
    params: Params[Tensor], x: Float[Tensor, "B T D"], o: Float[Tensor, "B T H V"], *, sh: Sharding = UNSHARDED
) -> Float[Tensor, "B T D"]:
    """``(sigmoid(x W_g) * o) W_o``; gated in the dtype of ``o`` and rounded once."""
    gate = torch.sigmoid(upcast(linear(pvary(x, sh.heads), params.w_g)))
    return psum(linear((gate * o.flatten(-2)).to(x.dtype), params.w_o), sh.heads)


def visible_range(
    x: Float[Tensor, "B T D"], segments: Segments | None, *, cached: int = 0
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """``(start, stop)``: token t sees the keys ``start <= s < stop``, of its document up to itself; padding sees none.

    Args:
        x: the tokens, for their shape and device.
        segments: their packing; None: one document per row.
        cached: keys before the first token of ``x``, all of its document (then ``segments`` is None).
    """
    index = torch.arange(cached, cached + x.shape[1], device=x.device).expand(x.shape[:2])
    if segments is None:
        return torch.zeros_like(index), index + 1
    valid = segments.ids > 0
    start = torch.where(valid, index - segments.position, 0)
    return start, torch.where(valid, index + 1, 0)
