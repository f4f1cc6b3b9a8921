from __future__ import annotations

import pytest
import torch

from k31fn.kernels import tiling
from k31fn.kernels.interval_attention import interval_attention

SCALE = 0.7


def inputs(T: int, S: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, n, 3, d, dtype=torch.float64) for n, d in ((T, 4), (S, 4), (S, 5)))


def oracle(q, k, v, start, stop):
    """One query after the other, over its own keys only."""
    rows = []
    for b in range(len(q)):
        for t in range(q.shape[1]):
            keys = slice(int(start[b, t]), int(stop[b, t]))
            if keys.start == keys.stop:
                rows.append(torch.zeros_like(v[0, 0]))
                continue
            weights = torch.softmax(SCALE * torch.einsum("hk,shk->hs", q[b, t], k[b, keys]), -1)
            rows.append(torch.einsum("hs,shv->hv", weights, v[b, keys]))
    return torch.stack(rows).unflatten(0, q.shape[:2])


def images(*rows: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    start, stop = torch.zeros(2, len(rows), length, dtype=torch.int64).unbind()
    for row, sizes in enumerate(rows):
        at = 0
        for size in sizes:
            start[row, at : at + size], stop[row, at : at + size] = at, at + size
            at += size
    return start, stop


@pytest.mark.parametrize("kept", [0, 2**20], ids=["recomputed", "kept"])
def test_equals_attention_one_query_at_a_time(kept: int, monkeypatch: pytest.MonkeyPatch):
    """Three tiles of queries, an image across a tile's edge, and keys after the query; values and
    gradients.
    """
    monkeypatch.setattr(tiling, "KEPT_ELEMENTS", kept)
    monkeypatch.setattr(tiling, "TILE_QUERIES", 4)
    args, bounds = inputs(11, 11), images([6, 3], [1, 10], length=11)
    ct = torch.randn(2, 11, 3, 5, dtype=torch.float64)

    def run(f):
        leaves = [a.clone().requires_grad_() for a in args]
        y = f(*leaves)
        return y.detach(), *torch.autograd.grad((y * ct).sum(), leaves)

    mine = run(lambda *a: interval_attention(*a, *bounds, SCALE))
    torch.testing.assert_close(mine, run(lambda *a: oracle(*a, *bounds)), rtol=0, atol=1e-12)
    assert torch.equal(mine[0][0, 9:], torch.zeros(2, 3, 5, dtype=torch.float64))
    causal = interval_attention(
        *args, bounds[0], torch.minimum(bounds[1], torch.arange(11) + 1), SCALE
    )
    assert (causal - mine[0]).abs().max() > 1e-2


def test_more_keys_than_queries():
    """A slice of the queries against the keys of the whole row, as under context parallelism."""
    args, (start, stop) = inputs(8, 8), images([5, 3], [8], length=8)
    whole = interval_attention(*args, start, stop, SCALE)
    part = interval_attention(args[0][:, 2:6], *args[1:], start[:, 2:6], stop[:, 2:6], SCALE)
    torch.testing.assert_close(part, whole[:, 2:6], rtol=0, atol=1e-13)


def test_narrow_inputs_give_float32():
    args, bounds = inputs(6, 6), images([4], [2, 4], length=6)
    out = interval_attention(*(a.bfloat16() for a in args), *bounds, SCALE)
    assert out.dtype == torch.float32
    exact = interval_attention(*(a.bfloat16().double() for a in args), *bounds, SCALE)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
