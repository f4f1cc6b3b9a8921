from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k31fn.kernels.indexer import index_scores, index_topk
from tests.kernels import attention_oracles as oracle

ROWS, T = [[3, 8, 1], [7, 2]], 12
SCALE = 0.6
GOLDEN = Path(__file__).parents[1] / "golden" / "dsa.safetensors"


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.randn(s, dtype=torch.float64).to(dtype) for s in [(2, T, 3, 4), (2, T, 4), (2, T, 3)]
    )


def test_scores_equal_the_formula():
    q, k, w = inputs()
    expected = oracle.index_scores(q, k, w, SCALE)
    torch.testing.assert_close(index_scores(q, k, w, SCALE), expected, rtol=0, atol=1e-12)
    assert (expected < 0).any(), "weights may be negative"


def test_a_score_is_the_weighted_sum_over_heads_of_relu():
    """Head scores -3 and 2 with weights 1 give 2, not -1 (no ReLU) or 0 (ReLU of the sum)."""
    q = torch.tensor([-3.0, 2.0]).reshape(1, 1, 2, 1)
    assert index_scores(q, torch.ones(1, 1, 1), torch.ones(1, 1, 2), 1.0).item() == 2.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("topk", [1, 3, 8, 100])
def test_chooses_the_best_visible_keys(topk: int, dtype: torch.dtype):
    q, k, w = inputs(dtype)
    seen = oracle.seen_keys(ROWS, T)
    chosen = index_topk(q, k, w, *oracle.bounds(seen), topk, SCALE)
    assert chosen.shape == (2, T, min(topk, T))
    assert chosen.dtype == torch.int32
    expected = oracle.choose(
        oracle.index_scores(q.double(), k.double(), w.double(), SCALE), seen, topk
    )
    assert oracle.as_sets(chosen) == expected
    # by position, and -1 after them
    slots = torch.where(chosen < 0, T, chosen)
    assert torch.equal(slots, slots.sort(-1).values)


@pytest.mark.parametrize("value", [0.0, -1.0], ids=["every ReLU closed", "equal"])
def test_ties_go_to_the_lowest_visible_position(value: float):
    """With few heads every ReLU can be closed: all scores are then +0.0 or -0.0."""
    seen = oracle.seen_keys(ROWS, T)
    q, k = torch.full((2, T, 3, 4), -1.0), torch.ones(2, T, 4)
    q = q if value == 0.0 else -q
    w = torch.tensor([1.0, -1.0, value]).expand(2, T, 3)
    chosen = oracle.as_sets(index_topk(q, k, w, *oracle.bounds(seen), 2, SCALE))
    assert chosen == [[keys[:2] for keys in row] for row in seen]


def test_a_key_of_another_document_the_future_or_padding_is_never_chosen():
    seen = oracle.seen_keys([[5, 20, 30], [1, 2, 60], [64], [9]], 64)
    for _ in range(20):
        q, k, w = torch.randn(4, 64, 2, 3), torch.randn(4, 64, 3), torch.randn(4, 64, 2)
        chosen = oracle.as_sets(index_topk(q, k, w, *oracle.bounds(seen), 16, SCALE))
        for row, seen_row in zip(chosen, seen, strict=True):
            for some, keys in zip(row, seen_row, strict=True):
                assert set(some) <= set(keys)
                assert len(some) == min(16, len(keys))


def test_tiles_and_prefixes_choose_the_same():
    seen = oracle.seen_keys([[100, 400], [333]], 500)
    q, k, w = torch.randn(2, 500, 2, 3), torch.randn(2, 500, 3), torch.randn(2, 500, 2)
    chosen = index_topk(q, k, w, *oracle.bounds(seen), 40, SCALE)
    expected = oracle.choose(index_scores(q, k, w, SCALE), seen, 40)
    assert oracle.as_sets(chosen) == expected


def test_golden_scores_and_sets():
    g = load_file(GOLDEN)
    q, k, w = g["fla.q_idx"], g["fla.k_idx"], g["fla.w_idx"]
    visible = g["fla.index_scores"] > -torch.inf
    scores = index_scores(q, k, w, 16**-0.5)
    torch.testing.assert_close(scores[visible], g["fla.index_scores"][visible], rtol=0, atol=5e-6)
    bounds = oracle.bounds(oracle.seen_keys([[32], [32]], 32))
    chosen = index_topk(q, k, w, *bounds, 8, 16**-0.5)
    assert torch.equal(chosen.sort(-1).values, g["fla.indices_sorted"])
    lengths = g["fla.varlen_cu"].diff().tolist()
    seen = oracle.seen_keys([lengths], 32)
    packed = index_topk(q[:1], k[:1], w[:1], *oracle.bounds(seen), 8, 16**-0.5)
    local = torch.where(packed < 0, -1, packed - oracle.bounds(seen)[0][..., None])
    assert torch.equal(local.sort(-1).values, g["fla.varlen_indices_sorted_local"])
