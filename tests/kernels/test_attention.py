from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from k31fn.kernels.attention import attention
from k31fn.testing import live_bytes
from tests.kernels import attention_oracles as oracle

ROWS, T = [[3, 5, 1], [4, 2]], 9
SCALE = 0.7


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    shapes = (2, T, 3, 6), (2, T, 3, 4), (2, T, 2), (2, T, 3, 5)
    return tuple(torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes)


def test_equals_attention_one_query_at_a_time():
    args, seen = inputs(), oracle.seen_keys(ROWS, T)
    expected, _ = oracle.attention(*args, seen, SCALE)
    out = attention(*args, *oracle.bounds(seen), SCALE)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert torch.equal(out[1, 6:], torch.zeros_like(out[1, 6:]))


@pytest.mark.parametrize(
    "shift", [(1, 0), (0, -1), (-1, 0)], ids=["loses the first", "not itself", "other document"]
)
def test_a_mask_off_by_one_is_noticed(shift: tuple[int, int]):
    args, seen = inputs(), oracle.seen_keys(ROWS, T)
    expected, _ = oracle.attention(*args, seen, SCALE)
    start, stop = oracle.bounds(seen)
    out = attention(*args, start + shift[0], stop + shift[1], SCALE)
    assert (out - expected).abs().max() > 1e-3


def test_gradients_equal_those_of_the_oracle():
    args, seen = inputs(), oracle.seen_keys(ROWS, T)
    upstream = torch.randn(2, T, 3, 5, dtype=torch.float64)

    def grads(f: Callable[[list[torch.Tensor]], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = [a.clone().requires_grad_() for a in args]
        return torch.autograd.grad((f(leaves) * upstream).sum(), leaves)

    mine = grads(lambda a: attention(*a, *oracle.bounds(seen), SCALE))
    torch.testing.assert_close(
        mine, grads(lambda a: oracle.attention(*a, seen, SCALE)[0]), rtol=0, atol=1e-12
    )


def test_queries_that_continue_cached_keys():
    args, seen = inputs(), oracle.seen_keys([[T], [T]], T)
    start, stop = oracle.bounds(seen)
    whole = attention(*args, start, stop, SCALE)
    q, *keys = args
    last = attention(q[:, 6:], *keys, start[:, 6:], stop[:, 6:], SCALE)
    torch.testing.assert_close(last, whole[:, 6:], rtol=0, atol=1e-12)


def test_one_head_of_keys_for_all_is_not_copied_to_each():
    """The absorbed form: equal to copies of the head; the largest tensor made are the scores, [B H
    T S].
    """
    B, H, S = 2, 32, 100
    q, k_shared = (
        torch.randn(B, 1, H, 6, dtype=torch.float64),
        torch.randn(B, S, 2, dtype=torch.float64),
    )
    k, v = (
        torch.randn(B, S, 1, 4, dtype=torch.float64),
        torch.randn(B, S, 1, 5, dtype=torch.float64),
    )
    start, stop = torch.tensor([[3], [0]]), torch.tensor([[90], [S]])
    with live_bytes() as live:
        out = attention(q, k, k_shared, v, start, stop, SCALE)
    many = k.expand(-1, -1, H, -1), k_shared, v.expand(-1, -1, H, -1)
    torch.testing.assert_close(out, attention(q, *many, start, stop, SCALE), rtol=0, atol=1e-12)
    assert live.largest is not None
    assert live.largest.nbytes <= B * H * S * 8


def test_bfloat16_inputs_give_float32_output():
    args, seen = inputs(torch.bfloat16), oracle.seen_keys(ROWS, T)
    out = attention(*args, *oracle.bounds(seen), SCALE)
    expected, _ = oracle.attention(*[a.double() for a in args], seen, SCALE)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_scores_far_apart_stay_finite():
    q, k, k_shared, v = inputs(torch.float32)
    out = attention(q * 1e4, k * 1e4, k_shared, v, *oracle.bounds(oracle.seen_keys(ROWS, T)), SCALE)
    assert out.isfinite().all()
