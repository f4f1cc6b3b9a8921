"""Kimi K3: 93 layers, of which 24 have Gated MLA and the others KDA, and MoonViT-V2 (arXiv
2607.24653).
"""

from k31fn import model as k3
from k31fn.layers import attn_res, kda, latent_moe, mla, mlp, projector, vision, vision_block


def model() -> k3.Config:
    """2,779.93B parameters, 104.19B active; 2,779.48B of them are the text model's."""
    hidden_size = 7168
    mixers = (*("kda", "kda", "kda", "full_attention") * 23, "full_attention")
    ffns = ("dense", *["moe"] * 92)
    tower = vision.Config(
        vision_block.Config(hidden_size=1024, num_heads=12, head_dim=128, intermediate_size=4096),
        num_layers=27,
    )
    return k3.Config(
        vocab_size=163840,
        hidden_size=hidden_size,
        sublayers=k3.Sublayers(
            kda=kda.Config(hidden_size=hidden_size, num_heads=96, head_dim=128),
            full_attention=mla.Config(
                hidden_size=hidden_size,
                num_heads=96,
                q_lora_rank=1536,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
            ),
            dense=mlp.Config(hidden_size, intermediate_size=33792),
            moe=latent_moe.Config(
                hidden_size,
                latent_size=3584,
                expert_size=3072,
                shared_size=2 * 3072,
                num_experts=896,
                top_k=16,
            ),
        ),
        layers=tuple(zip(mixers, ffns, strict=True)),
        residual=attn_res.Config(block_size=12),
        vision=tower,
        projector=projector.Config(tower.output_size, hidden_size),
    )
