"""Gated MLA: multi-head latent attention without positions, with an output gate.

Equations (arXiv 2607.24653; the latent projections are those of DeepSeek-V2, arXiv 2405.04434)::

    cq = RMSNorm(x W_qa)                       q = cq W_qb                       [T H N+P]
    (c, kr) = split(x W_kva, R, P)             c = RMSNorm(c)
    (kn, v) = split(c W_kvb, N, V) per head    k = [kn ; kr for every head]      [T H N+P]
    o = softmax((N + P)^-0.5 q k^T) v          y = (sigmoid(x W_g) * o) W_o

Causal, inside documents. There is no rotation: the P "rope" dims of ``q`` and ``kr`` are plain
dims. The softmax, its output and the gate are float32 islands, rounded once before ``W_o``. A
padding token's ``y`` is 0.

``W_kvb = [W_uk ; W_uv]`` multiplies either the keys, as above, or the queries: ``<q, kn> = <q
W_uk^T, c>`` and ``o = (softmax(...) c) W_uv``, the absorbed form, whose keys and values are the
latent itself, one head for all. They differ by rounding only. The form with fewer products is
taken (:func:`_absorbs`): the absorbed one where few queries meet many keys, as in decoding.

On a mesh a rank computes the latents of its own tokens. It gathers ``cq`` and ``x`` (for the gate)
over ``sh.sequence``, and ``[c ; kr]``, R + P values per token, over ``sh.tokens``. Outputs of its
heads are summed over the heads and scattered back to the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple

import torch
from einops import rearrange

from k31fn import tree
from k31fn.autodiff.replay import stop_gradient
from k31fn.kernels.attention import attention
from k31fn.kernels.max_logits import max_logits
from k31fn.kernels.norm import rms_norm
from k31fn.layers.arguments import check_call
from k31fn.layers.kind import Aux, Flops, Output, TokenMixer, mean_keys
from k31fn.layers.linear import linear, per_head, split_heads, transposed_linear
from k31fn.parallel.axis import Axes
from k31fn.parallel.collectives import all_gather, axis_index, psum_scatter, pvary
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import Constant, Normal, ParamSpec
from k31fn.params import init as init_params
from k31fn.precision import upcast
from k31fn.segments import Segments
from k31fn.typing import Float, Int, Leaf, Tensor

__all__ = [
    "KIND",
    "Config",
    "Heads",
    "Params",
    "State",
    "apply",
    "extend",
    "gated_output",
    "init",
    "init_state",
    "latents",
    "logit_scales",
    "project",
    "score_flops",
    "specs",
    "visible_range",
]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Config:
    """Gated MLA.

    Attributes:
        hidden_size: width of the input and the output.
        num_heads: attention heads of the whole model.
        q_lora_rank: width of the query latent.
        kv_lora_rank: width of the key-value latent, which decoding caches.
        qk_nope_head_dim: query and key dims per head that come from the latents.
        qk_rope_head_dim: key dims shared by the heads; never rotated, the checkpoints call them
            rope.
        v_head_dim: value dims per head.
        latent_norm_eps: eps of the two latent norms; 1e-6 in one family of public code, 1e-5 in
            another.
        init_std: of the weights.
        report_logits: whether :func:`apply` also reports each head's largest logit.
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
    report_logits: bool = False

    def __post_init__(self) -> None:
        head_dims = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        for name in ("hidden_size", "num_heads", "q_lora_rank", "kv_lora_rank", *head_dims):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"mla.Config.{name}={getattr(self, name)} must be positive; set it to 1 or more"
                )
        for name in ("latent_norm_eps", "init_std"):
            # `not >` and not `<=`: it refuses NaN too.
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"mla.Config.{name}={getattr(self, name)} must be positive, such as 1e-6 or "
                    "0.02"
                )

    @property
    def scale(self) -> float:
        """The factor of the attention scores."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5


@tree.dataclass
class Params(Generic[Leaf]):
    """Weights of Gated MLA.

    ``w_qa [D Rq]  q_norm [Rq]  w_qb [Rq H(N+P)]  w_kva [D R+P]  kv_norm [R]  w_kvb [R H(N+V)]  w_g
    [D HV]`` ``w_o [HV D]``. Columns of ``w_qb`` are ordered by head, then N dims, then P dims;
    those of ``w_kvb`` by head, then N, then V.
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
    """What decoding keeps of the tokens so far: ``[c ; kr]``, the normalised latent and the shared
    dims of the keys.
    """

    kv: Float[Tensor, "B S RP"]


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares the parameters."""
    H, R, P = cfg.num_heads, cfg.kv_lora_rank, cfg.qk_rope_head_dim
    N, V = cfg.qk_nope_head_dim, cfg.v_head_dim

    def matrix(rows: int, columns: int, axes: tuple[str, str], *, head_dim: int = 0) -> ParamSpec:
        tags = frozenset({"matrix", "per_head"} if head_dim else {"matrix"})
        return ParamSpec((rows, columns), axes, Normal(cfg.init_std), tags=tags, head_dim=head_dim)

    # Latents have no heads: their projections and norms have no axis that is split over tensor
    # parallelism, and every rank makes the latents of its own tokens.
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
    """Attends inside each document. ``segments`` None: one document per row.

    On a mesh ``x`` and the result are the rank's own tokens, ``segments`` those of its slice of the
    context. With ``report_logits`` the largest logit of each local head over the rank's queries is
    reported, without gradient.

    Gradients: to ``params`` and ``x``, to any order.
    """
    check_call(params, x, cfg, (Params, Config), segments=segments, sh=sh)
    cq, kv = latents(params, x, cfg, sh=sh)
    # Queries are those of the slice of the context, for this rank's heads; keys those of the row.
    cq = all_gather(cq, sh.sequence, 1)
    kv = all_gather(kv, sh.tokens, 1)
    heads, w_uv = project(params, cq, kv, cfg)
    seen = visible_range(heads.q, segments, context=sh.context)
    o = attention(*heads, *seen, cfg.scale)
    # A report: an optimiser reads it, no loss does.
    logits = max_logits(*stop_gradient(heads[:3]), *seen, cfg.scale) if cfg.report_logits else ()
    return Output(gated_output(params, x, o, w_uv, sh=sh), Aux(logits=logits))


def init_state(
    cfg: Config, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
) -> State:
    """The state before the first token: nothing cached."""
    return State(
        torch.zeros(batch, 0, cfg.kv_lora_rank + cfg.qk_rope_head_dim, dtype=dtype, device=device)
    )


def extend(
    params: Params[Tensor], x: Float[Tensor, "B T D"], cfg: Config, state: State
) -> tuple[Float[Tensor, "B T D"], State]:
    """:func:`apply` on the next T tokens of one document per row; any cuts of a document give the
    same outputs.
    """
    cq, kv = latents(params, x, cfg)
    # The latents are cached and not keys and values: R + P numbers of a token for all heads.
    kv = torch.cat([state.kv, kv.to(state.kv.dtype)], dim=1)
    heads, w_uv = project(params, cq, kv, cfg)
    o = attention(*heads, *visible_range(x, None, cached=state.kv.shape[1]), cfg.scale)
    return gated_output(params, x, o, w_uv), State(kv)


class Heads(NamedTuple):
    """Queries, keys without the shared dims, shared dims of the keys, and values, of the local
    heads.

    Hk = H; in the absorbed form Hk = 1 and ``k``, ``v`` are the latent.
    """

    q: Float[Tensor, "B T H K"]
    k: Float[Tensor, "B S Hk N"]
    kr: Float[Tensor, "B S P"]
    v: Float[Tensor, "B S Hk V"]


def latents(
    params: Params[Tensor], x: Float[Tensor, "B T D"], cfg: Config, *, sh: Sharding = UNSHARDED
) -> tuple[Float[Tensor, "B T Rq"], Float[Tensor, "B T RP"]]:
    """The normalised query latent, and ``[c ; kr]``, all that other tokens ever see of a token."""
    # Whole on every rank, for this rank's tokens: pvary sums their gradients over the ranks.
    whole = params.w_qa, params.q_norm, params.w_kva, params.kv_norm
    w_qa, q_norm, w_kva, kv_norm = tree.map(lambda w: pvary(w, sh.sequence), whole)
    cq = rms_norm(linear(x, w_qa), q_norm, cfg.latent_norm_eps)
    c, kr = linear(x, w_kva).split([cfg.kv_lora_rank, cfg.qk_rope_head_dim], dim=-1)
    # One tensor, so that one gather or one cache holds it; only the latent is normalised.
    return cq, torch.cat([rms_norm(c, kv_norm, cfg.latent_norm_eps), kr], dim=-1)


def _absorbs(cfg: Config, num_queries: int, num_keys: int) -> bool:
    """Whether the absorbed form takes fewer multiplications than products of the keys with
    ``W_kvb``.

    Per head, R (N + V) for each key or each query, and N + V or 2 R for each pair. At the sizes of
    K3.1 the absorbed form pays below 171 queries, if there are many keys.
    """
    R = cfg.kv_lora_rank
    each = cfg.qk_nope_head_dim + cfg.v_head_dim
    # All pairs, also those that the mask leaves out: shapes alone decide, never the packing.
    pairs = num_queries * num_keys
    return num_queries * R * each + pairs * 2 * R < num_keys * R * each + pairs * each


def project(
    params: Params[Tensor],
    cq: Float[Tensor, "B T Rq"],
    kv: Float[Tensor, "B S RP"],
    cfg: Config,
    *,
    absorb: bool = False,
) -> tuple[Heads, Any]:
    """The local heads of the queries and keys with these latents; ``absorb``: in the absorbed form,
    also where it takes more multiplications.

    Returns:
        What the attention takes, and the per-head weights that :func:`gated_output` multiplies its
        output with: ``()`` if the keys were multiplied.
    """
    N, V = cfg.qk_nope_head_dim, cfg.v_head_dim
    q = split_heads(linear(cq, params.w_qb), cfg.num_heads, N + cfg.qk_rope_head_dim, "mla w_qb")
    c, kr = kv.split([cfg.kv_lora_rank, cfg.qk_rope_head_dim], dim=-1)
    if absorb or _absorbs(cfg, cq.shape[1], kv.shape[1]):
        w_uk, w_uv = per_head(params.w_kvb, cfg.num_heads, (N, V), "mla w_kvb")
        qn, qr = q.split([N, cfg.qk_rope_head_dim], dim=-1)
        q = torch.cat([_on_each_head(transposed_linear, qn, w_uk), qr], dim=-1)
        # One head of keys and values for all heads of queries: the latent itself.
        latent = rearrange(c, "b s r -> b s 1 r")
        return Heads(q, latent, kr, latent), w_uv
    keys_and_values = split_heads(linear(c, params.w_kvb), cfg.num_heads, N + V, "mla w_kvb")
    k, v = keys_and_values.split([N, V], dim=-1)
    return Heads(q, k, kr, v), ()


def gated_output(
    params: Params[Tensor],
    x: Float[Tensor, "B T D"],
    o: Float[Tensor, "B Tq H V"],
    w_uv: Any = (),
    *,
    sh: Sharding = UNSHARDED,
) -> Float[Tensor, "B T D"]:
    """``(sigmoid(x W_g) * o) W_o`` of the rank's own tokens ``x``, gated in the dtype of ``o``."""
    if not isinstance(w_uv, tuple):
        # The values that the absorbed form has not multiplied.
        o = _on_each_head(linear, o, w_uv)
    # The gate's columns are split by head, so each rank gates its heads of all tokens.
    x = all_gather(x, sh.sequence, 1)
    gate = torch.sigmoid(upcast(linear(x, params.w_g)))
    gated = gate * rearrange(o, "b t h v -> b t (h v)")
    # The sum over the heads of all ranks; each keeps its own tokens of it.
    return psum_scatter(linear(gated.to(x.dtype), params.w_o), sh.sequence, 1)


