"""K3's ``config.json`` and our :class:`k31fn.model.Config`, both ways.

``dsa_config`` marks a K3.1 model. Its inner names have not been published: those written here are
DeepSeek-V3.2's, and any other name is refused. Layer lists in the file count from 1.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from k31fn import model, strict_json
from k31fn.hf_format import mxfp4
from k31fn.hf_format.k3_names import block_size, with_k3_names
from k31fn.hf_format.schema import DSA, EPS, LINEAR, TEXT, Number, as_floats, differs, wrong_fields
from k31fn.hf_format.vision_config import describe_vision, vision_from_hf
from k31fn.layers import (
    attn_res,
    dsa,
    indexer,
    kda,
    kinds,
    latent_moe,
    mla,
    mlp,
    plain_residual,
)

__all__ = ["FILE", "config_from_hf", "describe"]

FILE = "config.json"

# Fields that choose an equation, with the only value that our layers compute. These must be there:
# other readers take another default.
_STATED = {
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "latent_moe_use_norm": True,
    "linear_attn_config.use_full_rank_gate": True,
}
# These may be absent: every reader takes the value that we compute.
_ASSUMED = {
    "topk_method": "noaux_tc",
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_scaling": None,
}
_LINEAR_LISTS = ("kda_layers", "full_attn_layers")
_DSA_LISTS = ("full_attn_layers",)
_FULL_RANK = "use_full_rank_gate"
_MOST_EXPERTS = 4_000_000  # of all layers
_LATENT_EPS = "latent_norm_eps"  # ours: K3's file does not say, and its readers differ (1e-6, 1e-5)

_OPTIONAL = {_LATENT_EPS: EPS, "initializer_range": Number(0, 1e3, whole=False)}

# Fields of our configs that a checkpoint need not keep: how it was, or will be, trained. They are
# left out when an export is compared with what it would be read back as.
_TRAINING = {
    "init_std",
    "embedding_std",
    "query_std",
    "conv_init",
    "A_log_init",
    "dt_bias_init",
    "balanced",
    "stage",
    "mtp_weight",
    "indexer_weight",
    "indexer_reduction",
    "qat",
    "placement",
    "slots",
    "bias_step",
}


def config_from_hf(directory: str | Path) -> model.Config:
    """The model that ``config.json`` describes; without a ``vision_config`` it is one of text
    alone.

    Raises:
        ValueError: missing fields, or values that would need other equations than ours; all listed.
    """
    file = Path(directory) / FILE
    return _parse(strict_json.load_object(file), str(file))


def describe(cfg: model.Config, dtype: torch.dtype, *, quantised: bool = False) -> dict[str, Any]:
    """The ``config.json`` of a checkpoint of ``cfg`` whose weights have this dtype, its routed
    experts MXFP4 or not.

    Raises:
        ValueError: a field of ``cfg`` that matters to the result of the model and that K3's format
            cannot hold.
    """
    cfg = with_k3_names(cfg)
    text = _text_config(cfg)
    parts = {"text_config": text}
    if not isinstance(cfg.vision, tuple) and not isinstance(cfg.projector, tuple):
        parts["vision_config"] = describe_vision(cfg.vision, cfg.projector)
    # Read back by the same code that imports: a field that is ever added to a config is either
    # written above or refused here.
    read_back = _parse(parts, "the export")
    lost: list[str] = []
    for (path, ours), (_, theirs) in zip(_flat(cfg), _flat(read_back), strict=True):
        if ours != theirs:
            lost.append(f"{path}={ours!r}, read back as {theirs!r}")
    if lost:
        raise ValueError(
            f"K3's config.json cannot say: {'; '.join(lost)}; such a model cannot be exported"
        )
    sparse = "dsa_config" in text
    # Only now: it says how weights are stored, which `_parse` has no use for.
    if quantised:
        text["quantization_config"] = mxfp4.CONFIG
    family = "KimiK31" if sparse else "KimiK3"
    return {
        "architectures": [f"{family}ForConditionalGeneration"],
        "model_type": "kimi_k31" if sparse else "kimi_k3",
        "tie_word_embeddings": False,
        **parts,
        "text_config": {**text, "torch_dtype": str(dtype).removeprefix("torch.")},
    }


def _text_config(cfg: model.Config) -> dict[str, Any]:
    linear_cfg, dense, moe = (cfg.sublayers[name] for name in ("kda", "dense", "moe"))
    full_cfg = cfg.sublayers["full_attention"]
    sparse = kinds.kind_of(full_cfg) is dsa.KIND
    attention: mla.Config = full_cfg.attn if sparse else full_cfg
    mixers, ffns = zip(*cfg.layers, strict=True)
    # the file counts from 1
    full = [number for number, mixer in enumerate(mixers, start=1) if mixer == "full_attention"]
    linear = {
        "head_dim": linear_cfg.head_dim,
        "num_heads": linear_cfg.num_heads,
        "short_conv_kernel_size": linear_cfg.conv_width,
        "kda_layers": [i for i in range(1, cfg.num_layers + 1) if i not in full],
        "full_attn_layers": full,
        "gate_lower_bound": linear_cfg.gate_lower_bound,
    }
    stated = {name: value for name, value in (_STATED | _ASSUMED).items() if "." not in name}
    text = {
        "model_type": "kimi_linear",  # the release's name of the text model, also of K3's
        **stated,
        "use_grouped_topk": True,  # over one group: plain top-k
        "initializer_range": moe.init_std,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": dense.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads,
        "rms_norm_eps": cfg.norm_eps,
        "moe_intermediate_size": moe.expert_size,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.top_k,
        # The release counts shared experts; ours is one of their joint size.
        "num_shared_experts": moe.shared_size // moe.expert_size,
        "routed_scaling_factor": moe.scale,
        "first_k_dense_replace": ffns.count("dense"),
        "routed_expert_hidden_size": moe.latent_size,
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "attn_res_block_size": block_size(cfg),
        "activation_situ_beta": dense.beta,
        "activation_situ_linear_beta": dense.linear_beta,
        _LATENT_EPS: attention.latent_norm_eps,
        "linear_attn_config": {**linear, "use_full_rank_gate": True},
    }
    if sparse:
        index = full_cfg.indexer
        text["dsa_config"] = {
            "index_n_heads": index.num_heads,
            "index_head_dim": index.head_dim,
            "index_topk": full_cfg.topk,
            "full_attn_layers": full,
        }
    return text


def _parse(parts: dict[str, Any], file: str) -> model.Config:
    text = parts.get("text_config")
    vision = parts.get("vision_config")
    if not isinstance(text, dict):
        raise ValueError(
            f"{file} has no text_config: it is not the config of a K3 or K3.1 checkpoint"
        )
    try:
        cfg = _parse_text(text)
    except ValueError as e:  # of the fields here, or of our own configs, which know no file
        raise ValueError(f"{file}: {e}") from e
    if vision is None:
        return cfg
    if not isinstance(vision, dict):
        raise ValueError(f"{file}: vision_config={repr(vision)[:60]} must be an object, or null")
    try:
        tower, onto = vision_from_hf(vision, cfg.hidden_size)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e
    return dataclasses.replace(cfg, vision=tower, projector=onto)


def _parse_text(text: dict[str, Any]) -> model.Config:
    linear = text.get("linear_attn_config")
    if not isinstance(linear, dict):
        linear = {}  # whose fields are then reported as missing
    problems = _check(text, linear)
    if problems:
        raise ValueError(
            f"text_config does not describe a model that k31fn has: {'; '.join(problems)}"
        )
    text = as_floats(text, TEXT | _OPTIONAL)
    linear = as_floats(linear, LINEAR)
    size = text["hidden_size"]
    eps = text["rms_norm_eps"]
    std = text.get("initializer_range", 0.02)
    situ = {
        "beta": text["activation_situ_beta"],
        "linear_beta": text["activation_situ_linear_beta"],
    }
    blocks = text["attn_res_block_size"]
    sublayers = model.Sublayers(
        kda=kda.Config(
            hidden_size=size,
            num_heads=linear["num_heads"],
            head_dim=linear["head_dim"],
            conv_width=linear["short_conv_kernel_size"],
            gate_lower_bound=linear["gate_lower_bound"],
            norm_eps=eps,
            init_std=std,
        ),
        full_attention=_full_attention(text, std),
        dense=mlp.Config(size, text["intermediate_size"], init_std=std, **situ),
        moe=latent_moe.Config(
            size,
            latent_size=text["routed_expert_hidden_size"],
            expert_size=text["moe_intermediate_size"],
            shared_size=text["num_shared_experts"] * text["moe_intermediate_size"],
            num_experts=text["num_experts"],
            top_k=text["num_experts_per_token"],
            scale=text["routed_scaling_factor"],
            norm_eps=eps,
            init_std=std,
            **situ,
        ),
    )
    layers = []
    full = set(linear["full_attn_layers"])
    for number in range(1, text["num_hidden_layers"] + 1):
        mixer = "full_attention" if number in full else "kda"
        layers.append((mixer, "dense" if number <= text["first_k_dense_replace"] else "moe"))
    return model.Config(
        vocab_size=text["vocab_size"],
        hidden_size=size,
        sublayers=sublayers,
        layers=tuple(layers),
        residual=plain_residual.Config() if blocks is None else attn_res.Config(blocks, eps=eps),
        norm_eps=eps,
    )


def _full_attention(text: dict[str, Any], std: float) -> mla.Config | dsa.Config:
    attention = mla.Config(
        hidden_size=text["hidden_size"],
        num_heads=text["num_attention_heads"],
        q_lora_rank=text["q_lora_rank"],
        kv_lora_rank=text["kv_lora_rank"],
        qk_nope_head_dim=text["qk_nope_head_dim"],
        qk_rope_head_dim=text["qk_rope_head_dim"],
        v_head_dim=text["v_head_dim"],
        latent_norm_eps=text.get(_LATENT_EPS, 1e-6),
        init_std=std,
    )
    sparse = text.get("dsa_config")
    if sparse is None:
        return attention
    index = indexer.Config(
        attention.hidden_size,
        attention.q_lora_rank,
        sparse["index_n_heads"],
        sparse["index_head_dim"],
        norm_eps=text["rms_norm_eps"],
        init_std=std,
    )
    return dsa.Config(attention, index, topk=sparse["index_topk"])


def _check(text: dict[str, Any], linear: dict[str, Any]) -> list[str]:
    """What keeps the file from being read, all of it."""
    values = dict(text)
    for name, value in linear.items():
        values[f"linear_attn_config.{name}"] = value
    linear_names = [f"linear_attn_config.{name}" for name in (*LINEAR, *_LINEAR_LISTS)]
    required = [*TEXT, *linear_names, *_STATED]
    problems = [f"{name} is missing" for name in required if name not in values]
    for name, only in (_STATED | _ASSUMED).items():
        if name in values and differs(values[name], only):
            problems.append(f"{name}={values[name]!r} must be {only!r}")
    problems += wrong_fields(values, TEXT | _OPTIONAL)
    problems += wrong_fields(values, {f"linear_attn_config.{n}": r for n, r in LINEAR.items()})
    # MLA has one key and value per head; other numbers would mean grouped queries.
    heads = values.get("num_attention_heads")
    if values.get("num_key_value_heads", heads) != heads:
        problems.append(
            f"num_key_value_heads={values['num_key_value_heads']} must equal "
            f"num_attention_heads={heads}"
        )
    problems += _unknown("linear_attn_config", linear, (*LINEAR, *_LINEAR_LISTS, _FULL_RANK))
    sparse = text.get("dsa_config")
    if sparse is not None:
        sparse = sparse if isinstance(sparse, dict) else {}
        # Its names are a guess until they are published, so another name is not passed over.
        known = (*DSA, *_DSA_LISTS)
        problems += _unknown("dsa_config", sparse, known)
        problems += [f"dsa_config.{name} is missing" for name in known if name not in sparse]
        problems += wrong_fields(
            {f"dsa_config.{name}": value for name, value in sparse.items()},
            {f"dsa_config.{name}": rule for name, rule in DSA.items()},
        )
        if sparse.get("full_attn_layers") != linear.get("full_attn_layers"):
            problems.append(
                "dsa_config.full_attn_layers must equal linear_attn_config.full_attn_layers"
            )
    return problems or _check_layers(text, linear)


def _check_layers(text: dict[str, Any], linear: dict[str, Any]) -> list[str]:
    """What is wrong with layers and experts together, of a config whose numbers are right."""
    chosen, experts = text["num_experts_per_token"], text["num_experts"]
    if chosen >= experts:  # balancing compares a token's choices with the next best expert
        return [f"num_experts_per_token={chosen} must be less than num_experts={experts}"]
    # Each layer is of one kind, and a layer of neither would be built of nothing.
    last = text["num_hidden_layers"]
    listed: list[Any] = []
    for name in _LINEAR_LISTS:
        layers = linear[name]
        if not isinstance(layers, list) or any(type(number) is not int for number in layers):
            return [
                f"linear_attn_config.{name}={repr(layers)[:60]} must be a list of numbers of layers"
            ]
        listed += layers
    if sorted(listed) != list(range(1, last + 1)):
        return [f"kda_layers and full_attn_layers must name each of the layers 1..{last} once"]
    # Each of them has names of its own in the files.
    if last * experts > _MOST_EXPERTS:
        return [f"{last} layers of num_experts={experts}: more than {_MOST_EXPERTS:,}"]
    return []


def _unknown(group: str, given: dict[str, Any], known: tuple[str, ...]) -> list[str]:
    """Fields that may change the equations in a way that is not known here."""
    problems: list[str] = []
    for name in given:
        if name not in known:
            problems.append(f"{group}.{name} is unknown; known: {', '.join(known)}")
    return problems


def _flat(cfg: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Fields of nested configs that make the model what it is, with their paths."""
    pairs: list[tuple[str, Any]] = []
    for field in dataclasses.fields(cfg):
        if field.name in _TRAINING:
            continue
        value = getattr(cfg, field.name)
        path = f"{prefix}{field.name}"
        if isinstance(value, model.Sublayers):
            for name, config in value.items():
                pairs += _flat(config, f"{name}.")
        elif dataclasses.is_dataclass(value):
            pairs += _flat(value, f"{path}.")
        else:
            pairs.append((path, value))
    return pairs
