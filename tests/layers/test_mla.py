from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from k31fn import params as parameters
from k31fn import tree
from k31fn.autodiff import value_and_grad
from k31fn.layers import mla
from k31fn.layers.linear import dequantize
from k31fn.segments import Segments, from_lengths
from tests.kernels.attention_oracles import seen_keys
from tests.layers.attention_configs import MLA, drawn, pieces, projected, random_rows, tokens


def full_matrix(p: mla.Params[Tensor], x: Tensor, cfg: mla.Config, rows: list[list[int]]) -> Tensor:
    """Gated MLA as in the report, with whole matrices and no code of the layer."""
    B, T, _ = x.shape
    N, P, V, H, R = (
        cfg.qk_nope_head_dim,
        cfg.qk_rope_head_dim,
        cfg.v_head_dim,
        cfg.num_heads,
        cfg.kv_lora_rank,
    )

    def norm(a: Tensor, weight: Tensor) -> Tensor:
        return weight * a / (a.pow(2).mean(-1, keepdim=True) + cfg.latent_norm_eps).sqrt()

    q = (norm(x @ p.w_qa, p.q_norm) @ p.w_qb).reshape(B, T, H, N + P)
    down = x @ p.w_kva
    kv = (norm(down[..., :R], p.kv_norm) @ p.w_kvb).reshape(B, T, H, N + V)
    k = torch.cat([kv[..., :N], down[:, :, None, R:].expand(B, T, H, P)], -1)
    scores = torch.einsum("bthk,bshk->bhts", q, k) / (N + P) ** 0.5
    mask = torch.zeros(B, 1, T, T, dtype=torch.bool)
    for b, row in enumerate(seen_keys(rows, T)):
        for t, keys in enumerate(row):
            mask[b, 0, t, keys] = True
    probs = torch.nan_to_num(torch.softmax(scores.masked_fill(~mask, -torch.inf), -1))
    o = torch.einsum("bhts,bshv->bthv", probs, kv[..., N:]).reshape(B, T, H * V)
    return (torch.sigmoid(x @ p.w_g) * o) @ p.w_o


@pytest.mark.parametrize("rows", [[[9], [9]], [[4, 5], [1, 1, 7]], [[3, 2], [8]]], ids=str)
def test_equals_the_full_matrix_form(rows: list[list[int]]):
    p, x = drawn(mla.specs(MLA)), tokens(2, 9)
    y = mla.apply(p, x, MLA, segments=from_lengths(rows, 9)).y
    torch.testing.assert_close(y, full_matrix(p, x, MLA, rows), rtol=0, atol=1e-12)
    if rows == [[9], [9]]:
        torch.testing.assert_close(mla.apply(p, x, MLA).y, y, rtol=0, atol=0)


