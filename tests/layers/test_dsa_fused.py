"""Gated DSA by the fused kernels: the layer's output, loss and gradients are the references'.

Few tokens of a tiny layer, since the kernels run in Triton's interpreter where there is no GPU;
they are tested themselves in tests/kernels.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from k31fn import tree
from k31fn.autodiff import remat, value_and_grad
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.layers import dsa
from k31fn.segments import from_lengths
from tests.kernels.fused import DEVICE
from tests.layers.attention_configs import drawn, dsa_config, tokens

pytest.importorskip("triton")

OF_INDEXER = ("index_topk", "indexer_kl")
FORMS = {
    "masked": (10**6, ("sparse_attention", "head_probs")),
    "gathered": (0, ("latent_attention", "latent_probs")),
}
"""Keys over top-k up to which dense tiles are masked, and the ops that run."""
# More latent dims than tokens, so that keys and values are made for each head.
CONFIG = dsa_config(3)
CONFIG = dataclasses.replace(CONFIG, attn=dataclasses.replace(CONFIG.attn, kv_lora_rank=64), topk=3)
T = 9


def results(x: Tensor, p: dsa.Params[Tensor], impl: str, ops: tuple[str, ...]) -> list[Tensor]:
    segments = tree.map(lambda s: s.to(DEVICE), from_lengths([[5, 3]], T))

    def loss(p: dsa.Params[Tensor], x: Tensor) -> Tensor:
        out = dsa.apply(p, x, CONFIG, segments=segments)
        return out.y.square().sum() + out.aux.kl

    with use_impl(**dict.fromkeys(ops, impl)), record_impls() as calls:
        found = tree.leaves(value_and_grad(remat(loss), (0, 1))(p, x))
    counts = {op: calls[op, impl] for op in ops}
    # the replay of remat does all but choose again
    assert counts == {op: 1 if op == "index_topk" else 2 for op in ops}
    return found


@pytest.mark.parametrize("form", FORMS)
def test_equals_the_references(form: str, monkeypatch: pytest.MonkeyPatch):
    """float32; two documents and padding. 1e-5 of the largest: sums of some 100 products. The
    references run in the masked form.
    """
    longest, attends = FORMS[form]
    monkeypatch.setattr(dsa, "_MASKED_UP_TO", longest)
    p = tree.map(lambda w: w.to(DEVICE), drawn(dsa.specs(CONFIG), torch.float32))
    x = tokens(1, T, torch.float32).to(DEVICE)
    ours = results(x, p, "triton", (*OF_INDEXER, *attends))
    masked = (*OF_INDEXER, *FORMS["masked"][1])
    exact = results(x.double(), tree.map(Tensor.double, p), "reference", masked)
    for a, b in zip(ours, exact, strict=True):
        assert (a.double() - b).abs().max() <= 1e-5 * b.abs().max()


def test_the_warm_up_equals_the_references(monkeypatch: pytest.MonkeyPatch):
    """All visible keys, by two tiles of queries; the references' few scores are one tile."""
    monkeypatch.setattr(dsa, "_FUSED_TILE", 5)
    cfg = dataclasses.replace(CONFIG, stage="dense_warmup")
    p = tree.map(lambda w: w.to(DEVICE), drawn(dsa.specs(cfg), torch.float32))
    x = tokens(1, T, torch.float32).to(DEVICE)
    ops = ("sparse_attention", "head_probs", "indexer_kl")

    def outcome(p: dsa.Params[Tensor], x: Tensor, impl: str, calls_of_each: int) -> list[Tensor]:
        def loss(p: dsa.Params[Tensor], x: Tensor) -> Tensor:
            out = dsa.apply(p, x, cfg)
            return out.y.square().sum() + out.aux.kl

        with use_impl(**dict.fromkeys(ops, impl)), record_impls() as calls:
            found = tree.leaves(value_and_grad(loss, (0, 1))(p, x))
        assert {op: calls[op, impl] for op in ops} == dict.fromkeys(ops, calls_of_each)
        return found

    # so few scores that no tile is made again
    ours = outcome(p, x, "triton", 2)
    exact = outcome(tree.map(Tensor.double, p), x.double(), "reference", 1)
    for a, b in zip(ours, exact, strict=True):
        assert (a.double() - b).abs().max() <= 1e-5 * b.abs().max()