def visible_range(
    queries: Float[Tensor, "B T ..."],
    segments: Segments | None,
    *,
    cached: int = 0,
    context: Axes = (),
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """``(start, stop)``: token t sees the keys ``start <= s < stop``, of its document up to itself;
    padding sees none.

    Args:
        queries: the tokens, for their shape and device.
        segments: their packing; None: one document per row.
        cached: keys before the first token, all of its document (then ``segments`` is None).
        context: axes over which the row is cut into slices, of which the tokens are this rank's.
            The keys are those of the whole row, and so are ``start`` and ``stop``.
    """
    B, T = queries.shape[:2]
    # In the whole row, as the keys are: slices of the context are of one length.
    index = axis_index(context) * T + torch.arange(cached, cached + T, device=queries.device)
    index = index.expand(B, T)
    if segments is None:
        return torch.zeros_like(index), index + 1
    valid = segments.ids > 0
    # For padding 0 <= s < 0, which no key fulfils.
    start = torch.where(valid, index - segments.position, 0)
    return start, torch.where(valid, index + 1, 0)


def _on_each_head(
    f: Callable[..., Tensor], x: Float[Tensor, "B T H n"], w: Any
) -> Float[Tensor, "B T H m"]:
    """``f`` of each head's rows and its own weight: one product per head, of all rows."""
    # Heads lead, as in the weight: then a plain batched product does it, for any leaf.
    y = f(rearrange(x, "b t h n -> h (b t) n"), w)
    return rearrange(y, "h (b t) m -> b t h m", b=x.shape[0])


def score_flops(cfg: Config, num_keys: float) -> float:
    """Operations of a query that attends to so many keys: ``2 H (K + V)`` for each."""
    width = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim + cfg.v_head_dim
    return 2.0 * cfg.num_heads * width * num_keys


def logit_scales(cfg: Config, factor: Float[Tensor, "H"]) -> dict[str, Tensor]:
    """Factors of the weights' columns that scale every logit of a head by its own factor.

    The N dims that meet the head's own keys share it as square roots. The P dims meet keys of all
    heads, which stay as they are, so the queries take the whole of it. Values have no part in it.
    """
    root, N, V = factor.sqrt()[:, None], cfg.qk_nope_head_dim, cfg.v_head_dim
    shared = factor[:, None].expand(-1, cfg.qk_rope_head_dim)
    query = torch.cat([root.expand(-1, N), shared], dim=1)
    key = torch.cat([root.expand(-1, N), torch.ones_like(root).expand(-1, V)], dim=1)
    return {"w_qb": query.flatten(), "w_kvb": key.flatten()}


KIND = TokenMixer(
    name="mla",
    label="MLA",
    config=Config,
    specs=specs,
    apply=apply,
    init_state=init_state,
    extend=extend,
    parts=((".*", "full attention"),),
    flops=lambda cfg, length: Flops(score_flops(cfg, mean_keys(length, length))),
    tensor_parallel=lambda cfg: {"num_heads": cfg.num_heads},
    splits=frozenset({"tp", "cp"}),
    reports=lambda cfg: frozenset({"logits"} if cfg.report_logits else ()),
    with_logits=lambda cfg: replace(cfg, report_logits=True),
    logit_scales=logit_scales,
)
