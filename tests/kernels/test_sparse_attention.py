from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k31fn.kernels.attention import attention
from k31fn.kernels.sparse_attention import head_probs, sparse_attention
from tests.kernels import attention_oracles as oracle

ROWS, T = [[3, 5, 1], [4, 2]], 9
SCALE = 0.7
GOLDEN = Path(__file__).parents[1] / "golden" / "dsa.safetensors"


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    shapes = (2, T, 3, 6), (2, T, 3, 4), (2, T, 2), (2, T, 3, 5)
    return tuple(torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes)


def some_keys(topk: int) -> list[list[list[int]]]:
    return oracle.choose(torch.randn(2, T, T), oracle.seen_keys(ROWS, T), topk)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_equals_attention_one_query_at_a_time(dtype: torch.dtype):
    args, sets = inputs(), some_keys(3)
    expected, probs = oracle.attention(*args, sets, SCALE)
    slots = oracle.as_slots(sets, 3)
    out, lse = sparse_attention(*args, slots.to(dtype), SCALE)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    summed = torch.where(slots < 0, 0.0, probs.sum(2).gather(-1, slots.clamp(min=0)))
    mine = head_probs(*args[:3], lse, slots.to(dtype), SCALE)
    torch.testing.assert_close(mine, summed, rtol=0, atol=1e-12)
    assert torch.equal(out[1, 6:], torch.zeros_like(out[1, 6:]))


def test_log_sum_exp_of_the_chosen_scores():
    args, sets = inputs(), some_keys(3)
    lse = sparse_attention(*args, oracle.as_slots(sets, 3), SCALE).lse
    q, k, k_shared, _ = args
    whole = torch.cat([k, k_shared[:, :, None].expand(-1, -1, 3, -1)], -1)
    scores = SCALE * torch.einsum("bthk,bshk->bths", q, whole)
    for b, row in enumerate(sets):
        for t, keys in enumerate(row):
            expected = scores[b, t][:, keys].exp().sum(-1).log()
            if not keys:
                expected = torch.full((3,), 1e30, dtype=torch.float64)
            torch.testing.assert_close(lse[b, t], expected, rtol=0, atol=1e-12)


def test_probabilities_of_other_statistics_are_noticed():
    """Those of the heads in another order, or without the logarithm of the sum."""
    args, sets = inputs(), some_keys(3)
    slots = oracle.as_slots(sets, 3)
    lse = sparse_attention(*args, slots, SCALE).lse
    right = head_probs(*args[:3], lse, slots, SCALE)
    for wrong in (lse.roll(1, -1), lse - 1e-6):
        assert (head_probs(*args[:3], wrong, slots, SCALE) - right).abs().max() > 1e-7


