"""Fused attention over sets and over intervals, against the references in float64.

Tolerances, relative to the largest element: float32 sums of some 50 products, 1e-5. bfloat16:
probabilities and scores' gradients are rounded to 2^-9 before their products, where the interpreter
cuts to 2^-8; gradients add two such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn.autodiff import vjp
from k31fn.kernels.attention import attention
from k31fn.kernels.interval_attention import interval_attention
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.kernels.sparse_attention import head_probs, sparse_attention
from k31fn.kernels.sparse_attention.reference import as_mask
from k31fn.testing import assert_op_matches
from tests.kernels.fused import DEVICE, poisoned

op = pytest.importorskip("k31fn.kernels.attention.triton.op", exc_type=ImportError)
probs = pytest.importorskip("k31fn.kernels.sparse_attention.triton.probs", exc_type=ImportError)
masks = pytest.importorskip("k31fn.kernels.attention.triton.masks", exc_type=ImportError)
sets = pytest.importorskip("k31fn.kernels.sparse_attention.triton.selection", exc_type=ImportError)
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-7, 2**-6)}
# tokens and heads: several tiles, in the interpreter of 32 queries and 32 keys (bfloat16: 64)
SIZES = {torch.float32: (40, 2), torch.bfloat16: (70, 1)}
SCALE = 0.4


def inputs(T: int, H: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = (1, T, H, 10), (1, T, H, 7), (1, T, 3), (1, T, H, 5)
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]


def chosen(T: int, M: int) -> Tensor:
    """Sets of at most M keys, -1 anywhere, some queries with none, and no key of 3 .. 7."""
    slots = torch.full((1, T, M), -1, dtype=torch.int32)
    allowed = torch.tensor([s for s in range(T) if not 3 <= s < 8])
    for t in range(T):
        own = allowed[allowed <= t]
        own = own[torch.randperm(len(own))[:M]] if t % 11 != 5 else own[:0]
        slots[0, t, M - len(own) :] = own.int()
    return slots.to(DEVICE)


def documents(T: int) -> tuple[Tensor, Tensor]:
    """Two documents, and padding of which one query has an interval that is not at 0."""
    index = torch.arange(T)
    start = torch.where(index < T // 3, 0, T // 3)
    stop = index + 1
    stop[-4:] = start[-4:]
    return start[None].to(DEVICE), stop[None].to(DEVICE)


def errors(f: Callable[..., Any], args: list[Tensor]) -> list[float]:
    """Of values and gradients, relative to the largest element of the reference in float64."""

    def results(args: list[Tensor]) -> list[Tensor]:
        out, pull = vjp(f, *args)
        parts = out if isinstance(out, tuple) else (out,)
        ct = torch.linspace(-1, 1, parts[0].numel(), device=DEVICE).view(parts[0].shape)
        cts = (ct.to(parts[0].dtype), *[torch.ones_like(x) for x in parts[1:]])
        return [*parts, *pull(type(out)(*cts) if isinstance(out, tuple) else cts[0])]

    fused = dict.fromkeys(("sparse_attention", "attention", "interval_attention"), "triton")
    chosen_impl = use_impl(**fused)
    with chosen_impl, record_impls() as calls, poisoned():
        ours = results(args)
    assert {name for _, name in calls} == {"triton"}
    exact = results([x.double() for x in args])
    assert len(ours) == len(exact)
    pairs = zip(ours, exact, strict=True)
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_sets_equal_the_reference(dtype: torch.dtype):
    T, H = SIZES[dtype]
    slots = chosen(T, 9)
    found = errors(lambda *x: sparse_attention(*x, slots, SCALE), inputs(T, H, dtype))
    of_values, of_gradients = TOLERANCE[dtype]
    assert max(found[:2]) < of_values, found
    assert max(found[2:]) < of_gradients, found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_intervals_equal_the_reference(dtype: torch.dtype):
    T, H = SIZES[dtype]
    bounds = documents(T)
    found = errors(lambda *x: attention(*x, *bounds, SCALE), inputs(T, H, dtype))
    assert max(found) < TOLERANCE[dtype][1], found


def test_images_equal_the_reference():
    """Intervals that reach behind the query, and no shared dims."""
    q, k, v = (torch.randn(1, 40, 1, d, device=DEVICE) for d in (6, 6, 5))
    index = torch.arange(40, device=DEVICE)[None]
    start = torch.where(index < 7, 0, 7)
    stop = torch.where(index < 7, 7, torch.where(index < 37, 37, start))
    found = errors(lambda *x: interval_attention(*x, start, stop, SCALE), [q, k, v])
    assert max(found) < 1e-5, found


def test_under_vmap():
    args = (*inputs(34, 1), chosen(34, 5), SCALE)
    assert_op_matches(
        sparse_attention, "triton", args, rtol=1e-5, atol=1e-5, reference_dtype=torch.float64
    )


def test_a_tile_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch):
    def shorter(*args: Any) -> tuple[Tensor, Tensor]:
        lists, counts = masks.tile_lists(*args)
        return lists, (counts - 1).clamp(min=0)

    monkeypatch.setattr(op, "tile_lists", shorter)
    slots = chosen(40, 40)
    found = errors(lambda *x: sparse_attention(*x, slots, SCALE), inputs(40, 1))
    assert max(found) > 1e-2


def test_all_visible_keys_are_dense_attention_and_large_scores_stay_finite():
    args = inputs(40, 1)
    args[0] *= 100
    start, stop = documents(40)
    index = torch.arange(40, device=DEVICE).expand(1, 40, 40)
    seen = (index >= start[..., None]) & (index < stop[..., None])
    with use_impl(sparse_attention="triton", attention="triton"):
        dense = attention(*args, start, stop, SCALE)
        out, lse = sparse_attention(*args, torch.where(seen, index, -1), SCALE)
    assert torch.equal(out, dense)
    assert out.isfinite().all()
    assert torch.equal(lse[0, -4:], torch.full_like(lse[0, -4:], 1e30))
    assert torch.equal(out[0, -4:], torch.zeros_like(out[0, -4:]))


def test_tiles_that_no_query_sees_are_not_read():
    """Keys from 32 on are NaN, and all queries chose from the first ones."""
    args = inputs(40, 1)
    for x in args[1:]:
        x[:, 32:] = torch.nan
    slots = torch.arange(40, device=DEVICE).clamp(max=20)[None, :, None]
    with use_impl(sparse_attention="triton"):
        out, pull = vjp(lambda *x: sparse_attention(*x, slots, SCALE).out, *args)
        grads = pull(torch.ones_like(out))
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_teacher_equals_the_references(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """From the same statistics, in strips of one tile; rows sum to the number of heads."""
    monkeypatch.setattr(probs, "_STRIP", 1)
    args, slots = inputs(40, 2, dtype), chosen(40, 6)
    exact = [x.double() for x in args]
    lse = sparse_attention(*exact, slots, SCALE).lse
    expected = head_probs(*exact[:3], lse, slots, SCALE)
    with use_impl(head_probs="triton"), record_impls() as calls, poisoned():
        ours = head_probs(*args[:3], lse.float(), slots, SCALE)
    assert calls == {("head_probs", "triton"): 1}
    assert (ours - expected).abs().max() < 1e-5
    some = (slots >= 0).any(-1)
    assert (ours.sum(-1) - 2.0 * some).abs().max() < 1e-5


def test_a_repeated_position_is_refused_as_nan():
    args, slots = inputs(20, 1), chosen(20, 4)
    lse = sparse_attention(*args, slots, SCALE).lse
    again = torch.cat([slots, slots[..., 3:]], -1)
    with use_impl(head_probs="triton"):
        ours = head_probs(*args[:3], lse, again, SCALE)
    some = (slots >= 0).any(-1)
    assert ours[some].isnan().any(-1).all()
    assert (ours[~some] == 0).all()


def test_bit_masks():
    slots = chosen(70, 9)
    slots[0, 60:, 0] = slots[0, 60:, 8]  # a position that is there twice
    words, words_by = sets.selection(slots, 70)
    assert words.shape == words_by.shape == (1, 4, 128)
    expected = as_mask(slots, 70)
    for packed, mask in ((words.mT, expected), (words_by.mT, expected.mT)):
        bits = (packed[..., None] >> torch.arange(32, device=DEVICE)) & 1
        assert torch.equal(bits.flatten(2)[:, :70, :70].bool(), mask)
        assert bits.sum() == mask.sum()


def test_lists_of_tiles():
    seen = masks.bounds(*documents(100))
    blocks = masks.occupied(seen, 100, False)
    lists, counts = masks.tile_lists(blocks, 32, 64)
    # the second document begins at key 33, and ends with the query before the last tile
    assert counts.tolist() == [[1, 1, 2, 0]]
    assert lists[0, 2].tolist() == [0, 1]
    by_keys, counts = masks.tile_lists(blocks.mT, 32, 32)
    assert counts.tolist() == [[2, 2, 1, 0]]
    assert by_keys[0, 1].tolist()[:2] == [1, 2]


def test_refusals():
    q, k, k_shared, v = inputs(4, 2)
    start, stop = documents(4)
    refuses = op.accepts
    takes = attention.implementations["absorbed"].accepts
    assert refuses(q, k, k_shared, v, start, stop, 1.0) == ""
    one = k[:, :, :1], k_shared, v[:, :, :1], start, stop, 1.0
    assert "absorbed" in refuses(q, *one)
    # in decoding: there is another implementation for it
    assert takes(q, *one) == ""
    assert "one head of keys for all" in takes(q, k, k_shared, v, start, stop, 1.0)
    assert "one dtype" in refuses(q, k.double(), k_shared, v, start, stop, 1.0)
    assert "at most 256" in refuses(q, k, k_shared, v.repeat(1, 1, 1, 60), start, stop, 1.0)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_at_full_width(dtype: torch.dtype):
    """Heads of 192 and 128 dims over many tiles; twenty repeats are bit-identical."""
    shapes = (1, 700, 3, 192), (1, 700, 3, 128), (1, 700, 64), (1, 700, 3, 128)
    args = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    slots, bounds = chosen(700, 96), documents(700)

    def by_sets(*x: Tensor) -> Tensor:
        return sparse_attention(*x, slots, 192**-0.5).out

    def by_intervals(*x: Tensor) -> Tensor:
        return attention(*x, *bounds, 192**-0.5)

    for call in (by_sets, by_intervals):
        assert max(errors(call, args)) < TOLERANCE[dtype][1]
        runs = [outcome(call, args) for _ in range(20)]
        for run in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def outcome(call: Callable[..., Tensor], args: list[Tensor]) -> list[Tensor]:
    with use_impl(sparse_attention="triton", attention="triton"):
        out, pull = vjp(call, *args)
        return [out, *pull(torch.ones_like(out))]
