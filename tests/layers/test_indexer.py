from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k31fn import params as parameters
from k31fn import tree
from k31fn.autodiff import value_and_grad
from k31fn.kernels.indexer import index_scores
from k31fn.layers import indexer, mla
from tests.layers.attention_configs import INDEXER, drawn, tokens

GOLDEN = Path(__file__).parents[1] / "golden" / "dsa.safetensors"


def scores(p: indexer.Params[Tensor], x: Tensor, cq: Tensor, cfg: indexer.Config) -> Tensor:
    return index_scores(*indexer.apply(p, x, cq, cfg), cfg.scale)


def by_formula(p: indexer.Params[Tensor], x: Tensor, cq: Tensor, cfg: indexer.Config) -> Tensor:
    """I[t, s] head by head, with torch's LayerNorm."""
    J, dim = cfg.num_heads, cfg.head_dim
    key = torch.nn.functional.layer_norm(
        x @ p.w_k, (dim,), p.k_norm_weight, p.k_norm_bias, cfg.norm_eps
    )
    total = x.new_zeros(x.shape[0], x.shape[1], x.shape[1])
    for j in range(J):
        query = cq @ p.w_q[:, j * dim : (j + 1) * dim]
        weight = (x @ p.w_w[:, j : j + 1]) / J**0.5
        total = total + weight * torch.relu(query @ key.mT / dim**0.5)
    return total


def test_scores_equal_the_formula():
    p, x, cq = drawn(indexer.specs(INDEXER)), tokens(2, 9), tokens(2, 9, width=7)
    torch.testing.assert_close(
        scores(p, x, cq, INDEXER), by_formula(p, x, cq, INDEXER), rtol=0, atol=1e-12
    )


def test_scales_can_be_set():
    p, x, cq = drawn(indexer.specs(INDEXER)), tokens(1, 5), tokens(1, 5, width=7)
    free = dataclasses.replace(INDEXER, score_scale=1.0, weight_scale=1.0)
    expected = scores(p, x, cq, INDEXER) * (3 * 4) ** 0.5
    torch.testing.assert_close(scores(p, x, cq, free), expected, rtol=0, atol=1e-12)


def test_sends_no_gradient_to_its_inputs_and_some_to_each_parameter():
    p, x, cq = drawn(indexer.specs(INDEXER)), tokens(2, 9), tokens(2, 9, width=7)
    _, (p_grad, x_grad, cq_grad) = value_and_grad(
        lambda p, x, cq: scores(p, x, cq, INDEXER).square().sum(), (0, 1, 2)
    )(p, x, cq)
    assert torch.equal(x_grad, torch.zeros_like(x))
    assert torch.equal(cq_grad, torch.zeros_like(cq))
    assert all((g != 0).all() for g in tree.leaves(p_grad))


def test_head_weights_are_computed_in_float32():
    p, x, cq = (
        drawn(indexer.specs(INDEXER), torch.bfloat16),
        tokens(2, 9, torch.bfloat16),
        tokens(2, 9, width=7),
    )
    out = indexer.apply(p, x, cq.to(torch.bfloat16), INDEXER)
    assert (out.q.dtype, out.k.dtype, out.w.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )
    torch.testing.assert_close(out.w, x.float() @ p.w_w.float() * 3**-0.5, rtol=0, atol=1e-6)


def test_golden_scores():
    """fp32; 5e-6 on scores up to 3.2. The key norm's eps matters: 1e-6 instead of 1e-5 changes
    scores by 0.028.
    """
    g = load_file(GOLDEN)
    p = indexer.Params(
        w_q=g["hf.weight.indexer.wq_b.weight"].T,
        w_k=g["hf.weight.indexer.wk.weight"].T,
        k_norm_weight=g["hf.weight.indexer.k_norm.weight"],
        k_norm_bias=g["hf.weight.indexer.k_norm.bias"],
        w_w=g["hf.weight.indexer.weights_proj.weight"].T,
    )
    cfg = indexer.Config(64, 24, num_heads=12, head_dim=16)
    x = g["hf.x"]
    cq = mla.rms_norm(
        x @ g["hf.weight.q_a_proj.weight"].T, g["hf.weight.q_a_layernorm.weight"], 1e-6
    )
    visible = g["hf.index_scores"] > -torch.inf
    difference = (scores(p, x, cq, cfg) - g["hf.index_scores"])[visible].abs().max()
    assert difference < 5e-6
    wrong = (
        (scores(p, x, cq, dataclasses.replace(cfg, norm_eps=1e-6)) - g["hf.index_scores"])[visible]
        .abs()
        .max()
    )
    assert wrong > 1e-2


def test_declared_shapes_at_the_published_size():
    """7,438,592 parameters per layer of K3.1."""
    cfg = indexer.Config(7168, 1536)
    assert parameters.count(indexer.specs(cfg)) == 7_438_592
    assert cfg.scale == 128**-0.5


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(indexer.Config)])
def test_a_config_that_cannot_be_is_refused(field: str):
    zero = type(getattr(dataclasses.replace(INDEXER, score_scale=1.0, weight_scale=1.0), field))(0)
    with pytest.raises(ValueError, match=rf"indexer\.Config\.{field}={zero}"):
        dataclasses.replace(INDEXER, **{field: zero})
