"""A small K3.1 with every kind of layer, for tests of the whole model."""

import dataclasses
from typing import Any

import torch

from k31fn import model, params, random
from k31fn.layers import (
    attn_res,
    dsa,
    indexer,
    kda,
    latent_moe,
    mla,
    mlp,
    projector,
    vision,
    vision_block,
)

D = 16


def config(**changes: Any) -> model.Config:
    """KDA, DSA, KDA, DSA; AttnRes blocks of two; all but the first MoE; a top-k smaller than the
    documents.
    """
    attention = mla.Config(
        D, 2, q_lora_rank=8, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4
    )
    base = model.Config(
        vocab_size=19,
        hidden_size=D,
        sublayers=model.Sublayers(
            kda=kda.Config(D, num_heads=2, head_dim=4),
            full_attention=dsa.Config(
                attention, indexer.Config(D, 8, num_heads=2, head_dim=4), topk=4
            ),
            dense=mlp.Config(D, 24),
            moe=latent_moe.Config(
                D, latent_size=8, expert_size=6, shared_size=10, num_experts=5, top_k=2
            ),
        ),
        layers=k3_layers(4, (1, 3)),
        residual=attn_res.Config(block_size=2, query_std=0.1),
    )
    return replace(base, **changes)


def k3_layers(
    num_layers: int, full: tuple[int, ...], num_dense: int = 1
) -> tuple[tuple[str, str], ...]:
    """Names of layers as K3 has them: full attention at these numbers, dense ones first."""
    return tuple(
        ("full_attention" if i in full else "kda", "dense" if i < num_dense else "moe")
        for i in range(num_layers)
    )


def replace(cfg: model.Config, **changes: Any) -> model.Config:
    """``dataclasses.replace`` that also takes sublayers by name, and of a model with K3's layers
    how many there are, which have full attention, how many are dense, and of the MTP layer.
    """
    full = tuple(i for i, (mixer, _) in enumerate(cfg.layers) if mixer == "full_attention")
    dense = sum(ffn == "dense" for _, ffn in cfg.layers)
    counts = {
        "num_layers": cfg.num_layers,
        "full_attention_layers": full,
        "num_dense_layers": dense,
    }
    if counts.keys() & changes.keys():
        given = [changes.pop(name, value) for name, value in counts.items()]
        changes["layers"] = k3_layers(*given)
    if "num_mtp_layers" in changes:
        changes["mtp"] = ("full_attention", "moe") * changes.pop("num_mtp_layers")
    named = {name: changes.pop(name) for name in cfg.sublayers if name in changes}
    if named:
        changes["sublayers"] = model.Sublayers(**{**cfg.sublayers, **named})
    return dataclasses.replace(cfg, **changes)


def with_vision(**changes: Any) -> model.Config:
    """The same with a tower for patches of 2 x 2 pixels."""
    block = vision_block.Config(
        hidden_size=8, num_heads=2, head_dim=4, intermediate_size=12, init_std=0.5
    )
    tower = vision.Config(block, num_layers=2, patch_size=2, table_size=(3, 5))
    return config(vision=tower, projector=projector.Config(tower.output_size, D), **changes)


def weights(
    cfg: model.Config, dtype: torch.dtype = torch.float64, seed: int = 0
) -> model.Params[torch.Tensor]:
    """Initial values, ten times as large as for training where they are small, so that no part is
    nearly absent.
    """
    drawn = params.init(model.specs(cfg), random.key(seed), dtype=dtype)
    return params.tree.map(lambda w: w * 10 if w.ndim > 1 and float(w.std()) < 0.05 else w, drawn)


def tokens(batch: int, length: int, seed: int = 1, vocab_size: int = 19) -> torch.Tensor:
    """Random token ids."""
    return random.bits(random.key(seed), (batch, length)) % vocab_size
