"""Gated DSA: Gated MLA in which each query attends to the keys that its lightning indexer chose.

Equations (DeepSeek-V3.2, arXiv 2512.02556, on the projections of :mod:`k31fn.layers.mla`)::

    S_t = the top min(topk, visible) keys by the index score I[t, :]
    o   = softmax over S_t of the attention scores, times v;
          gate and output projection as in Gated MLA
    kl  = sum_t KL(p[t, S_t] || softmax(I[t, S_t]))
          p = mean over heads of the attention's probabilities, sg

A row of few keys expands them by head, as in Gated MLA, and masks tiles of all visible keys with
the sets. A long one takes the absorbed form and gathers the chosen latents (:func:`_gathers`).

Two stages. ``sparse``: as above. ``dense_warmup``: S_t is all visible keys, so the attention is
dense and only teaches the indexer; freezing the trunk is the trainer's business.

Two losses that never meet: gradients of ``y`` reach the attention and ``x`` but no parameter of the
indexer, those of ``kl`` reach the indexer's parameters and nothing else; the other parts are
exactly zero.

On a mesh a rank's index scores, choices and loss are those of its own tokens. The sets are then
gathered over ``sh.sequence``, since its heads attend for the queries of its neighbours too, and the
heads' probabilities, which are made for the loss alone, are summed over the ranks that hold them
and scattered back. Of a token, other
ranks of the context see ``[c ; kr ; k_index]`` only: 704 values at the sizes of K3.1, gathered in
one piece.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal

import torch
from einops import rearrange

from k31fn import tree
from k31fn.autodiff.replay import decision, stop_gradient
from k31fn.kernels.attention import attention
from k31fn.kernels.indexer import index_topk
from k31fn.kernels.indexer_kl import indexer_kl
from k31fn.kernels.latent_attention import latent_attention, latent_probs
from k31fn.kernels.max_logits import max_chosen_logits, max_logits
from k31fn.kernels.sparse_attention import head_probs, sparse_attention
from k31fn.kernels.tiling import map_query_tiles, visible_keys
from k31fn.layers import indexer, mla
from k31fn.layers.arguments import check_call
from k31fn.layers.kind import Aux, Flops, Output, TokenMixer, mean_keys
from k31fn.parallel.collectives import all_gather, axis_size, pslice, psum_scatter
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import ParamSpec
from k31fn.params import init as init_params
from k31fn.segments import Segments
from k31fn.typing import Float, Int, Leaf, Tensor

__all__ = ["KIND", "Config", "Params", "State", "apply", "extend", "init", "init_state", "specs"]


def __dir__() -> list[str]:
    return __all__


# Keys over top-k, above which chosen latents are gathered and up to which dense tiles are masked.
# For 96 heads of 128 + 64 and 128 dims, latents of 512 + 64 and top-2048 on one H200 the two meet
# near 17,000 keys: gathering was timed there, masking at 8,192 and scaled by the square.
_MASKED_UP_TO = 8
_FUSED_TILE = 1024  # queries whose probabilities of all keys are held at once in the warm-up


@dataclass(frozen=True)
class Config:
    """Gated DSA.

    Attributes:
        attn: the attention.
        indexer: the indexer, of the same hidden size and query latent.
        topk: keys per query, at most.
        stage: ``sparse``, or ``dense_warmup`` in which the indexer only watches.
    """

    attn: mla.Config
    indexer: indexer.Config
    topk: int = 2048
    stage: Literal["dense_warmup", "sparse"] = "sparse"

    def __post_init__(self) -> None:
        for name in ("hidden_size", "q_lora_rank"):
            of_indexer = getattr(self.indexer, name)
            of_attn = getattr(self.attn, name)
            # Both read the same input and the same query latent.
            if of_indexer != of_attn:
                raise ValueError(
                    f"dsa.Config.indexer.{name}={of_indexer} must equal attn.{name}={of_attn}; set "
                    f"it to {of_attn}"
                )
        if self.topk < 1:
            raise ValueError(
                f"dsa.Config.topk={self.topk} must be positive; a query attends to itself at least"
            )
        if self.stage not in ("dense_warmup", "sparse"):
            raise ValueError(
                f"dsa.Config.stage={self.stage!r} unknown; use 'dense_warmup' or 'sparse'"
            )

    @property
    def hidden_size(self) -> int:
        """Width of the input and the output."""
        return self.attn.hidden_size


@tree.dataclass
class Params(Generic[Leaf]):
    """Parameters of the attention and of the indexer."""

    attn: mla.Params[Leaf]
    indexer: indexer.Params[Leaf]


@tree.dataclass
class State:
    """What decoding keeps of the tokens so far: the attention's latents and the index keys ``[B S
    I]``.
    """

    attn: mla.State
    index_k: Float[Tensor, "B S I"]


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares the parameters."""
    return Params(attn=mla.specs(cfg.attn), indexer=indexer.specs(cfg.indexer))


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
    """Attends sparsely inside each document. ``segments`` None: one document per row.

    On a mesh ``x`` and ``y`` are the rank's own tokens, ``segments`` those of its slice of the
    context.

    Reports ``kl``, the indexer's loss in float32, summed over the rank's own valid queries of all
    rows (the caller sums it over the ranks and divides), and ``logits`` as Gated MLA does, over the
    keys that are attended to.

    The sets are a :func:`k31fn.autodiff.decision` named ``topk``. Where no query sees more than
    ``topk`` keys, ``y`` is Gated MLA's.
    """
    check_call(params, x, cfg, (Params, Config), segments=segments, sh=sh)
    cq, kv = mla.latents(params.attn, x, cfg.attn, sh=sh)
    index = indexer.apply(params.indexer, x, cq, cfg.indexer, sh=sh)
    # All that other ranks see of a token, in one message; index queries stay where they are.
    keys = all_gather(torch.cat([kv, index.k], dim=-1), sh.tokens, 1)
    kv, index_k = keys.split([kv.shape[-1], cfg.indexer.head_dim], dim=-1)
    index = index._replace(k=index_k)
    cq = all_gather(cq, sh.sequence, 1)
    heads, w_uv = mla.project(params.attn, cq, kv, cfg.attn, absorb=_gathers(cfg, kv))
    start, stop = mla.visible_range(heads.q, segments, context=sh.context)
    logits: Any = ()
    if cfg.stage == "sparse":
        # A rank scores and chooses for its own tokens only: that work is split by tokens.
        local_start = pslice(start, sh.sequence, 1)
        local_stop = pslice(stop, sh.sequence, 1)
        local_chosen = _choose(index, local_start, local_stop, cfg)
        chosen = all_gather(local_chosen, sh.sequence, 1)
        o, probs = _attend(heads, kv, w_uv, chosen, cfg)
        # The teacher is the mean over the heads of all ranks, of this rank's own tokens.
        kl = _loss(index, psum_scatter(probs, sh.heads, 1), local_chosen, cfg)
        if cfg.attn.report_logits:
            # A report: an optimiser reads it, no loss does.
            logits = max_chosen_logits(*stop_gradient(heads[:3]), chosen, cfg.attn.scale)
    else:
        o, kl = _attend_to_all(heads, index, start, stop, cfg, sh)
        if cfg.attn.report_logits:
            logits = max_logits(*stop_gradient(heads[:3]), start, stop, cfg.attn.scale)
    y = mla.gated_output(params.attn, x, o, w_uv, sh=sh)
    return Output(y, Aux(kl=kl, logits=logits))


