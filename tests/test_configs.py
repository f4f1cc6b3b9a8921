"""The config files, against what is published about each model."""

import dataclasses
from pathlib import Path

import pytest

from k31fn import config, model, params
from k31fn.layers import attn_res, dsa, gdn, mhc, mla

CONFIGS = Path(__file__).parents[1] / "configs"
NAMES = (
    "tiny",
    "tiny_gdn",
    "tiny_long",
    "tiny_lora",
    "tiny_mhc",
    "tiny_sft",
    "tiny_vision",
    "k3",
    "k31_pro",
    "k31_pro_indexer",
    "k31_pro_lora",
    "k31_pro_reduced_npu",
    "h200_4l_e32",
    "h200_4l_e64",
    "h200_mhc",
)


@pytest.fixture(scope="module")
def cfgs():
    return {name: config.load(CONFIGS / f"{name}.py") for name in NAMES}


def test_every_config_file_is_tested_here():
    assert sorted(p.stem for p in CONFIGS.glob("*.py")) == sorted(NAMES)


def test_k3(cfgs):
    """Layer numbers count from 0; the report's count from 1."""
    cfg = cfgs["k3"]
    full = [i + 1 for i, (mixer, _) in enumerate(cfg.layers) if mixer == "full_attention"]
    assert full == [*range(4, 93, 4), 93]
    assert (cfg.num_layers, len(full)) == (93, 24)
    assert [ffn for _, ffn in cfg.layers] == ["dense"] + ["moe"] * 92
    assert isinstance(cfg.sublayers["full_attention"], mla.Config)
    assert cfg.sublayers["full_attention"].scale == 192**-0.5
    assert isinstance(cfg.residual, attn_res.Config)
    opens = [i for i, layer in enumerate(model.layer_configs(cfg)) if layer.opens_block]
    assert opens == [0, 12, 24, 36, 48, 60, 72, 84]
    assert (
        cfg.sublayers["moe"].num_experts,
        cfg.sublayers["moe"].top_k,
        cfg.sublayers["moe"].shared_size,
    ) == (896, 16, 6144)
    assert (
        cfg.sublayers["moe"].beta,
        cfg.sublayers["moe"].linear_beta,
        cfg.sublayers["moe"].scale,
    ) == (4.0, 25.0, 1.0)
    assert (
        cfg.sublayers["kda"].gate_lower_bound,
        cfg.sublayers["kda"].conv_width,
        cfg.norm_eps,
    ) == (-5.0, 4, 1e-5)


def test_k31_differs_from_k3_in_its_indexers_only(cfgs):
    full = cfgs["k31_pro"].sublayers["full_attention"]
    assert isinstance(full, dsa.Config)
    assert full.attn == cfgs["k3"].sublayers["full_attention"]
    assert (full.indexer.num_heads, full.indexer.head_dim, full.topk) == (32, 128, 2048)
    assert full.indexer.norm_eps == cfgs["k3"].norm_eps
    rest = [
        name
        for name in vars(cfgs["k3"])
        if getattr(cfgs["k3"], name) != getattr(cfgs["k31_pro"], name)
    ]
    assert rest == ["sublayers"]
    k3, k31 = cfgs["k3"].sublayers, cfgs["k31_pro"].sublayers
    assert [name for name in k3 if k3[name] != k31[name]] == ["full_attention"]


def test_reduced(cfgs):
    small, full = cfgs["k31_pro_reduced_npu"], cfgs["k31_pro"]
    assert [mixer for mixer, _ in small.layers] == ["kda", "kda", "kda", "full_attention"] * 2
    assert (small.num_layers, small.sublayers["moe"].num_experts, small.sublayers["moe"].top_k) == (
        8,
        64,
        16,
    )
    assert [layer.opens_block for layer in model.layer_configs(small)] == [True] + [False] * 7
    assert (
        small.sublayers["kda"],
        small.sublayers["full_attention"],
        small.sublayers["dense"],
    ) == (
        full.sublayers["kda"],
        full.sublayers["full_attention"],
        full.sublayers["dense"],
    )
    assert (small.vision, small.projector) == (full.vision, full.projector)
    assert params.count(model.specs(small)) == 22_302_797_120 + 401_214_464 + 46_144_512


