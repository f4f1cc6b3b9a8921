"""The training loss, as plain sums over tokens that the denominators of the whole step divide."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from k31fn import balance as quantile
from k31fn import segments as seg
from k31fn import tree
from k31fn.layers import embedding, losses, mtp
from k31fn.layers.patches import Images
from k31fn.model.config import Config, kl_layers, mtp_config
from k31fn.model.forward import apply
from k31fn.model.layers import Remat, Reports, bias_of, collect, recomputed
from k31fn.model.params import Params, whole
from k31fn.parallel.fsdp.placement import Placements, gather
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.segments import Segments
from k31fn.typing import Float, Int

__all__ = ["Batch", "Losses", "lm_loss", "loss", "make_batch", "weigh"]


@tree.dataclass
class Batch:
    """One micro-batch.

    Attributes:
        tokens: ids.
        labels: the next token's id, -100 where there is none.
        segments: packed documents.
        num_labels: valid labels of the whole step: over all micro-batches and data and context
            ranks.
        num_queries: valid (not padding) tokens of the whole step, the KL's denominator.
        images: of the rows (:class:`k31fn.layers.patches.Images`); ``()``: a batch of text, on all
            ranks.
    """

    tokens: Int[Tensor, "B T"]
    labels: Int[Tensor, "B T"]
    segments: Segments
    num_labels: Int[Tensor, ""]
    num_queries: Int[Tensor, ""]
    images: Any = ()


def make_batch(
    tokens: Int[Tensor, "B T"],
    segments: Segments | None = None,
    *,
    vocab_size: int,
    images: Images | tuple[()] = (),
) -> Batch:
    """A step of one micro-batch, checked on the host: labels are the next token of the same
    document.

    A token that stands for a part of an image is no label.

    Raises:
        ValueError: tokens that are not integers ``[B, T]``, a token outside the vocabulary,
            segments of another shape, or segments that do not ascend or leave a document empty.
    """
    if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"tokens have shape {list(tokens.shape)} and {tokens.dtype}; expected [B, T], int64 "
            "or int32"
        )
    # On the host, where the batch is made: on a device it would be a wait in every step, and the
    # lookup of an id beyond the table a crash without a name.
    embedding.check_tokens(tokens, vocab_size, "tokens")
    if segments is not None:
        seg.check_shape(segments, tokens)
    segments = (
        seg.whole(*tokens.shape, device=tokens.device)
        if segments is None
        else seg.from_ids(segments.ids)
    )
    labels = seg.next_token_labels(tokens, segments)
    if not isinstance(images, tuple):
        # A label is the next token: the slot that counts is the next token's, too.
        next_slot = F.pad(images.slots[:, 1:], (0, 1), value=-1)
        labels = labels.masked_fill(next_slot >= 0, losses.IGNORED)
    return Batch(tokens, labels, segments, (labels >= 0).sum(), seg.valid(segments).sum(), images)


class Losses(NamedTuple):
    """The parts of the loss, as plain sums, and what the routers report.

    Attributes:
        lm: summed token cross-entropy.
        mtp: the same of the MTP layer, 0 without one.
        kl: indexer KL per layer with one, an MTP layer last, summed over valid queries
            ``[layers]``.
        load, histogram: as in :class:`Output`, an MTP layer last.
        logits: as in :class:`Output`, an MTP layer last; no sum: of micro-batches the largest
            counts.
        placement: as in :class:`Output`, an MTP layer last.
    """

    lm: Tensor
    mtp: Tensor
    kl: Tensor
    load: Tensor
    histogram: Tensor
    logits: Any = ()
    placement: Any = ()


def loss(
    params: Params[Tensor],
    batch: Batch,
    cfg: Config,
    *,
    balance: quantile.State,
    remat: Remat = "none",
    placements: Placements = (),
    sh: Sharding = UNSHARDED,
) -> tuple[Tensor, Losses]:
    """The training loss of a micro-batch, already divided by the denominators of the whole step.

    ``CE / num_labels + indexer_weight * reduce_layers(KL) / num_queries + mtp_weight * CE_mtp /
    num_labels``: the sum over micro-batches and ranks is the loss of the step, however the tokens
    are split. Without valid labels both CE are 0; the indexers still learn.

    On a mesh all this is of the rank's rows and its slice of the context: equal over
    ``sh.sequence``, to be summed over the data axes.
    """
    how: Any = {"placements": placements, "sh": sh}
    seen: Any = {"segments": batch.segments, "images": batch.images}
    out = apply(params, batch.tokens, cfg, balance=balance, remat=remat, **seen, **how)
    lm = lm_loss(params, out.hidden, batch.labels, **how)
    reports = Reports(out.kl, out.load, out.histogram, out.logits, out.placement)
    second = torch.zeros_like(lm)
    if cfg.num_mtp_layers:
        # Behind the trunk: its gradient flows into the trunk's last state too.
        second, more = _mtp_loss(
            params, out.residual, batch, cfg, balance=balance, remat=remat, **how
        )
        reports = _join(reports, more)
    parts = Losses(lm, second, *reports)
    return weigh(parts, batch, cfg), parts


def lm_loss(
    params: Params[Tensor],
    hidden: Float[Tensor, "B T D"],
    labels: Int[Tensor, "B S"],
    *,
    placements: Placements = (),
    sh: Sharding = UNSHARDED,
) -> Float[Tensor, ""]:
    """Summed token cross-entropy of the head on ``hidden``."""
    return losses.linear_cross_entropy(
        hidden, whole(params, "head", placements), labels, sh=sh
    ).total


def _mtp_loss(
    params: Params[Tensor],
    residual: Float[Tensor, "B T D"],
    batch: Batch,
    cfg: Config,
    *,
    balance: quantile.State,
    remat: Remat = "none",
    placements: Placements = (),
    sh: Sharding = UNSHARDED,
) -> tuple[Float[Tensor, ""], Reports]:
    """Summed cross-entropy of the multi-token-prediction layer, and what that layer reports.

    It needs the parameters ``mtp``, ``embedding`` and ``head``. Of the next token it reads the
    embedding, also where that is a placeholder.
    """
    places = (placements.mtp, placements.embedding) if placements else ()
    bias = bias_of(balance, cfg.num_layers, mtp_config(cfg).layer)
    weights = (params.mtp, params.embedding)
    # One layer by itself has no next one to gather for; remat gathers it again for its backward.
    run = recomputed(functools.partial(_run_mtp, cfg, places, sh), remat)
    out = run(weights, residual, batch.tokens, batch.segments, bias)
    labels = mtp.labels(batch.labels, context=sh.context)
    total = lm_loss(params, out.hidden, labels, placements=placements, sh=sh)
    return total, collect([out.aux], cfg, batch.segments, residual.dtype, sh)


def _run_mtp(
    cfg: Config,
    placements: Placements,
    sh: Sharding,
    params: Any,
    residual: Tensor,
    tokens: Tensor,
    segments: Segments,
    bias: Any,
) -> mtp.Output:
    """``mtp.apply`` with every tensor as an argument, as remat needs it; its weights are gathered
    inside.
    """
    layer, embed = gather(params, placements) if placements else params
    return mtp.apply(
        layer, residual, tokens, mtp_config(cfg), embed=embed, segments=segments, bias=bias, sh=sh
    )


def weigh(parts: Losses, batch: Batch, cfg: Config) -> Float[Tensor, ""]:
    """The loss of these parts, divided by the denominators of the whole step.

    It is linear in them: what the stages of a pipeline make of their own parts, with 0 for the
    absent ones, adds up to the loss of the model.
    """
    kl = parts.kl.sum()
    # By the layers of the whole model, also in a stage that has few of them.
    if cfg.indexer_reduction == "mean":
        kl = kl / max(1, kl_layers(cfg))
    # Denominators come from the batch, counted over all ranks and micro-batches before the forward:
    # the mean of means would weigh short rows more.
    lm = losses.mean(parts.lm, batch.num_labels)
    total = lm + cfg.indexer_weight * losses.mean(kl, batch.num_queries)
    if cfg.num_mtp_layers:
        total = total + cfg.mtp_weight * losses.mean(parts.mtp, batch.num_labels)
    return total


def _join(*reports: Reports) -> Reports:
    """The reports of layers that follow one another."""
    joined = []
    for parts in zip(*reports, strict=True):
        reported = [part for part in parts if isinstance(part, Tensor)]
        joined.append(torch.cat(reported) if reported else ())
    return Reports(*joined)