def test_gradients_equal_those_of_the_oracle_and_none_flow_through_statistics():
    args, sets = inputs(), some_keys(3)
    upstream = torch.randn(2, T, 3, 5, dtype=torch.float64)

    def grads(f: Callable[[list[torch.Tensor]], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = [a.clone().requires_grad_() for a in args]
        return torch.autograd.grad((f(leaves) * upstream).sum(), leaves)

    mine = grads(lambda a: sparse_attention(*a, oracle.as_slots(sets, 3), SCALE).out)
    torch.testing.assert_close(
        mine, grads(lambda a: oracle.attention(*a, sets, SCALE)[0]), rtol=0, atol=1e-12
    )
    slots = oracle.as_slots(sets, 3)

    def teacher(q: torch.Tensor) -> torch.Tensor:
        lse = sparse_attention(q, *args[1:], slots, SCALE).lse
        return lse.sum() + head_probs(q, *args[1:3], lse, slots, SCALE).sum()

    assert torch.equal(torch.func.grad(teacher)(args[0]), torch.zeros_like(args[0]))


def test_all_visible_keys_is_dense_attention():
    args, seen = inputs(), oracle.seen_keys(ROWS, T)
    dense = attention(*args, *oracle.bounds(seen), SCALE)
    slots = oracle.as_slots(seen, T)
    out, lse = sparse_attention(*args, slots, SCALE)
    torch.testing.assert_close(out, dense, rtol=0, atol=1e-12)
    valid = oracle.bounds(seen)[1] > 0
    probs = head_probs(*args[:3], lse, slots, SCALE)
    torch.testing.assert_close(probs.sum(-1), 3.0 * valid.double(), rtol=0, atol=1e-12)


def test_absorbed_form_is_the_same():
    """k and v as products of a latent: the key weight moves into the query, the value weight behind
    the output.
    """
    q, _, k_shared, _ = inputs()
    c = torch.randn(2, T, 7, dtype=torch.float64)
    w_k, w_v = torch.randn(7, 3, 4, dtype=torch.float64), torch.randn(7, 3, 5, dtype=torch.float64)
    slots = oracle.as_slots(some_keys(3), 3)
    k, v = torch.einsum("bsr,rhn->bshn", c, w_k), torch.einsum("bsr,rhv->bshv", c, w_v)
    expanded = sparse_attention(q, k, k_shared, v, slots, SCALE)
    absorbed_q = torch.cat([torch.einsum("bthn,rhn->bthr", q[..., :4], w_k), q[..., 4:]], -1)
    absorbed = sparse_attention(absorbed_q, c[:, :, None], k_shared, c[:, :, None], slots, SCALE)
    out = torch.einsum("bthr,rhv->bthv", absorbed.out, w_v)
    torch.testing.assert_close(out, expanded.out, rtol=0, atol=1e-12)
    torch.testing.assert_close(absorbed.lse, expanded.lse, rtol=0, atol=1e-12)
    of_latents = head_probs(absorbed_q, c[:, :, None], k_shared, absorbed.lse, slots, SCALE)
    of_heads = head_probs(q, k, k_shared, expanded.lse, slots, SCALE)
    torch.testing.assert_close(of_latents, of_heads, rtol=0, atol=1e-12)


def test_golden_values():
    """fp32; 5e-6 is what a correct fp32 implementation meets for a single operator."""
    g = load_file(GOLDEN)
    leaves = [g[f"fla.{n}"].requires_grad_() for n in "qkv"]
    q, k, v = leaves
    none = k.new_zeros(*k.shape[:2], 0)
    out = sparse_attention(q, k, none, v, g["fla.indices_sorted"], 24**-0.5).out
    torch.testing.assert_close(out, g["fla.o"], rtol=0, atol=5e-6)
    grads = torch.autograd.grad((out * g["fla.upstream"]).sum(), leaves)
    for name, grad in zip("qkv", grads, strict=True):
        torch.testing.assert_close(grad, g[f"fla.grad.{name}"], rtol=0, atol=5e-6)
    whole = oracle.as_slots(oracle.seen_keys([[32], [32]], 32), 32)
    everything = sparse_attention(q, k, none, v, whole, 24**-0.5)
    torch.testing.assert_close(everything.out, g["fla.o_topk_ge_T"], rtol=0, atol=5e-6)
    probs = head_probs(q, k, none, everything.lse, whole, 24**-0.5)
    sums = torch.zeros(2, 32, 33).scatter(-1, torch.where(whole < 0, 32, whole), probs)[..., :32]
    torch.testing.assert_close(sums, g["kl.dense_head_sum_probs_of_fla_q_k"], rtol=0, atol=5e-6)


def test_golden_values_of_packed_documents():
    g = load_file(GOLDEN)
    q, k, v = (g[f"fla.{n}"][:1] for n in "qkv")
    cu = g["fla.varlen_cu"]
    first = cu[:-1].repeat_interleave(cu.diff())
    local = g["fla.varlen_indices_sorted_local"]
    slots = torch.where(local < 0, -1, local + first[:, None])
    out = sparse_attention(q, k, k.new_zeros(1, 32, 0), v, slots, 24**-0.5).out
    torch.testing.assert_close(out, g["fla.varlen_o"], rtol=0, atol=5e-6)


def test_a_position_that_is_there_twice_counts_once():
    """In the output, and in the probabilities, of which its slots have even shares."""
    args, sets = inputs(), some_keys(3)
    slots = oracle.as_slots(sets, 3)
    once = sparse_attention(*args, slots, SCALE)
    again = torch.cat([slots, slots[..., :1], slots[..., :1]], -1)
    twice = sparse_attention(*args, again, SCALE)
    assert torch.equal(twice.out, once.out)
    assert torch.equal(twice.lse, once.lse)
    of_once = head_probs(*args[:3], once.lse, slots, SCALE)
    of_twice = head_probs(*args[:3], twice.lse, again, SCALE)
    third = of_once[..., :1] / 3
    expected = torch.cat([third, of_once[..., 1:], third, third], -1)
    torch.testing.assert_close(of_twice, expected, rtol=0, atol=1e-12)
    sums = of_twice.sum(-1)[slots[..., 0] >= 0]
    assert (sums - args[0].shape[2]).abs().max() < 1e-12
