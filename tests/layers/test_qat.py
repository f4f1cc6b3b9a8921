"""Quantisation-aware training of routed experts: exactly the quantised model's values, the
identity's gradients.
"""

import dataclasses

import pytest
import torch
from torch import Tensor

from k31fn import hf, lora, model, params, random, tree
from k31fn.autodiff import value_and_grad
from k31fn.kernels.formats import mxfp4, mxfp8
from k31fn.layers import latent_moe
from k31fn.layers.linear import grouped_linear
from k31fn.layers.qat import quantised_grouped_linear
from tests import small

SIZES = torch.tensor([3, 0, 5])


def drawn(seed: int, *shape: int) -> Tensor:
    return random.normal(random.key(seed), shape, dtype=torch.float64)


def test_the_product_is_that_of_the_stored_operands():
    """Of codes and scales as a checkpoint holds them, decoded."""
    x, w = drawn(0, 8, 64), drawn(1, 3, 64, 96)
    stored = mxfp4.decode(*mxfp4.encode(w.mT.bfloat16()), torch.float64).mT
    assert torch.equal(
        quantised_grouped_linear(x, w, SIZES), grouped_linear(mxfp8.fake_quantise(x), stored, SIZES)
    )
    across = mxfp4.decode(*mxfp4.encode(w.bfloat16()), torch.float64)
    wrong = grouped_linear(mxfp8.fake_quantise(x), across, SIZES)
    assert not torch.equal(quantised_grouped_linear(x, w, SIZES), wrong), (
        "groups lie along the inputs"
    )


def test_gradients_are_those_of_the_product_of_the_rounded_operands():
    """Straight through: each operand's gradient is the other one's, rounded, times the
    cotangent.
    """
    x, w, ct = drawn(0, 8, 64), drawn(1, 3, 64, 96), drawn(2, 8, 96)
    _, got = value_and_grad(
        lambda x, w: (quantised_grouped_linear(x, w, SIZES) * ct).sum(), (0, 1)
    )(x, w)
    rounded = mxfp8.fake_quantise(x), mxfp4.fake_quantise(w.mT).mT
    _, want = value_and_grad(lambda x, w: (grouped_linear(x, w, SIZES) * ct).sum(), (0, 1))(
        *rounded
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not bool(got[1][1].any()), "an expert without rows"


def with_experts(**changes: int | bool) -> model.Config:
    moe = latent_moe.Config(
        16, latent_size=32, expert_size=64, shared_size=64, num_experts=4, top_k=2
    )
    return small.config(
        num_layers=2, full_attention_layers=(1,), moe=dataclasses.replace(moe, **changes)
    )


def test_an_export_to_mxfp4_loses_nothing(tmp_path):
    """The exported model computes what training computed: its weights need no rounding any more."""
    cfg = with_experts(qat=True)
    weights = small.weights(cfg, torch.float32)
    balance, tokens = model.init_balance(cfg), small.tokens(2, 12)
    hf.export(
        params.cast(weights, model.specs(cfg), torch.float32),
        balance,
        cfg,
        tmp_path / "k3",
        quantise=True,
    )
    read, _ = hf.load(tmp_path / "k3", cfg, dtype=torch.float32)
    again, _ = hf.load(tmp_path / "k3", hf.config_from_hf(tmp_path / "k3"), dtype=torch.float32)
    experts = [tree.leaves(p.layers[1].ffn.experts) for p in (weights, read)]
    assert not any(torch.equal(a, b) for a, b in zip(*experts, strict=True))
    values = [model.apply(p, tokens, cfg, balance=balance).hidden for p in (weights, read, again)]
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])
    plain = model.apply(weights, tokens, with_experts(), balance=balance).hidden
    assert not torch.allclose(values[0], plain, atol=1e-3), (
        "without it an export would change the model"
    )


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"expert_size=40: MXFP4 and MXFP8 have groups of 32"):
        with_experts(expert_size=40, qat=True)
    specs = lora.apply(model.specs(with_experts(qat=True)), held="mxfp4")
    weights, cfg = params.init(specs, random.key(0)), with_experts(qat=True)
    with pytest.raises(ValueError, match=r"qat: the weight is a LowRank"):
        model.apply(weights, small.tokens(1, 4), cfg, balance=model.init_balance(cfg))
