"""What a model is: its config and those of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from k31fn.layers import (
    attn_res,
    block,
    dsa,
    embedding,
    kda,
    latent_moe,
    mhc,
    mla,
    mlp,
    mtp,
    norm,
    plain_residual,
    projector,
    vision,
)

__all__ = [
    "Config",
    "embedding_config",
    "final_norm_config",
    "kl_layers",
    "layer_configs",
    "moe_layers",
    "mtp_config",
]


@dataclass(frozen=True)
class Config:
    """The model.

    Attributes:
        vocab_size: size of the embedding and of the (untied) head.
        hidden_size: width of the residual state.
        num_layers: decoder layers.
        full_attention_layers: 0-based numbers of the layers with ``full_attention``; the others are
            KDA.
        kda: the linear-attention layers.
        full_attention: Gated MLA (K3) or Gated DSA (K3.1).
        dense: feed-forward of the first ``num_dense_layers`` layers.
        moe: feed-forward of the others.
        residual: AttnRes, mHC or plain.
        num_dense_layers: how many layers, from the first, have a dense feed-forward part.
        norm_eps: of the norms before the sublayers and before the head.
        embedding_std: initial embeddings are N(0, embedding_std^2).
        num_mtp_layers: multi-token-prediction layers, 0 or 1.
        mtp_weight: weight of the multi-token-prediction loss.
        indexer_weight: weight of the indexers' KL.
        indexer_reduction: whether the KL is summed or averaged over the full-attention layers.
        vision: the tower that sees images; ``()``: a model of text alone.
        projector: from the tower to this model, if it has one.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    full_attention_layers: tuple[int, ...]
    kda: kda.Config
    full_attention: mla.Config | dsa.Config
    dense: mlp.Config
    moe: latent_moe.Config
    residual: attn_res.Config | mhc.Config | plain_residual.Config
    num_dense_layers: int = 1
    norm_eps: float = 1e-5
    embedding_std: float = 1.0
    num_mtp_layers: int = 0
    mtp_weight: float = 0.1
    indexer_weight: float = 1.0
    indexer_reduction: Literal["sum", "mean"] = "mean"
    vision: vision.Config | tuple[()] = ()
    projector: projector.Config | tuple[()] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"model.Config.{name}={getattr(self, name)} must be positive; set it to 1 or "
                    "more"
                )
        for name in ("kda", "full_attention", "dense", "moe"):
            size = getattr(self, name).hidden_size
            if size != self.hidden_size:
                raise ValueError(
                    f"model.Config.{name}.hidden_size={size} must equal "
                    f"hidden_size={self.hidden_size}"
                )
        listed = self.full_attention_layers
        if list(listed) != sorted(set(listed)) or any(not 0 <= i < self.num_layers for i in listed):
            raise ValueError(
                f"model.Config.full_attention_layers={listed} must ascend within "
                f"0..{self.num_layers - 1} "
                f"(0-based; num_layers={self.num_layers})"
            )
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(
                f"model.Config.num_dense_layers={self.num_dense_layers} must be "
                f"0..{self.num_layers}"
            )
        if self.num_mtp_layers not in (0, 1):
            raise ValueError(f"model.Config.num_mtp_layers={self.num_mtp_layers} must be 0 or 1")
        if self.indexer_reduction not in ("sum", "mean"):
            raise ValueError(
                f"model.Config.indexer_reduction={self.indexer_reduction!r} unknown; use 'sum' or "
                "'mean'"
            )
        self._check_vision()

    def _check_vision(self) -> None:
        tower, onto = self.vision, self.projector
        if isinstance(tower, tuple) and isinstance(onto, tuple):
            return
        if isinstance(tower, tuple) or isinstance(onto, tuple):
            there, absent = (
                ("projector", "vision") if isinstance(tower, tuple) else ("vision", "projector")
            )
            raise ValueError(
                f"model.Config.{there} without {absent}: a model that sees images has both; set "
                "both or none"
            )
        for name, size in (("input_size", tower.output_size), ("hidden_size", self.hidden_size)):
            if getattr(onto, name) != size:
                raise ValueError(
                    f"model.Config.projector.{name}={getattr(onto, name)} must be {size}: it "
                    "leads from "
                    f"vision.output_size={tower.output_size} to hidden_size={self.hidden_size}"
                )


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
    """Global numbers of the MoE layers: the rows of the balance bias.

    An MTP layer counts as ``num_layers``.
    """
    return tuple(range(cfg.num_dense_layers, cfg.num_layers + cfg.num_mtp_layers))


def kl_layers(cfg: Config) -> int:
    """How many layers of the whole model report an indexer KL; an MTP layer is one of them."""
    return (
        len(cfg.full_attention_layers) + cfg.num_mtp_layers
        if isinstance(cfg.full_attention, dsa.Config)
        else 0
    )


def embedding_config(cfg: Config) -> embedding.Config:
    """Of the embedding."""
    return embedding.Config(cfg.vocab_size, cfg.hidden_size, cfg.embedding_std)


def final_norm_config(cfg: Config) -> norm.Config:
    """Of the norm before the head."""
    return norm.Config(cfg.hidden_size, cfg.norm_eps)


def mtp_config(cfg: Config) -> mtp.Config:
    """Of the multi-token-prediction layer: full attention and MoE, on a plain residual."""
    return mtp.Config(
        block.Config(cfg.full_attention, cfg.moe, plain_residual.Config(), norm_eps=cfg.norm_eps)
    )
