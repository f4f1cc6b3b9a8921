from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from k31fn.kernels.topk import topk

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def by_sorting(scores: torch.Tensor, k: int, eligible: torch.Tensor) -> torch.Tensor:
    """Python's stable sort of (descending score, ascending position)."""
    rows = []
    for row, ok in zip(
        scores.flatten(0, -2).tolist(), eligible.flatten(0, -2).tolist(), strict=True
    ):
        best = sorted((s for s in range(len(row)) if ok[s]), key=lambda s: (-row[s], s))[:k]
        rows.append(best + [-1] * (min(k, len(row)) - len(best)))
    return torch.tensor(rows).reshape(*scores.shape[:-1], -1)


def assert_ties_go_to_the_lowest(choose: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    scores = (
        torch.randint(-2, 3, (6, 7, 40)).to(dtype) * 0.5
    )  # five values, so every row is full of ties
    eligible = torch.rand(6, 7, 40) < torch.rand(6, 7, 1)
    for k in (1, 5, 40, 60):
        assert torch.equal(choose(scores, k, eligible=eligible), by_sorting(scores, k, eligible))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_the_lowest_position(dtype: torch.dtype):
    assert_ties_go_to_the_lowest(topk, dtype)


def test_choosing_the_highest_position_is_noticed():
    def highest(scores: torch.Tensor, k: int, *, eligible: torch.Tensor) -> torch.Tensor:
        index = topk(scores.flip(-1), k, eligible=eligible.flip(-1))
        return torch.where(index < 0, -1, scores.shape[-1] - 1 - index)

    with pytest.raises(AssertionError):
        assert_ties_go_to_the_lowest(highest, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_equal_scores_choose_the_first_positions(dtype: torch.dtype):
    zeros = torch.tensor([0.0, -0.0] * 4, dtype=dtype)
    assert topk(zeros, 3).tolist() == [0, 1, 2]
    assert topk(-zeros, 8).tolist() == list(range(8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_scores_are_ordered(dtype: torch.dtype):
    info = torch.finfo(dtype)
    values = [info.max, torch.inf, 0.0, -info.tiny, info.tiny, info.min, -1.0, 1.0]
    scores = torch.tensor(values, dtype=dtype)
    assert topk(scores, 8).tolist() == [1, 0, 7, 4, 2, 3, 6, 5]
    assert topk(scores.masked_fill(scores < 0, -torch.inf), 8).tolist() == [
        1,
        0,
        7,
        4,
        2,
        -1,
        -1,
        -1,
    ]


def test_float64_scores_are_not_rounded():
    step = 2.0**-50
    scores = torch.tensor([1.0, 1.0 + step, 1.0 - step, 1.0 + 2 * step], dtype=torch.float64)
    assert topk(scores, 4).tolist() == [3, 1, 0, 2]
    assert topk(scores.to(torch.float32), 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_order_means_the_same_positions(dtype: torch.dtype):
    scores, eligible = torch.randn(5, 300).to(dtype), torch.rand(5, 300) < 0.3
    some = topk(scores, 90, eligible=eligible, ordered=False)
    assert torch.equal(some.sort(-1).values, topk(scores, 90, eligible=eligible).sort(-1).values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_under_vmap_and_grad(dtype: torch.dtype):
    scores = torch.randint(-2, 3, (4, 3, 20)).to(dtype)
    assert torch.equal(torch.vmap(lambda s: topk(s, 6))(scores), topk(scores, 6))

    def chosen_sum(s: torch.Tensor) -> torch.Tensor:
        return s.gather(-1, topk(s, 6)).sum()

    expected = torch.zeros_like(scores).scatter(-1, topk(scores, 6), 1.0)
    assert torch.equal(torch.vmap(torch.func.grad(chosen_sum))(scores), expected)


def test_k_below_one_is_refused():
    with pytest.raises(ValueError, match="k=0"):
        topk(torch.zeros(3), 0)