def init_state(
    cfg: Config, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
) -> State:
    """The state before the first token: nothing cached."""
    attn = mla.init_state(cfg.attn, batch, dtype=dtype, device=device)
    return State(attn, torch.zeros(batch, 0, cfg.indexer.head_dim, dtype=dtype, device=device))


def extend(
    params: Params[Tensor], x: Float[Tensor, "B T D"], cfg: Config, state: State
) -> tuple[Float[Tensor, "B T D"], State]:
    """:func:`apply`'s ``y`` on the next T tokens of one document per row; chooses among all cached
    keys.
    """
    cq, kv = mla.latents(params.attn, x, cfg.attn)
    index = indexer.apply(params.indexer, x, cq, cfg.indexer)
    # Index keys are cached beside the latents: scores of old keys are taken anew for every query.
    kv = torch.cat([state.attn.kv, kv.to(state.attn.kv.dtype)], dim=1)
    index_k = torch.cat([state.index_k, index.k.to(state.index_k.dtype)], dim=1)
    heads, w_uv = mla.project(params.attn, cq, kv, cfg.attn, absorb=_gathers(cfg, kv))
    start, stop = mla.visible_range(x, None, cached=state.index_k.shape[1])
    if cfg.stage == "sparse":
        chosen = _choose(index._replace(k=index_k), start, stop, cfg)
        o, _ = _attend(heads, kv, w_uv, chosen, cfg, taught=False)
    else:
        o = attention(*heads, start, stop, cfg.attn.scale)
    return mla.gated_output(params.attn, x, o, w_uv), State(mla.State(kv), index_k)


