"""Where bf16 layers round: golden values of the AttnRes mix, the KDA decay gate and the L2 norm."""

import dataclasses
from pathlib import Path

import torch
from safetensors.torch import load_file

from k31fn import params, random
from k31fn.kernels.attn_res import attn_res
from k31fn.layers import kda

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "norms_and_casts.safetensors")


def test_attn_res_rounds_once():
    sources = tuple(GOLDEN["attnres_bf16.sources_TND"][None, :, i] for i in range(3))
    out = attn_res(sources, GOLDEN["attnres_bf16.query"], GOLDEN["attnres_bf16.norm_weight"], 1e-5)
    assert torch.equal(out[0], GOLDEN["attnres_bf16.out"])


def test_the_decay_gate_is_a_float32_island():
    cfg = kda.Config(hidden_size=8, num_heads=2, head_dim=16)
    weights = params.init(kda.specs(cfg), random.key(0), dtype=torch.bfloat16)
    weights = dataclasses.replace(
        weights, A_log=GOLDEN["gate_bf16.A_log"], dt_bias=GOLDEN["gate_bf16.dt_bias"]
    )
    g = kda._log_decay(GOLDEN["gate_bf16.in"], weights, cfg, 2)
    torch.testing.assert_close(g, GOLDEN["gate_bf16.g_fp32"], rtol=0, atol=1e-6)
    rounded = dataclasses.replace(weights, A_log=GOLDEN["gate_bf16.A_log"].bfloat16())
    assert (kda._log_decay(GOLDEN["gate_bf16.in"], rounded, cfg, 2) - g).abs().max() > 1e-4


def test_l2_norm_adds_eps_to_the_sum():
    x = GOLDEN["x"].view(6, 1, 1, 64)
    torch.testing.assert_close(
        kda._l2_norm(x, 1e-6).view(6, 64), GOLDEN["l2norm_fla"], rtol=0, atol=1e-6
    )
    normalise = torch.nn.functional.normalize(GOLDEN["x"], dim=-1, eps=1e-6)
    assert (normalise - GOLDEN["l2norm_fla"]).abs().max() > 1e-2, (
        "the fixture tells another eps rule"
    )
