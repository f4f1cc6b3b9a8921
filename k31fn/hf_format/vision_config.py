"""``vision_config`` of K3's ``config.json`` and our configs of the tower and the projector, both
ways.
"""

from __future__ import annotations

from typing import Any

from k31fn.hf_format.schema import EPS, LAYERS, WIDTH, Number, as_floats, differs, wrong_fields
from k31fn.layers import projector, vision, vision_block
from k31fn.layers.patches import MERGE

__all__ = ["describe_vision", "vision_from_hf"]

# Fields that choose an equation, with the only value that our layers compute; other readers take
# these where absent.
_FIXED: dict[str, Any] = {
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "merge_kernel_size": [MERGE, MERGE],
    "merge_type": "sd2_tpool",
    "video_attn_type": "spatial_temporal",
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
}
_NUMBERS = {
    "patch_size": Number(1, 1 << 12),
    "init_pos_emb_height": Number(1, 1 << 14),
    "init_pos_emb_width": Number(1, 1 << 14),
    "init_pos_emb_time": Number(1, 1 << 14),
    "vt_num_attention_heads": WIDTH,
    "vt_num_hidden_layers": Number(1, LAYERS),
    "vt_hidden_size": WIDTH,
    "vt_intermediate_size": WIDTH,
    "qkv_hidden_size": WIDTH,
    "projector_ln_eps": EPS,
}
# Ours: K3's file does not say, its code fixes both.
_ROPE = "rope_theta"
_NORM_EPS = "norm_eps"
_OPTIONAL = {_ROPE: Number(1, 1e12, whole=False), _NORM_EPS: EPS}


def vision_from_hf(
    given: dict[str, Any], hidden_size: int
) -> tuple[vision.Config, projector.Config]:
    """The tower and the projector into a text model of ``hidden_size``.

    Raises:
        ValueError: missing fields, or values that would need other equations than ours; all listed.
    """
    problems = [f"{name} is missing" for name in _NUMBERS if name not in given]
    for name, only in _FIXED.items():
        value = given.get(name, only)
        # A tuple, if the dict did not come out of JSON.
        if differs(list(value) if isinstance(value, tuple) else value, only):
            problems.append(f"{name}={value!r} must be {only!r}")
    problems += wrong_fields(given, _NUMBERS | _OPTIONAL)
    width = given.get("vt_hidden_size", 0)
    # Sizes that follow from others; null stands for "as it follows".
    for name, only in (("mm_hidden_size", width), ("text_hidden_size", hidden_size)):
        if given.get(name, only) not in (only, None):
            problems.append(f"{name}={given[name]!r} must be {only}")
    qkv_size = given.get("qkv_hidden_size", 0)
    heads = given.get("vt_num_attention_heads", 1)
    if not problems and qkv_size % heads:
        problems.append(
            f"vt_num_attention_heads={heads!r} must divide qkv_hidden_size={qkv_size!r}"
        )
    if problems:
        raise ValueError(
            f"vision_config does not describe a tower that k31fn has: {'; '.join(problems)}"
        )
    given = as_floats(given, _NUMBERS | _OPTIONAL)
    # Our fields have the names that we write; where they are absent our defaults are K3's.
    optional = {name: given[name] for name in (_ROPE, _NORM_EPS) if name in given}
    block = vision_block.Config(
        width, heads, qkv_size // heads, given["vt_intermediate_size"], **optional
    )
    tower = vision.Config(
        block,
        given["vt_num_hidden_layers"],
        patch_size=given["patch_size"],
        table_size=(given["init_pos_emb_height"], given["init_pos_emb_width"]),
        num_frames=given["init_pos_emb_time"],
    )
    return tower, projector.Config(
        tower.output_size, hidden_size, norm_eps=given["projector_ln_eps"]
    )


def describe_vision(tower: vision.Config, onto: projector.Config) -> dict[str, Any]:
    """The ``vision_config`` of a tower and a projector.

    Raises:
        ValueError: what K3's format cannot say: another number of channels.
    """
    if tower.num_channels != 3:
        raise ValueError(
            f"K3's config.json cannot say: vision.num_channels={tower.num_channels}; it means RGB"
        )
    block = tower.block
    return {
        "model_type": "kimi_k3_vision",
        **_FIXED,
        "patch_size": tower.patch_size,
        "init_pos_emb_height": tower.table_size[0],
        "init_pos_emb_width": tower.table_size[1],
        "init_pos_emb_time": tower.num_frames,
        "vt_num_attention_heads": block.num_heads,
        "vt_num_hidden_layers": tower.num_layers,
        "vt_hidden_size": block.hidden_size,
        "vt_intermediate_size": block.intermediate_size,
        "qkv_hidden_size": block.num_heads * block.head_dim,
        "mm_hidden_size": block.hidden_size,
        "projector_ln_eps": onto.norm_eps,
        "text_hidden_size": onto.hidden_size,
        _ROPE: block.rope_theta,
        _NORM_EPS: block.norm_eps,
    }
