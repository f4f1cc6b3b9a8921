"""Where bf16 layers round: golden values of the AttnRes mix, the KDA decay gate and the L2 norm."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from k31fn.kernels.attn_res import attn_res
from k31fn.kernels.kda_gates import KdaGates, kda_gates

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "norms_and_casts.safetensors")


def test_attn_res_rounds_once():
    sources = tuple(GOLDEN["attnres_bf16.sources_TND"][None, :, i] for i in range(3))
    out = attn_res(sources, GOLDEN["attnres_bf16.query"], GOLDEN["attnres_bf16.norm_weight"], 1e-5)
    assert torch.equal(out[0], GOLDEN["attnres_bf16.out"])


def gates(q: Tensor, z: Tensor, rate: Tensor, bias: Tensor) -> KdaGates:
    beta = torch.zeros(q.shape[:3])
    return kda_gates(q, q, z, beta, rate, bias, -5.0, 1e-6, 1.0)


def test_the_decay_gate_is_a_float32_island():
    z = GOLDEN["gate_bf16.in"].unflatten(-1, (2, 16))
    rate, bias = GOLDEN["gate_bf16.A_log"], GOLDEN["gate_bf16.dt_bias"].view(2, 16)
    g = gates(z, z, rate, bias).g
    torch.testing.assert_close(g, GOLDEN["gate_bf16.g_fp32"], rtol=0, atol=1e-6)
    assert (gates(z, z, rate.bfloat16(), bias).g - g).abs().max() > 1e-4


def test_l2_norm_adds_eps_to_the_sum():
    x = GOLDEN["x"].view(6, 1, 1, 64)
    out = gates(x, x, torch.zeros(1), torch.zeros(1, 64)).q
    torch.testing.assert_close(out.view(6, 64), GOLDEN["l2norm_fla"], rtol=0, atol=1e-6)
    normalise = torch.nn.functional.normalize(GOLDEN["x"], dim=-1, eps=1e-6)
    assert (normalise - GOLDEN["l2norm_fla"]).abs().max() > 1e-2, (
        "the fixture tells another eps rule"
    )