def test_gradients_equal_the_full_matrix_form():
    rows = [[4, 5], [6, 1]]
    p, x, upstream = drawn(mla.specs(MLA)), tokens(2, 9), tokens(2, 9)
    segments = from_lengths(rows, 9)
    mine = value_and_grad(
        lambda p, x: (upstream * mla.apply(p, x, MLA, segments=segments).y).sum(), (0, 1)
    )(p, x)
    theirs = value_and_grad(lambda p, x: (upstream * full_matrix(p, x, MLA, rows)).sum(), (0, 1))(
        p, x
    )
    torch.testing.assert_close(tree.leaves(mine), tree.leaves(theirs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "shift", [(0, -1), (-1, 0), (1, 0)], ids=["not itself", "neighbour document", "late start"]
)
def test_a_mask_off_by_one_is_noticed(monkeypatch: pytest.MonkeyPatch, shift: tuple[int, int]):
    right = mla.visible_range

    def wrong(x: Tensor, segments: Segments | None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, stop = right(x, segments, **kwargs)
        return start + shift[0], stop + shift[1]

    p, x, rows = drawn(mla.specs(MLA)), tokens(2, 9), [[4, 5], [6, 1]]
    monkeypatch.setattr(mla, "visible_range", wrong)
    y = mla.apply(p, x, MLA, segments=from_lengths(rows, 9)).y
    assert (y - full_matrix(p, x, MLA, rows)).abs().max() > 1e-3


def test_random_packings_equal_each_document_alone():
    p = drawn(mla.specs(MLA))
    for _ in range(10):
        rows, x = random_rows(3, 20), tokens(3, 20)
        y = mla.apply(p, x, MLA, segments=from_lengths(rows, 20)).y
        for row, some in pieces(rows):
            alone = mla.apply(p, x[row : row + 1, some], MLA).y
            torch.testing.assert_close(y[row : row + 1, some], alone, rtol=0, atol=1e-12)
        for row, lengths in enumerate(rows):
            assert torch.equal(y[row, sum(lengths) :], torch.zeros_like(y[row, sum(lengths) :]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_another_document_changes_no_bit(dtype: torch.dtype):
    p, x, segments = drawn(mla.specs(MLA), dtype), tokens(1, 8, dtype), from_lengths([[5, 3]], 8)

    def second(p: mla.Params[Tensor], x: Tensor) -> Tensor:
        return mla.apply(p, x, MLA, segments=segments).y[:, 5:].square().sum()

    value, (p_grad, x_grad) = value_and_grad(second, (0, 1))(p, x)
    assert torch.equal(x_grad[:, :5], torch.zeros_like(x_grad[:, :5]))
    for t in range(5):
        other = x.clone()
        other[:, t] = 3.0
        changed, (p_changed, x_changed) = value_and_grad(second, (0, 1))(p, other)
        assert torch.equal(changed, value)
        assert torch.equal(x_changed, x_grad)
        assert all(
            torch.equal(a, b)
            for a, b in zip(tree.leaves(p_changed), tree.leaves(p_grad), strict=True)
        )


def test_prefill_and_decode_in_any_cuts_equal_the_whole():
    p, x = drawn(mla.specs(MLA)), tokens(2, 6)
    whole = mla.apply(p, x, MLA).y
    for cuts in range(2**5):
        ends = [t for t in range(1, 6) if cuts >> (t - 1) & 1] + [6]
        state = mla.init_state(MLA, 2, dtype=torch.float64)
        parts = []
        for a, b in zip([0, *ends[:-1]], ends, strict=True):
            y, state = mla.extend(p, x[:, a:b], MLA, state)
            parts.append(y)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
        assert state.kv.shape == (2, 6, MLA.kv_lora_rank + MLA.qk_rope_head_dim)


def test_heads_split_over_ranks_add_up():
    """Local head counts come from the weights: columns of one head on each rank, outputs summed."""
    p, x = drawn(mla.specs(MLA)), tokens(2, 9)

    def rank(r: int) -> mla.Params[Tensor]:
        def columns(w: Tensor) -> Tensor:
            return w.chunk(2, dim=-1)[r]

        return dataclasses.replace(
            p,
            w_qb=columns(p.w_qb),
            w_kvb=columns(p.w_kvb),
            w_g=columns(p.w_g),
            w_o=p.w_o.chunk(2)[r],
        )

    total = mla.apply(rank(0), x, MLA).y + mla.apply(rank(1), x, MLA).y
    torch.testing.assert_close(total, mla.apply(p, x, MLA).y, rtol=0, atol=1e-12)


def adapted(w: Tensor) -> parameters.LowRank[Tensor]:
    return parameters.LowRank(
        w, torch.randn(w.shape[0], 2).double(), torch.randn(2, w.shape[1]).double()
    )


def coded(w: Tensor) -> parameters.Quantized[Tensor]:
    codes = torch.randint(-7, 8, w.shape, dtype=torch.int8)
    return parameters.Quantized(codes, 0.1 * torch.rand(1, w.shape[1], dtype=torch.float64))


def merged(leaf: Any) -> Tensor:
    if isinstance(leaf, parameters.LowRank):
        return merged(leaf.base) + leaf.a @ leaf.b
    return dequantize(leaf, torch.float64) if isinstance(leaf, parameters.Quantized) else leaf


LEAVES = {
    "tensor": lambda w: w,
    "low rank": adapted,
    "quantized": coded,
    "low rank on quantized": lambda w: dataclasses.replace(adapted(w), base=coded(w)),
}


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize("absorbs", [False, True], ids=["expanded", "absorbed"])
def test_every_kind_of_leaf_in_both_forms(
    monkeypatch: pytest.MonkeyPatch, leaf: Callable[..., Any], absorbs: bool
):
    p, x = drawn(mla.specs(MLA)), tokens(2, 5)
    other = dataclasses.replace(p, w_qb=leaf(p.w_qb), w_kvb=leaf(p.w_kvb), w_o=leaf(p.w_o))
    dense = dataclasses.replace(
        p, w_qb=merged(other.w_qb), w_kvb=merged(other.w_kvb), w_o=merged(other.w_o)
    )
    expected = full_matrix(dense, x, MLA, [[5], [5]])
    monkeypatch.setattr(mla, "_absorbs", lambda *_: absorbs)
    torch.testing.assert_close(mla.apply(other, x, MLA).y, expected, rtol=0, atol=1e-12)


def test_gradients_of_the_absorbed_form(monkeypatch: pytest.MonkeyPatch):
    rows = [[4, 5], [6, 1]]
    p, x, upstream = drawn(mla.specs(MLA)), tokens(2, 9), tokens(2, 9)
    segments = from_lengths(rows, 9)
    monkeypatch.setattr(mla, "_absorbs", lambda *_: True)
    mine = value_and_grad(
        lambda p, x: (upstream * mla.apply(p, x, MLA, segments=segments).y).sum(), (0, 1)
    )(p, x)
    theirs = value_and_grad(lambda p, x: (upstream * full_matrix(p, x, MLA, rows)).sum(), (0, 1))(
        p, x
    )
    torch.testing.assert_close(tree.leaves(mine), tree.leaves(theirs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [2, 5, 9, 20])
@pytest.mark.parametrize("new", [1, 2, 7, 20])
def test_the_form_with_fewer_multiplications_is_taken(
    monkeypatch: pytest.MonkeyPatch, rank: int, new: int
):
    """Counted while the last ``new`` of 20 tokens are decoded."""
    cfg = dataclasses.replace(MLA, kv_lora_rank=rank)
    p, x = drawn(mla.specs(cfg)), tokens(1, 20)
    state = mla.init_state(cfg, 1, dtype=x.dtype)
    if new < 20:
        _, state = mla.extend(p, x[:, : 20 - new], cfg, state)

    def flops() -> int:
        with FlopCounterMode(display=False) as counted:
            mla.extend(p, x[:, 20 - new :], cfg, state)
        return counted.get_total_flops()

    chosen = flops()
    forms = []
    for form in (True, False):
        monkeypatch.setattr(mla, "_absorbs", lambda *_, form=form: form)
        forms.append(flops())
    assert chosen == min(forms)


def test_absorbing_pays_for_few_queries_at_the_published_size():
    cfg = mla.Config(7168, 96, 1536, 512, 128, 64, 128)
    assert not any(mla._absorbs(cfg, n, n) for n in (1, 170, 4096, 2**20))
    assert mla._absorbs(cfg, 1, 2**15)
    assert mla._absorbs(cfg, 170, 2**20)
    assert not mla._absorbs(cfg, 171, 2**20)


def test_bfloat16_rounds_the_gated_output_once():
    """Against the same bf16 projections with softmax, PV and gate in float64: 2^-8 relative is one
    rounding of y.
    """
    p, x = drawn(mla.specs(MLA), torch.bfloat16), tokens(2, 9, torch.bfloat16)
    y = mla.apply(p, x, MLA).y
    assert y.dtype == torch.bfloat16
    _, heads = projected(p, x, MLA)
    wide = mla.Heads(*[t.double() for t in heads])
    k = torch.cat([wide.k, wide.kr[:, :, None].expand(-1, -1, 2, -1)], -1)
    scores = torch.einsum("bthk,bshk->bhts", wide.q, k) * MLA.scale
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    o = torch.einsum(
        "bhts,bshv->bthv", torch.softmax(scores.masked_fill(~mask, -torch.inf), -1), wide.v
    )
    gated = (torch.sigmoid((x @ p.w_g).double()) * o.flatten(-2)).to(torch.bfloat16)
    torch.testing.assert_close(y, gated @ p.w_o, rtol=2**-7, atol=2**-7)
    assert (y != gated @ p.w_o).float().mean() < 0.05


def test_declared_shapes_at_the_published_size():
    """232,196,096 parameters per layer of K3."""
    cfg = mla.Config(7168, 96, 1536, 512, 128, 64, 128)
    assert parameters.count(mla.specs(cfg)) == 232_196_096
    assert cfg.scale == 192**-0.5
    assert cfg.latent_norm_eps == 1e-6


@pytest.mark.parametrize(
    "field", [f.name for f in dataclasses.fields(mla.Config) if f.name != "report_logits"]
)
def test_a_config_that_cannot_be_is_refused(field: str):
    zero = type(getattr(MLA, field))(0)
    with pytest.raises(ValueError, match=rf"mla\.Config\.{field}={zero}"):
        dataclasses.replace(MLA, **{field: zero})