def _choose(
    index: indexer.IndexerOut, start: Int[Tensor, "B T"], stop: Int[Tensor, "B T"], cfg: Config
) -> Int[Tensor, "B T M"]:
    # A decision: a replay must attend to the same keys, whose probabilities taught the indexer.
    choose = functools.partial(index_topk, topk=cfg.topk, scale=cfg.indexer.scale)
    return decision("topk", choose, index.q, index.k, index.w, start, stop)


def _gathers(cfg: Config, kv: Float[Tensor, "B S RP"]) -> bool:
    """Whether latents are gathered though expanding them would take fewer multiplications.

    Shapes, dtype and device decide, so a replay and every rank do the same. The plain form gathers
    nothing: where it runs there is no gain.
    """
    if cfg.stage != "sparse" or kv.shape[1] <= _MASKED_UP_TO * cfg.topk:
        return False
    no_set = torch.empty(*kv.shape[:2], 0, dtype=torch.int32, device=kv.device)
    call = (kv[:, :, None], kv, no_set, cfg.attn.scale, cfg.attn.kv_lora_rank)
    return latent_attention.chosen(*call) != "reference"


def _attend(
    heads: mla.Heads,
    kv: Float[Tensor, "B S RP"],
    w_uv: Any,
    chosen: Int[Tensor, "B T M"],
    cfg: Config,
    *,
    taught: bool = True,
) -> tuple[Float[Tensor, "B T H V"], Any]:
    """Attention to the chosen keys of the heads, or in the absorbed form to latents; and the
    probabilities, ``()`` if not ``taught``.
    """
    scale = cfg.attn.scale
    if isinstance(w_uv, tuple):
        o, lse = sparse_attention(*heads, chosen, scale)
        return o, head_probs(*heads[:3], lse, chosen, scale) if taught else ()
    o, lse = latent_attention(heads.q, kv, chosen, scale, cfg.attn.kv_lora_rank)
    return o, latent_probs(heads.q, kv, lse, chosen, scale) if taught else ()


def _loss(
    index: indexer.IndexerOut,
    probs: Float[Tensor, "B T M"],
    chosen: Int[Tensor, "B T M"],
    cfg: Config,
) -> Float[Tensor, ""]:
    """The indexer's loss, taught by the probabilities summed over all heads."""
    # The teacher has no gradient; stopped here too, it stays in place when gradients are checked.
    teacher = stop_gradient(probs / cfg.attn.num_heads)
    return indexer_kl(index.q, index.k, index.w, teacher, chosen, cfg.indexer.scale)


