"""The text model: embedding, decoder layers, final mix and norm, head.

K3 (Gated MLA) and K3.1 (Gated DSA) are configs of the same code; so are models with plain residuals.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from k31fn import balance as quantile
from k31fn import segments as seg
from k31fn import tree
from k31fn.autodiff import remat as rematerialise
from k31fn.layers import attn_res, block, dsa, embedding, kda, latent_moe, losses, mla, mlp, mtp, norm, plain_residual
from k31fn.layers.linear import linear
from k31fn.layers.router import NUM_BINS
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import ParamSpec, TruncatedNormal
from k31fn.segments import Segments
from k31fn.typing import Float, Int, Leaf

__all__ = [
    "Batch",
    "Config",
    "Losses",
    "Output",
    "Params",
    "State",
    "apply",
    "extend",
    "init_balance",
    "init_state",
    "layer_configs",
    "logits",
    "loss",
    "make_batch",
    "moe_layers",
    "specs",
]

Remat = Literal["none", "layer"]


@dataclass(frozen=True)
class Config:
    """The model.

    Attributes:
        vocab_size: size of the embedding and of the (untied) head.
        hidden_size: width of the residual state.
        num_layers: decoder layers.
        full_attention_layers: 0-based numbers of the layers with ``full_attention``; the others are KDA.
        kda: the linear-attention layers.
        full_attention: Gated MLA (K3) or Gated DSA (K3.1).
        dense: feed-forward of the first ``num_dense_layers`` layers.
        moe: feed-forward of the others.
        residual: AttnRes or plain.
        num_dense_layers: how many layers, from the first, have a dense feed-forward part.
        norm_eps: of the norms before the sublayers and before the head.
        embedding_std: initial embeddings are N(0, embedding_std^2).
        num_mtp_layers: multi-token-prediction layers, 0 or 1.
        mtp_weight: weight of the multi-token-prediction loss.
        indexer_weight: weight of the indexers' KL.
        indexer_reduction: whether the KL is summed or averaged over the full-attention layers.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    full_attention_layers: tuple[int, ...]
    kda: kda.Config
    full_attention: mla.Config | dsa.Config
    dense: mlp.Config
    moe: latent_moe.Config
    residual: attn_res.Config | plain_residual.Config
    num_dense_layers: int = 1
    norm_eps: float = 1e-5
    embedding_std: float = 1.0
    num_mtp_layers: int = 0
    mtp_weight: float = 0.1
    indexer_weight: float = 1.0
    indexer_reduction: Literal["sum", "mean"] = "mean"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.Config.{name}={getattr(self, name)} must be positive; set it to 1 or more")
        for name in ("kda", "full_attention", "dense", "moe"):
            size = getattr(self, name).hidden_size
            if size != self.hidden_size:
                raise ValueError(f"model.Config.{name}.hidden_size={size} must equal hidden_size={self.hidden_size}")
        listed = self.full_attention_layers
        if list(listed) != sorted(set(listed)) or any(not 0 <= i < self.num_layers for i in listed):
            raise ValueError(
                f"model.Config.full_attention_layers={listed} must ascend within 0..{self.num_layers - 1} "
                f"(0-based; num_layers={self.num_layers})"
            )
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(f"model.Config.num_dense_layers={self.num_dense_layers} must be 0..{self.num_layers}")
        if self.num_mtp_layers not in (0, 1):
            raise ValueError(f"model.Config.num_mtp_layers={self.num_mtp_layers} must be 0 or 1")
        if self.indexer_reduction not in ("sum", "mean"):
            raise ValueError(f"model.Config.indexer_reduction={self.indexer_reduction!r} unknown; use 'sum' or 'mean'")


def layer_configs(cfg: Config) -> tuple[block.Config, ...]:
    """The config of every decoder layer, by global layer number."""
    opens = cfg.residual.block_size if isinstance(cfg.residual, attn_res.Config) else cfg.num_layers
    return tuple(
        block.Config(
            attention=cfg.full_attention if i in cfg.full_attention_layers else cfg.kda,
            ffn=cfg.dense if i < cfg.num_dense_layers else cfg.moe,
            residual=cfg.residual,
            opens_block=i % opens == 0,
            norm_eps=cfg.norm_eps,
        )
        for i in range(cfg.num_layers)
    )


