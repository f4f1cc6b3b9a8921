"""The largest logit of each head against the scores of all pairs."""

import pytest
import torch

from k31fn import segments
from k31fn.kernels import tiling
from k31fn.kernels.max_logits import max_chosen_logits, max_logits
from k31fn.layers.mla import visible_range

B, T, H, N, P = 2, 9, 3, 4, 2


def drawn(heads_of_keys=H):
    shapes = (B, T, H, N + P), (B, T, heads_of_keys, N), (B, T, P)
    return [torch.randn(s, dtype=torch.float64) for s in shapes]


def scores(q, k, k_shared, scale):
    k = k.expand(B, T, H, N)
    keys = torch.cat([k, k_shared[:, :, None].expand(B, T, H, P)], dim=-1)
    return torch.einsum("bthk,bshk->bhts", q, keys) * scale


@pytest.mark.parametrize("heads_of_keys", [H, 1])
@pytest.mark.parametrize("tile", [64, 2])
def test_over_visible_keys(heads_of_keys, tile, monkeypatch):
    monkeypatch.setattr(tiling, "TILE_QUERIES", tile)
    q, k, shared = drawn(heads_of_keys)
    packing = segments.from_lengths([[4, 3], [9]], T)  # two tokens of padding
    start, stop = visible_range(q, packing)
    index = torch.arange(T)
    seen = (index >= start[..., None]) & (index < stop[..., None])
    every = scores(q, k, shared, 0.3)
    want = every.masked_fill(~seen[:, None], -torch.inf).amax((0, 2, 3))
    got = max_logits(q, k, shared, start, stop, 0.3)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    assert not torch.allclose(want, every.amax((0, 2, 3)))  # a lost mask would be seen


def test_over_chosen_keys():
    q, k, shared = drawn()
    chosen = (
        torch.stack([torch.randperm(T) for _ in range(B * T)])
        .view(B, T, T)[..., :3]
        .to(torch.int32)
    )
    chosen = torch.where(chosen <= torch.arange(T)[:, None], chosen, -1)
    seen = (torch.arange(T) == chosen[..., None]).any(2)
    want = scores(q, k, shared, 0.3).masked_fill(~seen[:, None], -torch.inf).amax((0, 2, 3))
    torch.testing.assert_close(
        max_chosen_logits(q, k, shared, chosen, 0.3), want, rtol=1e-12, atol=0
    )


def test_without_a_query_and_without_a_gradient():
    q, k, shared = (x.requires_grad_() for x in drawn())
    none = torch.zeros(B, T, dtype=torch.int64)
    got = max_logits(q, k, shared, none, none, 1.0)
    assert torch.equal(got, torch.full((H,), -1e30, dtype=torch.float64))
    assert not max_logits(q, k, shared, none, none + 1, 1.0).requires_grad