def _attend_to_all(
    heads: mla.Heads,
    index: indexer.IndexerOut,
    start: Int[Tensor, "B T"],
    stop: Int[Tensor, "B T"],
    cfg: Config,
    sh: Sharding,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, ""]]:
    """Attention to all visible keys, and the loss, in tiles of queries: the sets and probabilities
    of all are T x T.

    A tile takes equally many of each rank's own queries, so that one psum_scatter leaves each rank
    the teacher of its own: dim 1 is the place among a rank's tokens, dim 2 the rank.
    """
    ranks = axis_size(sh.sequence)

    # Arguments one by one, without a closure: what a tile reads is to get its gradient, and a tile
    # is made again in the backward.
    def tile(
        q: Tensor,
        start: Tensor,
        stop: Tensor,
        iq: Tensor,
        w: Tensor,
        k: Tensor,
        kr: Tensor,
        v: Tensor,
        ik: Tensor,
    ) -> tuple[Tensor, Tensor]:
        # The same ops as in the sparse stage, with all visible keys for the set: they are what
        # gives the probabilities.
        seen = visible_keys(start[..., None], stop[..., None], ik.shape[1])
        chosen = torch.where(seen, torch.arange(ik.shape[1], device=ik.device), -1)
        rows = rearrange(q, "b t rank h k -> b (t rank) h k")
        sets = rearrange(chosen, "b t rank m -> b (t rank) m")
        o, lse = sparse_attention(rows, k, kr, v, sets, cfg.attn.scale)
        probs = head_probs(rows, k, kr, lse, sets, cfg.attn.scale)
        probs = rearrange(probs, "b (t rank) m -> b t rank m", rank=ranks)
        teacher = psum_scatter(probs, sh.heads, 2).squeeze(2)
        local_chosen = pslice(chosen, sh.sequence, 2).squeeze(2)
        kl = _loss(indexer.IndexerOut(iq, ik, w), teacher, local_chosen, cfg)
        return rearrange(o, "b (t rank) h v -> b t rank h v", rank=ranks), kl

    by_rank = [
        rearrange(t, "b (rank t) ... -> b t rank ...", rank=ranks) for t in (heads.q, start, stop)
    ]
    queries = (*by_rank, index.q, index.w)
    keys = (heads.k, heads.kr, heads.v, index.k)
    # Scores of a query and a key that live at once: those of the heads, or of the indexer.
    width = start.shape[0] * max(ranks * heads.q.shape[2], index.w.shape[-1])
    # A fused operator holds none, and takes as long for few queries as for many.
    chosen_by = sparse_attention.chosen(*heads, start, cfg.attn.scale)
    holds_scores = chosen_by in ("reference", "absorbed")
    size = 0 if holds_scores else max(1, _FUSED_TILE // ranks)
    tiles = map_query_tiles(tile, queries, keys, width=width, dim=1, tile=size)
    o = torch.cat([o for o, _ in tiles], dim=1)
    o = rearrange(o, "b t rank h v -> b (rank t) h v")
    return o, torch.stack([kl for _, kl in tiles]).sum()


def _flops(cfg: Config, length: int) -> Flops:
    """Attention to the chosen keys, and index scores ``2 H_I K_I`` of all that are visible."""
    index = cfg.indexer
    # The indexer scores every visible key, to find those that are then attended to.
    visible = mean_keys(length, length)
    attended = mean_keys(length, cfg.topk if cfg.stage == "sparse" else length)
    return Flops(
        mixing=mla.score_flops(cfg.attn, attended),
        indexer=2.0 * index.num_heads * index.head_dim * visible,
    )


def _reports(cfg: Config) -> frozenset[str]:
    return frozenset({"kl", "logits"} if cfg.attn.report_logits else {"kl"})


def _logit_scales(cfg: Config, factor: Float[Tensor, "H"]) -> dict[str, Tensor]:
    scales = mla.logit_scales(cfg.attn, factor)
    return {f"attn.{path}": columns for path, columns in scales.items()}


KIND = TokenMixer(
    name="dsa",
    label="DSA",
    config=Config,
    specs=specs,
    apply=apply,
    init_state=init_state,
    extend=extend,
    parts=((r"indexer\..*", "indexer"), (".*", "full attention")),
    flops=_flops,
    tensor_parallel=lambda cfg: {"attn.num_heads": cfg.attn.num_heads},
    splits=frozenset({"tp", "cp"}),
    reports=_reports,
    with_logits=lambda cfg: replace(cfg, attn=replace(cfg.attn, report_logits=True)),
    logit_scales=_logit_scales,
    with_stage=lambda cfg, stage: replace(cfg, stage=stage),
)