def moe_layers(cfg: Config) -> tuple[int, ...]:
    """Global numbers of the MoE layers: the rows of the balance bias. An MTP layer counts as ``num_layers``."""
    return tuple(range(cfg.num_dense_layers, cfg.num_layers + cfg.num_mtp_layers))


@tree.dataclass
class Params(Generic[Leaf]):
    """Parameters of the model; ``mtp`` is ``()`` without such a layer."""

    embedding: embedding.Params[Leaf]
    layers: tuple[block.Params[Leaf], ...]
    final_mix: Any
    final_norm: norm.Params[Leaf]
    head: Leaf
    mtp: Any


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares every parameter of the model. The head is truncated N(0, 1/D), as in the released training code."""
    scheme = block.module_of(cfg.residual)
    return Params(
        embedding=embedding.specs(_embedding(cfg)),
        layers=tuple(block.specs(layer) for layer in layer_configs(cfg)),
        final_mix=scheme.specs_out(cfg.residual, cfg.hidden_size),
        final_norm=norm.specs(norm.Config(cfg.hidden_size, cfg.norm_eps)),
        head=ParamSpec(
            (cfg.hidden_size, cfg.vocab_size),
            ("hidden", "vocab"),
            TruncatedNormal(cfg.hidden_size**-0.5),
        ),
        mtp=mtp.specs(_mtp(cfg)) if cfg.num_mtp_layers else (),
    )


def init_balance(cfg: Config, *, device: torch.device | str | None = None) -> quantile.State:
    """The routers' biases before the first step: zero."""
    return quantile.init(moe_layers(cfg), cfg.moe.num_experts, device=device)


class Output(NamedTuple):
    """What :func:`apply` computes.

    Attributes:
        hidden: ``[B T D]`` after the final norm, before the head.
        residual: ``[B T D]`` after the final mix, before the final norm (input of an MTP layer).
        kl: indexer KL per full-attention layer, summed over valid queries ``[layers]``.
        load: real tokens per expert ``[M E]``, M as in :func:`moe_layers` without the MTP layer.
        histogram: the router's required biases ``[M E bins]``.
    """

    hidden: Float[Tensor, "B T D"]
    residual: Float[Tensor, "B T D"]
    kl: Tensor
    load: Tensor
    histogram: Tensor


def apply(
    params: Params[Tensor],
    tokens: Int[Tensor, "B T"],
    cfg: Config,
    *,
    balance: quantile.State,
    segments: Segments | None = None,
    remat: Remat = "none",
    sh: Sharding = UNSHARDED,
) -> Output:
    """The hidden states of ``tokens``.

    Args:
        params: as :func:`specs` declares.
        tokens: ids below ``vocab_size``, checked where the batch is made.
        cfg: the model's config.
        balance: the routers' biases, from :func:`init_balance` or the step before.
        segments: packed documents; None: one document per row.
        remat: "layer" keeps only each layer's input (and its routes and top-k sets) for the backward.
        sh: sharding.

    Raises:
        ValueError: parameters of another number of layers, a None leaf, segments of another shape than the tokens, a
            bias of another number of experts, an unknown ``remat``.
    """
    _check(params, cfg, tokens, segments, remat)
    scheme = block.module_of(cfg.residual)
    carry = scheme.start(embedding.apply(params.embedding, tokens, _embedding(cfg), sh=sh))
    segments = seg.whole(*tokens.shape, device=tokens.device) if segments is None else segments
    reports = []
    for i, (layer, layer_cfg) in enumerate(zip(params.layers, layer_configs(cfg), strict=True)):
        bias = _bias(balance, i, layer_cfg)
        run = functools.partial(_run_layer, layer_cfg, sh)
        carry, aux = (rematerialise(run) if remat == "layer" else run)(layer, carry, segments, bias)
        reports.append(aux)
    residual = scheme.finish(params.final_mix, carry, cfg.residual)
    hidden = norm.apply(params.final_norm, residual, norm.Config(cfg.hidden_size, cfg.norm_eps))
    return Output(hidden, residual, *_collect(reports, cfg, hidden))


