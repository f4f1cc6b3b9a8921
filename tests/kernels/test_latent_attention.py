"""The absorbed form over sets in plain torch, against the form with keys and values by head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn.autodiff import vjp
from k31fn.kernels.attention import attention
from k31fn.kernels.latent_attention import latent_attention, latent_probs
from k31fn.kernels.sparse_attention import head_probs, sparse_attention
from tests.kernels import attention_oracles as oracle

ROWS, T, R, SCALE = [[3, 5, 1], [4, 2]], 9, 7, 0.7
F64 = torch.float64
SETS = oracle.choose(torch.randn(2, T, T), oracle.seen_keys(ROWS, T), 3)


def leaves() -> list[Tensor]:
    """Queries, latents with the shared dims, and the two up-projections."""
    shapes = (2, T, 3, 4 + 2), (2, T, R + 2), (R, 3, 4), (R, 3, 5)
    return [torch.randn(shape, dtype=F64) for shape in shapes]


def absorbed(q: Tensor, kv: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    slots = oracle.as_slots(SETS, 3)
    latent = torch.cat([torch.einsum("bthn,rhn->bthr", q[..., :4], w_uk), q[..., 4:]], -1)
    out, lse = latent_attention(latent, kv, slots, SCALE, R)
    probs = latent_probs(latent, kv, lse, slots, SCALE)
    return torch.einsum("bthr,rhv->bthv", out, w_uv), lse, probs


def expanded(q: Tensor, kv: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    slots = oracle.as_slots(SETS, 3)
    k = torch.einsum("bsr,rhn->bshn", kv[..., :R], w_uk)
    v = torch.einsum("bsr,rhv->bshv", kv[..., :R], w_uv)
    out, lse = sparse_attention(q, k, kv[..., R:], v, slots, SCALE)
    return out, lse, head_probs(q, k, kv[..., R:], lse, slots, SCALE)


def test_equals_the_expanded_form_with_the_gradients_of_both_up_projections():
    args, ct = leaves(), torch.randn(2, T, 3, 5, dtype=F64)

    def results(f: Any) -> list[Tensor]:
        parts, pull = vjp(f, *args)
        # cotangents of statistics and probabilities: no gradient flows through either
        return [*parts, *pull((ct, *map(torch.ones_like, parts[1:])))]

    torch.testing.assert_close(results(absorbed), results(expanded), rtol=0, atol=1e-12)


def test_a_shared_dim_left_out_of_the_scores_is_noticed():
    args = leaves()
    right = absorbed(*args)[0]
    args[1][..., R:] = 0
    assert (absorbed(*args)[0] - right).abs().max() > 1e-2


def test_all_visible_keys_is_dense_attention():
    q, kv = torch.randn(2, T, 3, R + 2, dtype=F64), torch.randn(2, T, R + 2, dtype=F64)
    seen = oracle.seen_keys(ROWS, T)
    out, _ = latent_attention(q, kv, oracle.as_slots(seen, T), SCALE, R)
    latent = kv[:, :, None, :R]
    dense = attention(q, latent, kv[..., R:], latent, *oracle.bounds(seen), SCALE)
    torch.testing.assert_close(out, dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_output_has_the_dtype_of_the_queries_and_the_statistics_do_not(dtype: torch.dtype):
    q, kv = torch.randn(2, T, 3, R + 2).to(dtype), torch.randn(2, T, R + 2).to(dtype)
    out, lse = latent_attention(q, kv, oracle.as_slots(SETS, 3), SCALE, R)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
