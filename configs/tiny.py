"""A K3.1 small enough for one CPU core: 1.26M parameters, bytes as tokens, every kind of layer once
at least.
"""

from k31fn import data
from k31fn import model as text
from k31fn.config import Optimizer, Recipe
from k31fn.layers import attn_res, dsa, indexer, kda, latent_moe, mla, mlp


def model() -> text.Config:
    """Three KDA layers and one of Gated DSA. Tokens are the 256 bytes and an end token, padded to a
    multiple of 8.

    The indexer chooses 64 keys: sequences of 256 tokens are sparse.
    """
    hidden_size = 128
    attention = mla.Config(
        hidden_size=hidden_size,
        num_heads=2,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=64,
        qk_rope_head_dim=16,
        v_head_dim=64,
    )
    return text.Config(
        vocab_size=264,
        hidden_size=hidden_size,
        sublayers=text.Sublayers(
            kda=kda.Config(hidden_size=hidden_size, num_heads=2, head_dim=64),
            full_attention=dsa.Config(
                attention, indexer.Config(hidden_size, 64, num_heads=4, head_dim=32), topk=64
            ),
            dense=mlp.Config(hidden_size, intermediate_size=256),
            moe=latent_moe.Config(
                hidden_size,
                latent_size=64,
                expert_size=96,
                shared_size=192,
                num_experts=8,
                top_k=2,
            ),
        ),
        layers=(("kda", "dense"), ("kda", "moe"), ("kda", "moe"), ("full_attention", "moe")),
        residual=attn_res.Config(block_size=2),
    )


def train() -> Recipe:
    """Python source as bytes: minutes on two cores."""
    return Recipe(
        name="tiny",
        model=model(),
        data=data.Config(path="stdlib"),
        optimizer=Optimizer(kind="muon", peak_lr=5e-3, warmup_steps=20),
        steps=450,
        # Muon's Newton-Schulz costs the same for any batch: with 4 rows it would be a sixth of the
        # step
        batch_size=12,
        length=256,
    )