def test_one_h200(cfgs):
    """Layers of full width, fewer of them and with fewer experts; the state in bfloat16."""
    small, pro = cfgs["h200_4l_e32"], cfgs["k31_pro"]
    assert [mixer for mixer, _ in small.layers] == ["kda", "kda", "kda", "full_attention"]
    assert params.count(model.specs(small)) == 8_882_653_088
    assert params.count(model.specs(cfgs["h200_4l_e64"])) == 13_111_429_024
    for name, experts in (("h200_4l_e32", 32), ("h200_4l_e64", 64), ("h200_mhc", 32)):
        moe = dataclasses.replace(pro.sublayers["moe"], num_experts=experts)
        same = pro.with_sublayers(moe=moe)
        residual = mhc.Config() if name == "h200_mhc" else pro.residual
        text = {"vision": (), "projector": (), "residual": residual}
        assert cfgs[name] == dataclasses.replace(same, layers=small.layers, **text)
        recipe = config.load_recipe(CONFIGS / f"{name}.py")
        assert (recipe.name, recipe.model) == (name, cfgs[name])
        assert (recipe.batch_size, recipe.length) == (1, 8192)
        assert (recipe.master, recipe.optimizer.state_dtype) == ("bfloat16", "bfloat16")


def test_tiny_mhc_differs_from_tiny_in_its_residual_only(cfgs):
    assert cfgs["tiny_mhc"] == dataclasses.replace(cfgs["tiny"], residual=mhc.Config())


def test_tiny_gdn_differs_from_tiny_in_its_recurrence_only(cfgs):
    ours, tiny = cfgs["tiny_gdn"], cfgs["tiny"]
    mixer = ours.sublayers["gdn"]
    assert [name for name, _ in ours.layers] == ["gdn", "gdn", "gdn", "full_attention"]
    assert mixer == gdn.Config(tiny.hidden_size, num_heads=2, head_dim=64)
    rest = {name: layer for name, layer in ours.sublayers.items() if name != "gdn"}
    assert rest == {name: layer for name, layer in tiny.sublayers.items() if name != "kda"}
    same = dataclasses.replace(ours, sublayers=tiny.sublayers, layers=tiny.layers)
    assert same == tiny


def test_tiny(cfgs):
    cfg = cfgs["tiny"]
    assert 1.1e6 < params.count(model.specs(cfg)) < 1.3e6
    assert cfg.vocab_size == 264
    assert [mixer for mixer, _ in cfg.layers] == ["kda", "kda", "kda", "full_attention"]
    assert isinstance(cfg.sublayers["full_attention"], dsa.Config)
    assert cfg.sublayers["full_attention"].topk == 64  # below the 256 tokens that it trains on


def test_tiny_vision(cfgs):
    """The text model is the tiny one; patches are those of the full-size tower."""
    cfg = cfgs["tiny_vision"]
    assert dataclasses.replace(cfg, vision=(), projector=()) == cfgs["tiny"]
    assert cfg.vision.pixels_per_patch == cfgs["k31_pro"].vision.pixels_per_patch == 588
    recipe = config.load_recipe(CONFIGS / "tiny_vision.py")
    assert recipe.model == cfg
    assert recipe.patches == 96
    assert config.to_dict(recipe)["data"]["kind"] == "Prepared"
    assert config.from_dict(config.Recipe, config.to_dict(recipe)) == recipe


def test_tiny_long():
    """As many tokens a step in each phase, in all as many as the tiny recipe."""
    tiny, long = (config.load_recipe(CONFIGS / f"{name}.py") for name in ("tiny", "tiny_long"))
    assert [long.phase_of(i) for i in (199, 200, 349, 350, 449)] == [0, 1, 1, 2, 2]
    assert [(long.at(i).batch_size, long.at(i).length) for i in (0, 200, 350)] == [
        (24, 128),
        (12, 256),
        (6, 512),
    ]
    assert dataclasses.replace(long, name="tiny", phases=(), length=256, batch_size=12) == tiny


def test_the_schedule_of_the_indexer():
    """Tokens as published for DeepSeek-V3.2: 2.1B dense and 943.7B sparse."""
    recipe = config.load_recipe(CONFIGS / "k31_pro_indexer.py")
    warm, sparse = recipe.at(0), recipe.at(1000)
    assert (warm.trainable, warm.model.sublayers["full_attention"].stage, recipe.phase_of(999)) == (
        "indexer",
        "dense_warmup",
        0,
    )
    assert (sparse.trainable, sparse.model.sublayers["full_attention"].stage) == ("all", "sparse")
    assert round(1000 * warm.batch_size * warm.length / 1e9, 1) == 2.1
    assert round(15_000 * sparse.batch_size * sparse.length / 1e9, 1) == 943.7


def test_tiny_sft(cfgs):
    """The tiny model: it can start from a run of it."""
    assert cfgs["tiny_sft"] == cfgs["tiny"]
    assert config.load_recipe(CONFIGS / "tiny_sft.py").data.tokenizer == "bytes+chat"