def _check(params: Params[Tensor], cfg: Config, tokens: Tensor, segments: Segments | None, remat: Remat) -> None:
    tree.leaves(params)  # refuses None
    if (given := len(params.layers)) != cfg.num_layers:
        raise ValueError(f"model.Config.num_layers={cfg.num_layers}, but params has {given} layers; use their config")
    if segments is not None:
        seg.check_shape(segments, tokens)
    if remat not in get_args(Remat):
        raise ValueError(f"remat={remat!r} unknown; use 'none' or 'layer'")


def _run_layer(cfg: block.Config, sh: Sharding, params: Any, carry: Any, segments: Segments, bias: Any) -> Any:
    """``block.apply`` with every tensor as an argument, as remat needs it."""
    return block.apply(params, carry, cfg, segments=segments, bias=bias, sh=sh)


def _bias(balance: quantile.State, layer: int, cfg: block.Config) -> Any:
    return quantile.bias_of(balance, layer) if isinstance(cfg.ffn, latent_moe.Config) else ()


def _collect(reports: list[block.Aux], cfg: Config, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The layers' reports stacked; empty where no layer has the part."""
    kl = [r.kl for r in reports if isinstance(r.kl, Tensor)]
    load = [r.load for r in reports if isinstance(r.load, Tensor)]
    histogram = [r.histogram for r in reports if isinstance(r.histogram, Tensor)]
    none = like.new_zeros((0, cfg.moe.num_experts), dtype=torch.int64)
    return (
        torch.stack(kl) if kl else like.new_zeros((0,)),
        torch.stack(load) if load else none,
        torch.stack(histogram) if histogram else none[..., None].expand(-1, -1, NUM_BINS),
    )


def logits(params: Params[Tensor], hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T Z"]:
    """Scores of the vocabulary, for sampling. Training uses :func:`loss`, which never holds them all."""
    return linear(hidden, params.head)


@tree.dataclass
class Batch:
    """One micro-batch.

    Attributes:
        tokens: ids.
        labels: the next token's id, -100 where there is none.
        segments: packed documents.
        num_labels: valid labels of the whole step: over all micro-batches and data and context ranks.
        num_queries: valid (not padding) tokens of the whole step, the KL's denominator.
    """

    tokens: Int[Tensor, "B T"]
    labels: Int[Tensor, "B T"]
    segments: Segments
    num_labels: Int[Tensor, ""]
    num_queries: Int[Tensor, ""]


def make_batch(tokens: Int[Tensor, "B T"], segments: Segments | None = None, *, vocab_size: int) -> Batch:
    """A step of one micro-batch, checked on the host: labels are the next token of the same document.

    Raises:
        ValueError: tokens that are not integers ``[B, T]``, a token outside the vocabulary, segments of another shape,
            or segments that do not ascend or leave a document empty.
    """
    if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens have shape {list(tokens.shape)} and {tokens.dtype}; expected [B, T], int64 or int32")
    embedding.check_tokens(tokens, vocab_size, "tokens")
    if segments is not None:
        seg.check_shape(segments, tokens)
    segments = seg.whole(*tokens.shape, device=tokens.device) if segments is None else seg.from_ids(segments.ids)
    labels = seg.next_token_labels(tokens, segments)
    return Batch(tokens, labels, segments, (labels >= 0).sum(), seg.valid(segments).sum())


class Losses(NamedTuple):
    """The parts of the loss, as plain sums, and what the routers report.

    Attributes:
        lm: summed token cross-entropy.
        mtp: the same of the MTP layer, 0 without one.
        kl: indexer KL per full-attention layer, an MTP layer last, summed over valid queries ``[layers]``.
        load, histogram: as in :class:`Output`, an MTP layer last.
    """

    lm: Tensor
    mtp: Tensor
    kl: Tensor
    load: Tensor
    histogram: Tensor


def loss(
    params: Params[Tensor],
    batch: Batch,
    cfg: Config,
    *,
    balance: quantile.State,
    remat: Remat = "none",
    sh: Sharding = UNSHARDED,
) -> tuple[Tensor, Losses]:
    """The training loss of a micro-batch, already divided by the denominators of the whole step.

    ``CE / num_labels + indexer_weight * reduce_layers(KL) / num_queries + mtp_weight * CE_mtp / num_labels``: the sum
    over micro-batches and ranks is the loss of the step, however the tokens are split. Without valid labels both CE
    are 0; the indexers still learn.
    """
    out = apply(params, batch.tokens, cfg, balance=balance, segments=batch.segments, remat=remat, sh=sh)
    lm = losses.linear_cross_entropy(out.hidden, params.head, batch.labels).total
    parts = Losses(lm, torch.zeros_like(lm), out.kl, out.load, out.histogram)
    if cfg.num_mtp_layers:
        run, bias = functools.partial(_run_mtp, _mtp(cfg), sh), quantile.bias_of(balance, cfg.num_layers)
        arguments = params.mtp, out.residual, batch.tokens, params.embedding, batch.segments, bias
        extra = (rematerialise(run) if remat == "layer" else run)(*arguments)
        parts = Losses(
            lm=lm,
            mtp=losses.linear_cross_entropy(extra.hidden, params.head, mtp.labels(batch.labels)).total,
            kl=torch.cat([out.kl, extra.aux.kl[None]]) if isinstance(extra.aux.kl, Tensor) else out.kl,
            load=torch.cat([out.load, extra.aux.load[None]]),
            histogram=torch.cat([out.histogram, extra.aux.histogram[None]]),
        )
    kl = parts.kl.sum() if cfg.indexer_reduction == "sum" else parts.kl.sum() / max(1, len(parts.kl))
    total = losses.mean(lm, batch.num_labels) + cfg.indexer_weight * losses.mean(kl, batch.num_queries)
    if cfg.num_mtp_layers:
        total = total + cfg.mtp_weight * losses.mean(parts.mtp, batch.num_labels)
    return total, parts


def _run_mtp(
    cfg: mtp.Config, sh: Sharding, params: Any, h: Tensor, tokens: Tensor, embed: Any, segments: Segments, bias: Any
) -> mtp.Output:
    """``mtp.apply`` with every tensor as an argument, as remat needs it."""
    return mtp.apply(params, h, tokens, cfg, embed=embed, segments=segments, bias=bias, sh=sh)


@tree.dataclass
class State:
    """Decoding state: one per layer."""

    layers: tuple[Any, ...]


def init_state(cfg: Config, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None) -> State:
    """The state before the first token of ``batch`` documents."""
    return State(tuple(block.init_state(c, batch, dtype=dtype, device=device) for c in layer_configs(cfg)))


def extend(
    params: Params[Tensor],
    tokens: Int[Tensor, "B T"],
    cfg: Config,
    state: State,
    *,
    balance: quantile.State,
    sh: Sharding = UNSHARDED,
) -> tuple[Float[Tensor, "B T Z"], State]:
    """Logits of the next ``T`` tokens of one document per row, and the new state: prefill and decoding alike.

    Cutting a document anywhere gives the values of the whole.
    """
    _check(params, cfg, tokens, None, "none")
    scheme = block.module_of(cfg.residual)
    carry = scheme.start(embedding.apply(params.embedding, tokens, _embedding(cfg), sh=sh))
    states = []
    parts = zip(params.layers, layer_configs(cfg), state.layers, strict=True)
    for i, (layer, layer_cfg, layer_state) in enumerate(parts):
        carry, new = block.extend(layer, carry, layer_cfg, layer_state, bias=_bias(balance, i, layer_cfg), sh=sh)
        states.append(new)
    residual = scheme.finish(params.final_mix, carry, cfg.residual)
    hidden = norm.apply(params.final_norm, residual, norm.Config(cfg.hidden_size, cfg.norm_eps))
    return logits(params, hidden), State(tuple(states))


def _embedding(cfg: Config) -> embedding.Config:
    return embedding.Config(cfg.vocab_size, cfg.hidden_size, cfg.embedding_std)


def _mtp(cfg: Config) -> mtp.Config:
    return mtp.Config(block.Config(cfg.full_attention, cfg.moe, plain_residual.Config(), norm_eps=cfg.norm_eps))
