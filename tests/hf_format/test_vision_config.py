from __future__ import annotations

from typing import Any

import pytest
import torch

from k31fn.hf_format.vision_config import describe_vision, vision_from_hf
from k31fn.layers import projector, vision, vision_block

# vision_config of the released K3, without what says nothing about the equations
PUBLISHED: dict[str, Any] = {
    **{
        "patch_size": 14,
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "init_pos_emb_time": 4,
    },
    **{"pos_emb_type": "divided_fixed", "vt_num_attention_heads": 12, "vt_num_hidden_layers": 27},
    **{"vt_hidden_size": 1024, "vt_intermediate_size": 4096, "merge_kernel_size": (2, 2)},
    **{
        "video_attn_type": "spatial_temporal",
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmergerv2",
    },
    **{
        "mm_hidden_size": None,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "qkv_hidden_size": 1536,
    },
    **{
        "norm_type": "rmsnorm",
        "attn_bias": False,
        "patch_embed_proj_bias": False,
        "mlp_type": "mlp2",
    },
    **{
        "linear_bias": False,
        "activation_func": "gelu_pytorch_tanh",
        "pos_emb_interpolation_mode": "bilinear",
    },
    "text_hidden_size": 7168,
}


def test_the_published_config():
    tower, onto = vision_from_hf(PUBLISHED, 7168)
    assert tower == vision.Config(vision_block.Config(1024, 12, 128, 4096), 27)
    assert onto == projector.Config(4096, 7168)
    assert (tower.block.rope_theta, tower.block.norm_eps) == (
        10000.0,
        torch.finfo(torch.float32).eps,
    )


def test_there_and_back():
    for tower in (
        vision.Config(vision_block.Config(1024, 12, 128, 4096), 27),
        vision.Config(vision_block.Config(8, 2, 4, 12, 500.0, 1e-3), 2, 7, 3, (3, 5), 2),
    ):
        onto = projector.Config(tower.output_size, 6, norm_eps=1e-4)
        assert vision_from_hf(describe_vision(tower, onto), 6) == (tower, onto)
    with pytest.raises(ValueError, match=r"cannot say: vision\.num_channels=1"):
        describe_vision(
            vision.Config(vision_block.Config(8, 2, 4, 12), 1, num_channels=1),
            projector.Config(32, 6),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_type": "layernorm"}, "norm_type='layernorm' must be 'rmsnorm'"),
        ({"pos_emb_interpolation_mode": "bicubic"}, "must be 'bilinear'"),
        (
            {"attn_bias": True, "merge_type": "x"},
            "merge_type='x' must be.*attn_bias=True must be False",
        ),
        ({"merge_kernel_size": [4, 4]}, r"merge_kernel_size=\[4, 4\] must be \[2, 2\]"),
        (
            {"vt_num_attention_heads": 7},
            "vt_num_attention_heads=7 must divide qkv_hidden_size=1536",
        ),
        ({"text_hidden_size": 2304}, "text_hidden_size=2304 must be 7168"),
        ({"mm_hidden_size": 512}, "mm_hidden_size=512 must be 1024"),
        ({"patch_size": 14.0}, r"patch_size=14\.0 must be a number without a fraction"),
        ({"vt_num_hidden_layers": 10**9}, "vt_num_hidden_layers=1000000000 must be"),
        ({"vt_num_attention_heads": None}, "vt_num_attention_heads=None must be a number"),
        ({"qkv_hidden_size": "1536"}, "qkv_hidden_size='1536' must be a number"),
        ({"projector_ln_eps": float("nan")}, "projector_ln_eps=nan must be a number, from"),
        ({"rope_theta": "x"}, "rope_theta='x' must be a number"),
        ({"attn_bias": 0}, "attn_bias=0 must be False"),
    ],
)
def test_other_equations_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        vision_from_hf(PUBLISHED | change, 7168)


def test_missing_fields_are_listed():
    with pytest.raises(ValueError, match="patch_size is missing; init_pos_emb_height is missing"):
        vision_from_hf({}, 7168)
