from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k31fn.autodiff import value_and_grad
from k31fn.kernels.indexer_kl import indexer_kl
from tests.kernels import attention_oracles as oracle

ROWS, T = [[3, 8, 1], [7, 2]], 12
SCALE = 0.6
GOLDEN = Path(__file__).parents[1] / "golden" / "dsa.safetensors"


def kl_of_scores(
    scores: torch.Tensor, teacher: torch.Tensor, topk_idx: torch.Tensor
) -> torch.Tensor:
    """The op on given scores ``[B T S]``: with unit vectors as queries and keys, the head weights
    are the scores.
    """
    B, T, S = scores.shape
    unit = torch.eye(S, dtype=scores.dtype)
    return indexer_kl(unit.expand(B, T, S, S), unit.expand(B, S, S), scores, teacher, topk_idx, 1.0)


def problem(topk: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor, float]:
    """Random ``(q, k, w)``, a teacher from two heads, slots, and the loss by loops."""
    q, k, w = (torch.randn(s, dtype=torch.float64) for s in [(2, T, 3, 4), (2, T, 4), (2, T, 3)])
    scores = oracle.index_scores(q, k, w, SCALE)
    sets = oracle.choose(torch.randn(2, T, T), oracle.seen_keys(ROWS, T), topk)
    heads = torch.zeros(2, T, 2, T, dtype=torch.float64)
    for b, row in enumerate(sets):
        for t, keys in enumerate(row):
            heads[b, t, :, keys] = torch.softmax(torch.randn(2, len(keys), dtype=torch.float64), -1)
    slots = oracle.as_slots(sets, topk)
    teacher = torch.where(slots < 0, 0.0, heads.mean(2).gather(-1, slots.clamp(min=0)))
    return (q, k, w), teacher, slots, oracle.kl(heads, scores, sets)


@pytest.mark.parametrize("topk", [1, 4, 12])
def test_equals_the_loss_one_query_at_a_time(topk: int):
    args, teacher, slots, expected = problem(topk)
    assert indexer_kl(*args, teacher, slots, SCALE).item() == pytest.approx(expected, abs=1e-12)


def test_exact_numbers_with_a_padded_row():
    """Teacher [.5, .5], scores [0, ln 3], and a row of padding: 0.1438 and (-.25, +.25)."""
    scores = torch.tensor([[[0.0, math.log(3.0)], [5.0, -7.0]]], dtype=torch.float64)
    teacher = torch.tensor([[[0.5, 0.5], [0.0, 0.0]]], dtype=torch.float64)
    slots = torch.tensor([[[0, 1], [-1, -1]]])
    value, grad = value_and_grad(kl_of_scores)(scores, teacher, slots)
    assert value.item() == pytest.approx(0.5 * math.log(4.0 / 3.0), abs=1e-15)
    assert value.item() == pytest.approx(0.1438, abs=5e-5)
    torch.testing.assert_close(
        grad, torch.tensor([[[-0.25, 0.25], [0.0, 0.0]]], dtype=torch.float64), rtol=0, atol=1e-15
    )
    averaged_over_padding = value.item() / slots.shape[1]
    assert averaged_over_padding != pytest.approx(0.1438, abs=5e-5)


def test_gradient_is_softmax_minus_teacher_on_the_chosen_keys():
    _, teacher, slots, _ = problem(4)
    scores = torch.randn(2, T, T, dtype=torch.float64)
    _, grad = value_and_grad(kl_of_scores)(scores, teacher, slots)
    expected = torch.zeros_like(scores)
    for b in range(2):
        for t in range(T):
            keys = [s for s in slots[b, t].tolist() if s >= 0]
            p = teacher[b, t][slots[b, t] >= 0]
            expected[b, t, keys] = torch.softmax(scores[b, t, keys], -1) - p
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)


def test_gradients_to_queries_keys_and_weights():
    args, teacher, slots, _ = problem(4)

    def by_formula(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        scores = oracle.index_scores(q, k, w, SCALE)
        total = scores.new_zeros(())
        for b in range(2):
            for t in range(T):
                keys = [s for s in slots[b, t].tolist() if s >= 0]
                p = teacher[b, t][slots[b, t] >= 0]
                total = (
                    total - (p * torch.log_softmax(scores[b, t, keys], -1)).sum() if keys else total
                )
        return total

    _, mine = value_and_grad(lambda *a: indexer_kl(*a, teacher, slots, SCALE), (0, 1, 2))(*args)
    _, expected = value_and_grad(by_formula, (0, 1, 2))(*args)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


def test_no_gradient_to_the_teacher():
    args, teacher, slots, _ = problem(4)
    grad = torch.func.grad(lambda p: indexer_kl(*args, p, slots, SCALE))(teacher)
    assert torch.equal(grad, torch.zeros_like(teacher))


def test_a_perfect_indexer_has_no_loss_even_where_the_teacher_is_zero():
    slots = torch.arange(4).expand(1, 2, 4)
    scores = torch.tensor([[[0.0, 1.0, 2.0, -1000.0], [0.0, 0.0, 0.0, 0.0]]], dtype=torch.float64)
    value, grad = value_and_grad(kl_of_scores)(scores, torch.softmax(scores, -1), slots)
    assert value.item() == pytest.approx(0.0, abs=1e-15)
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-15)


def test_all_padding_is_zero_and_finite():
    args, teacher, slots, _ = problem(4)
    nothing = torch.zeros_like(teacher), torch.full_like(slots, -1)
    value, grads = value_and_grad(lambda *a: indexer_kl(*a, *nothing, SCALE), (0, 1, 2))(*args)
    assert value.item() == 0.0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


def test_golden_values():
    """The golden loss is a mean over rows; the teacher there is a sum over 4 heads."""
    g = load_file(GOLDEN)
    scores, teacher = g["kl.index_scores_sel"], g["kl.teacher_head_sum_sel"] / 4
    slots = torch.arange(8).expand(2, 25, 8)
    rows = 2 * 25
    value, grad = value_and_grad(kl_of_scores)(scores, teacher, slots)
    torch.testing.assert_close(value / rows, g["kl.loss_mean_over_rows"], rtol=0, atol=1e-6)
    torch.testing.assert_close(grad / rows, g["kl.grad_index_scores"], rtol=0, atol=1e-7)


def test_a_position_that_is_there_twice_counts_once():
    """With the shares of the teacher that ``head_probs`` gives its slots."""
    args, teacher, slots, expected = problem(4)
    half = teacher[..., :1] / 2
    twice = torch.cat([half, teacher[..., 1:], half], -1)
    again = torch.cat([slots, slots[..., :1]], -1)
    assert indexer_kl(*args, twice, again, SCALE).item() == pytest.approx(expected, abs=1e-12)
    grads = torch.func.grad(lambda q: indexer_kl(q, *args[1:], teacher, slots, SCALE))(args[0])
    of_twice = torch.func.grad(lambda q: indexer_kl(q, *args[1:], twice, again, SCALE))(args[0])
    torch.testing.assert_close(of_twice, grads, rtol=0, atol=1e-12)
