"""The fused choice of keys against the reference: sets are equal, ties included.

Scores of the two differ by 1e-6, so inputs are drawn on a grid on which sums are exact.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k31fn.kernels.indexer import index_topk
from k31fn.kernels.registry import record_impls, use_impl
from tests.kernels.fused import DEVICE, poisoned

kernels = pytest.importorskip("k31fn.kernels.indexer.triton", exc_type=ImportError)


def inputs(T: int, J: int, dtype: torch.dtype, S: int = 0) -> tuple[Tensor, ...]:
    """Small integers: many scores are equal, and none is rounded."""
    shapes = (1, T, J, 6), (1, S or T, 6), (1, T, J)
    drawn = [torch.randint(-3, 4, shape, device=DEVICE) for shape in shapes]
    q, k, w = (x.to(dtype) for x in drawn)
    return q, k, w.float()


def both(args: tuple[Tensor, ...], start: Tensor, stop: Tensor, topk: int) -> list[Tensor]:
    where = start[None].to(DEVICE), stop[None].to(DEVICE)
    with use_impl(index_topk="triton"), record_impls() as calls, poisoned():
        ours = index_topk(*args, *where, topk, 0.5)
    assert calls == {("index_topk", "triton"): 1}
    return [ours, index_topk(*args, *where, topk, 0.5)]


@pytest.mark.parametrize(
    ("topk", "dtype"),
    [
        (3, torch.float32),
        (3, torch.bfloat16),
        pytest.param(90, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_the_reference_in_documents(topk: int, dtype: torch.dtype):
    """A document of 4, one of 7, and padding whose interval is not at 0."""
    index = torch.arange(13)
    start = torch.where(index < 4, 0, 4)
    stop = torch.where(index < 11, index + 1, start)
    ours, expected = both(inputs(13, 3, dtype), start, stop, topk)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0])
def test_equal_scores_go_to_the_lowest_positions(value: float):
    q, k, w = inputs(6, 2, torch.float32)
    args = torch.ones_like(q), torch.ones_like(k), torch.full_like(w, value)
    stop = torch.arange(1, 7)
    ours, expected = both(args, torch.zeros_like(stop), stop, 2)
    assert torch.equal(ours, expected)
    assert ours[0, 5].tolist() == [0, 1]


def test_a_slice_of_the_queries_in_strips(monkeypatch: pytest.MonkeyPatch):
    """Later queries than keys begin, in strips of one tile; unseen keys are NaN."""
    monkeypatch.setattr(kernels, "_STRIP", 1)
    q, k, w = inputs(9, 4, torch.float32, S=40)
    k[:, 36:] = torch.nan
    stop = torch.arange(28, 37)
    start = torch.full_like(stop, 2)
    ours, expected = both((q, k.nan_to_num(0.0), w), start, stop, 5)
    assert torch.equal(ours, expected)
    with_nan, _ = both((q, k, w), start, stop, 5)
    assert torch.equal(with_nan, expected)


def test_another_rule_for_equal_scores_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """Of the reference, the other way round: the test of sets sees it."""
    q, k, w = inputs(8, 3, torch.float32)
    stop = torch.arange(1, 9)
    ours, _ = both((q, k, w), torch.zeros_like(stop), stop, 3)
    start, end = (x[None].to(DEVICE) for x in (8 - stop, torch.full_like(stop, 8)))
    backwards = index_topk(q, k.flip(1), w, start, end, 3, 0.5)
    mirrored = torch.where(backwards < 0, 99, 7 - backwards).sort(-1).values
    assert not torch.equal(torch.where(ours < 0, 99, ours), mirrored)


def test_refusals():
    q, k, w = inputs(4, 2, torch.float32)
    stop = torch.arange(1, 5)[None]
    assert kernels.accepts(q, k, w, stop - 1, stop, 3, 1.0) == ""
    assert "one dtype" in kernels.accepts(q, k.bfloat16(), w, stop, stop, 3, 1.0)
    long = k.expand(1, 4, 6)[:, :1].expand(1, 40000, 6)
    assert "at most 32768 keys" in kernels.accepts(q, long, w, stop, stop, 3, 1.0)
    takes = index_topk.implementations["wide"].accepts
    assert takes(q, long, w, stop, stop, 3, 1.0) == ""
    assert "more than 32768 keys" in takes(q, k, w, stop, stop, 3, 1.0)
    assert "must be positive" in kernels.accepts(q, k, w, stop, stop, 3, -1.0)
    assert "64 heads" in kernels.accepts(q.repeat(1, 1, 40, 1), k, w, stop, stop, 3, 1.0)


@pytest.mark.cuda
def test_at_full_width():
    """Rows of 2,100 keys, 32 heads of 128: the same sets in twenty runs, and the reference's."""
    q, k, w = (torch.randint(-3, 4, s, device=DEVICE).float() for s in _FULL)
    stop = torch.arange(1, 2101)
    runs = [both((q.bfloat16(), k.bfloat16(), w), stop * 0, stop, 256) for _ in range(20)]
    assert torch.equal(runs[0][0], runs[0][1])
    assert all(torch.equal(run[0], runs[0][0]) for run in runs)


_FULL = ((1, 2100, 32, 128), (1, 2100, 128), (1, 2100, 32))
