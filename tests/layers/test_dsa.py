from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k31fn import params as parameters
from k31fn import tree
from k31fn.autodiff import remat, value_and_grad, vjp
from k31fn.kernels import tiling
from k31fn.kernels.indexer import index_scores
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.layers import dsa, indexer, mla
from k31fn.layers.kind import Aux, Output
from k31fn.segments import from_lengths
from k31fn.testing import live_bytes
from tests.kernels import attention_oracles as oracle
from tests.layers.attention_configs import (
    INDEXER,
    MLA,
    drawn,
    dsa_config,
    pieces,
    projected,
    random_rows,
    tokens,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "dsa.safetensors"
CONFIGS = [dsa_config(3), dsa_config(3, "dense_warmup")]
STAGES = pytest.mark.parametrize("cfg", CONFIGS, ids=["sparse", "warmup"])
ROWS, T = [[4, 8], [1, 7, 2]], 12


def one_query_at_a_time(
    p: dsa.Params[Tensor], x: Tensor, cfg: dsa.Config, rows: list[list[int]]
) -> Output:
    """The layer from its projections and the oracles' loops."""
    cq, heads = projected(p.attn, x, cfg.attn)
    out = indexer.apply(p.indexer, x, cq, cfg.indexer)
    scores = oracle.index_scores(*out, cfg.indexer.scale)
    seen = oracle.seen_keys(rows, x.shape[1])
    sets = oracle.choose(scores, seen, cfg.topk if cfg.stage == "sparse" else x.shape[1])
    q, k, kr, v = heads
    o, probs = oracle.attention(q, k, kr, v, sets, cfg.attn.scale)
    y = (torch.sigmoid(x @ p.attn.w_g) * o.flatten(-2)) @ p.attn.w_o
    return Output(y, Aux(torch.tensor(oracle.kl(probs, scores, sets), dtype=x.dtype)))


@STAGES
def test_equals_the_layer_one_query_at_a_time(cfg: dsa.Config):
    p, x = drawn(dsa.specs(cfg)), tokens(2, T)
    result = dsa.apply(p, x, cfg, segments=from_lengths(ROWS, T))
    torch.testing.assert_close(result, one_query_at_a_time(p, x, cfg, ROWS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("topk", [8, 100])
def test_topk_as_large_as_the_context_is_dense(topk: int):
    cfg = dsa_config(topk)
    p, x = drawn(dsa.specs(cfg)), tokens(2, 8)

    def losses(p: dsa.Params[Tensor], x: Tensor, cfg: dsa.Config) -> Tensor:
        out = dsa.apply(p, x, cfg)
        return out.y.square().sum() + out.aux.kl

    torch.testing.assert_close(
        dsa.apply(p, x, cfg).y, mla.apply(p.attn, x, MLA).y, rtol=0, atol=1e-12
    )
    sparse = value_and_grad(losses, (0, 1))(p, x, cfg)
    warmup = value_and_grad(losses, (0, 1))(p, x, dsa_config(1, "dense_warmup"))
    torch.testing.assert_close(tree.leaves(sparse), tree.leaves(warmup), rtol=0, atol=1e-12)


@pytest.mark.parametrize("topk", [1, 3, 7])
def test_one_token_more_than_topk_trains(topk: int):
    cfg = dsa_config(topk)
    p, x = drawn(dsa.specs(cfg)), tokens(2, topk + 1)
    out, pull = vjp(lambda p, x: dsa.apply(p, x, cfg), p, x)
    grads = tree.leaves(pull(Output(torch.ones_like(out.y), Aux(torch.ones_like(out.aux.kl)))))
    assert all(g.isfinite().all() for g in grads)
    torch.testing.assert_close(
        out, one_query_at_a_time(p, x, cfg, [[topk + 1]] * 2), rtol=0, atol=1e-12
    )


def assert_losses_are_isolated(cfg: dsa.Config) -> None:
    p, x = drawn(dsa.specs(cfg)), tokens(2, T)
    out, _ = vjp(lambda p, x: dsa.apply(p, x, cfg), p, x)

    def grads(of_y: float, of_kl: float) -> tuple[dsa.Params[Tensor], Tensor]:
        _, pull = vjp(lambda p, x: dsa.apply(p, x, cfg), p, x)
        return pull(Output(torch.full_like(out.y, of_y), Aux(torch.full_like(out.aux.kl, of_kl))))

    p_kl, x_kl = grads(0.0, 1.0)
    assert all((g == 0).all() for g in [*tree.leaves(p_kl.attn), x_kl]), (
        "the indexer's loss reached the trunk"
    )
    assert all((g != 0).any() for g in tree.leaves(p_kl.indexer)), (
        "an indexer parameter does not learn"
    )
    p_y, x_y = grads(1.0, 0.0)
    assert all((g == 0).all() for g in tree.leaves(p_y.indexer)), (
        "the output's loss reached the indexer"
    )
    assert all((g != 0).any() for g in [*tree.leaves(p_y.attn), x_y]), (
        "a parameter of the attention does not learn"
    )


@STAGES
def test_each_loss_trains_its_own_parameters_only(cfg: dsa.Config):
    assert_losses_are_isolated(cfg)


@STAGES
def test_isolation_holds_when_tiles_are_recomputed(
    monkeypatch: pytest.MonkeyPatch, cfg: dsa.Config
):
    monkeypatch.setattr(tiling, "TILE_QUERIES", 2)
    monkeypatch.setattr(tiling, "KEPT_ELEMENTS", 0)
    assert_losses_are_isolated(cfg)


@STAGES
def test_a_missing_stop_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch, cfg: dsa.Config):
    monkeypatch.setattr(indexer, "stop_gradient", lambda x: x)
    with pytest.raises(AssertionError, match="reached the trunk"):
        assert_losses_are_isolated(cfg)


@STAGES
def test_kl_is_a_sum_over_queries_however_they_are_batched(cfg: dsa.Config):
    p, x = drawn(dsa.specs(cfg)), tokens(4, T)
    rows = [[4, 8], [1, 7, 2], [12], [3]]

    def summed(p: dsa.Params[Tensor], size: int) -> Tensor:
        total = torch.zeros((), dtype=x.dtype)
        for a in range(0, 4, size):
            segments = from_lengths(rows[a : a + size], T)
            total = total + dsa.apply(p, x[a : a + size], cfg, segments=segments).aux.kl
        return total

    whole = value_and_grad(summed)(p, 4)
    for size in (1, 2):
        parts = value_and_grad(summed)(p, size)
        torch.testing.assert_close(tree.leaves(parts), tree.leaves(whole), rtol=0, atol=1e-12)
    alone = dsa.apply(p, x[3:, :3], cfg).aux.kl
    torch.testing.assert_close(
        dsa.apply(p, x[3:], cfg, segments=from_lengths([[3]], T)).aux.kl, alone, rtol=0, atol=1e-12
    )


@STAGES
def test_random_packings_equal_each_document_alone(cfg: dsa.Config):
    p = drawn(dsa.specs(cfg))
    for _ in range(8):
        rows, x = random_rows(3, 20), tokens(3, 20)
        out = dsa.apply(p, x, cfg, segments=from_lengths(rows, 20))
        total = torch.zeros((), dtype=x.dtype)
        for row, some in pieces(rows):
            alone = dsa.apply(p, x[row : row + 1, some], cfg)
            torch.testing.assert_close(out.y[row : row + 1, some], alone.y, rtol=0, atol=1e-12)
            total = total + alone.aux.kl
        torch.testing.assert_close(out.aux.kl, total, rtol=0, atol=1e-12)
        for row, lengths in enumerate(rows):
            assert (out.y[row, sum(lengths) :] == 0).all()


@STAGES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_another_document_changes_no_bit(cfg: dsa.Config, dtype: torch.dtype):
    p, x, segments = drawn(dsa.specs(cfg), dtype), tokens(1, 8, dtype), from_lengths([[5, 3]], 8)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        out, pull = vjp(lambda x: dsa.apply(p, x, cfg, segments=segments), x)
        upstream = torch.cat([torch.zeros_like(out.y[:, :5]), torch.ones_like(out.y[:, 5:])], 1)
        return out.y[:, 5:], pull(Output(upstream, Aux(torch.ones_like(out.aux.kl))))[0]

    y, grad = run(x)
    assert (grad[:, :5] == 0).all()
    for t in range(5):
        other = x.clone()
        other[:, t] = 3.0
        y_changed, grad_changed = run(other)
        assert torch.equal(y_changed, y)
        assert torch.equal(grad_changed, grad)


def test_all_scores_equal_attends_to_the_first_keys():
    """Index weights of zero make every score 0: the lowest positions of the document are chosen."""
    cfg = dsa_config(3)
    p, x = drawn(dsa.specs(cfg)), tokens(2, T)
    p = dataclasses.replace(
        p, indexer=dataclasses.replace(p.indexer, w_w=torch.zeros_like(p.indexer.w_w))
    )
    y = dsa.apply(p, x, cfg, segments=from_lengths(ROWS, T)).y
    sets = [[keys[:3] for keys in row] for row in oracle.seen_keys(ROWS, T)]
    _, heads = projected(p.attn, x, MLA)
    o, _ = oracle.attention(*heads, sets, MLA.scale)
    torch.testing.assert_close(y, mla.gated_output(p.attn, x, o), rtol=0, atol=1e-12)


@STAGES
def test_prefill_and_decode_in_any_cuts_equal_the_whole(cfg: dsa.Config):
    p, x = drawn(dsa.specs(cfg)), tokens(2, 6)
    whole = dsa.apply(p, x, cfg).y
    for cuts in range(2**5):
        ends = [t for t in range(1, 6) if cuts >> (t - 1) & 1] + [6]
        state = dsa.init_state(cfg, 2, dtype=torch.float64)
        parts = []
        for a, b in zip([0, *ends[:-1]], ends, strict=True):
            y, state = dsa.extend(p, x[:, a:b], cfg, state)
            parts.append(y)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
        assert state.index_k.shape == (2, 6, INDEXER.head_dim)


@STAGES
def test_tiles_change_no_result(monkeypatch: pytest.MonkeyPatch, cfg: dsa.Config):
    p, x, upstream = drawn(dsa.specs(cfg)), tokens(2, T), tokens(2, T)
    segments = from_lengths(ROWS, T)

    def loss(p: dsa.Params[Tensor], x: Tensor) -> Tensor:
        out = dsa.apply(p, x, cfg, segments=segments)
        return (out.y * upstream).sum() + out.aux.kl

    whole = value_and_grad(loss, (0, 1))(p, x)
    for tile, kept in ((1, 0), (5, 0), (5, 2**20)):
        monkeypatch.setattr(tiling, "TILE_QUERIES", tile)
        monkeypatch.setattr(tiling, "KEPT_ELEMENTS", kept)
        tiled = value_and_grad(loss, (0, 1))(p, x)
        torch.testing.assert_close(tree.leaves(tiled), tree.leaves(whole), rtol=1e-12, atol=1e-12)
        functional = torch.func.grad(loss, (0, 1))(p, x)
        torch.testing.assert_close(
            tree.leaves(functional), tree.leaves(whole[1]), rtol=1e-12, atol=1e-12
        )


@STAGES
def test_recomputation_does_not_choose_again(cfg: dsa.Config):
    p, x = drawn(dsa.specs(cfg)), tokens(2, T)

    def loss(p: dsa.Params[Tensor], x: Tensor) -> Tensor:
        out = dsa.apply(p, x, cfg)
        return out.y.square().sum() + out.aux.kl

    with record_impls() as calls:
        recomputed = value_and_grad(remat(loss), (0, 1))(p, x)
    assert calls["sparse_attention", "reference"] == calls["head_probs", "reference"] == 2
    assert calls["index_topk", "reference"] == (1 if cfg.stage == "sparse" else 0)
    kept = value_and_grad(loss, (0, 1))(p, x)
    assert all(
        torch.equal(a, b) for a, b in zip(tree.leaves(recomputed), tree.leaves(kept), strict=True)
    )


@STAGES
def test_recomputation_of_many_tiles(monkeypatch: pytest.MonkeyPatch, cfg: dsa.Config):
    monkeypatch.setattr(tiling, "TILE_QUERIES", 2)
    monkeypatch.setattr(tiling, "KEPT_ELEMENTS", 0)
    p, x = drawn(dsa.specs(cfg)), tokens(2, T)

    def loss(p: dsa.Params[Tensor], x: Tensor) -> Tensor:
        out = dsa.apply(p, x, cfg)
        return out.y.square().sum() + out.aux.kl

    recomputed, kept = value_and_grad(remat(loss), (0, 1))(p, x), value_and_grad(loss, (0, 1))(p, x)
    assert all(
        torch.equal(a, b) for a, b in zip(tree.leaves(recomputed), tree.leaves(kept), strict=True)
    )


def test_bfloat16():
    cfg = dsa_config(3)
    p, x = drawn(dsa.specs(cfg), torch.bfloat16), tokens(2, T, torch.bfloat16)
    out, pull = vjp(lambda p, x: dsa.apply(p, x, cfg), p, x)
    assert (out.y.dtype, out.aux.kl.dtype) == (torch.bfloat16, torch.float32)
    grads = tree.leaves(pull(Output(torch.ones_like(out.y), Aux(torch.ones_like(out.aux.kl)))))
    assert all(g.dtype == torch.bfloat16 and g.isfinite().all() for g in grads)


def golden_layer() -> tuple[dsa.Params[Tensor], dsa.Config, dict[str, Tensor]]:
    g = load_file(GOLDEN)

    def weight(name: str) -> Tensor:
        w = g[f"hf.weight.{name}"]
        return w.T if w.ndim == 2 else w

    attn = mla.Params(
        w_qa=weight("q_a_proj.weight"),
        q_norm=weight("q_a_layernorm.weight"),
        w_qb=weight("q_b_proj.weight"),
        w_kva=weight("kv_a_proj_with_mqa.weight"),
        kv_norm=weight("kv_a_layernorm.weight"),
        w_kvb=weight("kv_b_proj.weight"),
        w_g=weight("g_proj.weight"),
        w_o=weight("o_proj.weight"),
    )
    index = indexer.Params(
        w_q=weight("indexer.wq_b.weight"),
        w_k=weight("indexer.wk.weight"),
        k_norm_weight=weight("indexer.k_norm.weight"),
        k_norm_bias=weight("indexer.k_norm.bias"),
        w_w=weight("indexer.weights_proj.weight"),
    )
    cfg = dsa.Config(
        mla.Config(64, 4, 24, 16, 16, 8, 16),
        indexer.Config(64, 24, num_heads=12, head_dim=16),
        topk=8,
    )
    return dsa.Params(attn, index), cfg, g


@pytest.mark.parametrize("gathers", [False, True], ids=["by head", "latents"])
def test_golden_layer(gathers: bool, monkeypatch: pytest.MonkeyPatch):
    """fp32; 5e-6 for the output, 2e-4 relative L2 for gradients."""
    monkeypatch.setattr(dsa, "_gathers", lambda *_: gathers)
    p, cfg, g = golden_layer()

    def projected(p: dsa.Params[Tensor], x: Tensor) -> Tensor:
        return (dsa.apply(p, x, cfg).y * g["hf.upstream"]).sum()

    out = dsa.apply(p, g["hf.x"], cfg)
    torch.testing.assert_close(out.y, g["hf.out"], rtol=0, atol=5e-6)
    _, (p_grad, x_grad) = value_and_grad(projected, (0, 1))(p, g["hf.x"])
    pairs = {
        "x": x_grad,
        "q_a_proj.weight": p_grad.attn.w_qa.T,
        "kv_b_proj.weight": p_grad.attn.w_kvb.T,
    }
    for name, grad in pairs.items():
        expected = g[f"hf.grad.{name}"]
        assert (grad - expected).norm() / expected.norm() < 2e-4


def test_latents_are_gathered_in_long_rows_where_a_fused_form_does_it():
    """More than 8 times top-k keys; whatever the number of queries, so on every rank alike."""
    rows = [torch.empty(1, 8 * 3 + more, 9) for more in (0, 1)]
    with use_impl(latent_attention="triton"):
        assert [dsa._gathers(dsa_config(3), kv) for kv in rows] == [False, True]
        assert not dsa._gathers(dsa_config(3, "dense_warmup"), rows[1])
    with use_impl(latent_attention="reference"):
        assert not dsa._gathers(dsa_config(3), rows[1])


def test_golden_sets_probabilities_and_kl():
    p, cfg, g = golden_layer()
    cq, heads = projected(p.attn, g["hf.x"], cfg.attn)
    index = indexer.apply(p.indexer, g["hf.x"], cq, cfg.indexer)
    chosen = dsa.index_topk(
        *index, *mla.visible_range(g["hf.x"], None), cfg.topk, cfg.indexer.scale
    )
    as_golden = chosen.sort(-1).values  # where -1 comes first
    assert torch.equal(as_golden, g["hf.indices_sorted"])
    lse = dsa.sparse_attention(*heads, chosen, cfg.attn.scale).lse
    probs = dsa.head_probs(*heads[:3], lse, chosen, cfg.attn.scale)
    slot = torch.where(chosen < 0, 32, chosen).long()
    spread = torch.zeros(2, 32, 33).scatter(-1, slot, probs)[..., :32]
    torch.testing.assert_close(spread, g["hf.head_sum_probs"], rtol=0, atol=5e-6)
    full = spread[:, 7:], index_scores(*index, cfg.indexer.scale)[:, 7:]
    teacher, scores = (f.gather(-1, slot[:, 7:]) for f in full)
    order = scores.argsort(-1, descending=True)
    torch.testing.assert_close(
        scores.gather(-1, order), g["kl.index_scores_sel"].sort(-1, descending=True)[0]
    )
    golden_order = g["kl.index_scores_sel"].argsort(-1, descending=True)
    expected = g["kl.teacher_head_sum_sel"].gather(-1, golden_order)
    torch.testing.assert_close(teacher.gather(-1, order), expected, rtol=0, atol=5e-6)
    first_rows = sum(_kl_of_first_rows(p, g["hf.x"][b : b + 1], cfg) for b in range(2))
    mean = (dsa.apply(p, g["hf.x"], cfg).aux.kl - first_rows) / 50
    torch.testing.assert_close(mean, g["kl.loss_mean_over_rows"], rtol=0, atol=5e-6)


def _kl_of_first_rows(p: dsa.Params[Tensor], x: Tensor, cfg: dsa.Config) -> Tensor:
    """The golden loss leaves out rows with fewer than 8 visible keys: the first 7, which see only
    themselves.
    """
    return dsa.apply(p, x[:, :7], cfg).aux.kl


def peak(cfg: dsa.Config, length: int) -> tuple[int, int]:
    """Peak of live bytes, and bytes of the largest tensor, over value and gradient of one long
    row.
    """
    p, x = (
        drawn(dsa.specs(cfg), torch.float32),
        tokens(1, length, torch.float32, width=cfg.hidden_size),
    )

    def loss(p: dsa.Params[Tensor], x: Tensor) -> Tensor:
        out = dsa.apply(p, x, cfg)
        return out.y.square().sum() + out.aux.kl

    with live_bytes() as live:
        value_and_grad(loss, (0, 1))(p, x)
    return live.peak, live.largest.nbytes


def limits(cfg: dsa.Config, length: int) -> tuple[int, int]:
    """What tiling allows.

    The largest tensor: the scores of a tile of queries, all heads, in float32. Together: a dozen of
    them (scores, masks, probabilities, and their gradients), twenty tensors as wide as the queries
    of one token, for all tokens, and four as wide as the sets (indices, probabilities).
    """
    tile = 4 * tiling.TILE_QUERIES * length * max(cfg.attn.num_heads, cfg.indexer.num_heads)
    width = cfg.attn.num_heads * (cfg.attn.qk_nope_head_dim + cfg.attn.qk_rope_head_dim)
    return 12 * tile + 20 * 4 * length * width + 4 * 4 * length * cfg.topk, tile


@STAGES
@pytest.mark.parametrize("length", [1024, pytest.param(8192, marks=pytest.mark.slow)])
def test_nothing_of_tokens_squared_is_alive(cfg: dsa.Config, length: int):
    big = dataclasses.replace(cfg, topk=64)
    most, largest = peak(big, length)
    allowed, allowed_largest = limits(big, length)
    assert most < allowed
    assert largest <= allowed_largest
    tokens_squared = 4 * length * length
    per_slot = 4 * length * 64 * (MLA.kv_lora_rank + MLA.qk_rope_head_dim)
    assert allowed_largest < min(tokens_squared * MLA.num_heads, tokens_squared, per_slot)


def test_the_memory_limit_notices_one_whole_tile(monkeypatch: pytest.MonkeyPatch):
    cfg = dsa_config(64)
    monkeypatch.setattr(tiling, "TILE_QUERIES", 1024)
    most, largest = peak(cfg, 1024)
    monkeypatch.undo()
    assert most > limits(cfg, 1024)[0]
    assert largest > limits(cfg, 1024)[1]


def test_declared_shapes_at_the_published_size():
    cfg = dsa.Config(mla.Config(7168, 96, 1536, 512, 128, 64, 128), indexer.Config(7168, 1536))
    assert parameters.count(dsa.specs(cfg)) == 232_196_096 + 7_438_592
    assert cfg.topk == 2048


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk": 0}, r"dsa\.Config\.topk=0"),
        ({"indexer": dataclasses.replace(INDEXER, hidden_size=11)}, r"indexer\.hidden_size=11"),
        ({"indexer": dataclasses.replace(INDEXER, q_lora_rank=6)}, r"indexer\.q_lora_rank=6"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(dsa_config(3), **change)
