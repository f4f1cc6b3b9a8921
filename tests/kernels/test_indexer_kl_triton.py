"""The fused loss of the indexer against the reference in float64: value and gradients.

Tolerances, relative to the largest element: float32, 1e-5; bfloat16, gradients of scores are
rounded to 2^-9 (in the interpreter cut to 2^-8) before their products, and results again.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k31fn.autodiff import value_and_grad
from k31fn.kernels.indexer_kl import indexer_kl
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.testing import assert_op_matches
from tests.kernels.fused import DEVICE, poisoned

kernels = pytest.importorskip("k31fn.kernels.indexer_kl.triton", exc_type=ImportError)
SCALE = 0.4


def inputs(T: int, J: int, M: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Sets with -1 first, one query without any, and a teacher with a zero."""
    q, k, w = torch.randn(1, T, J, 10), torch.randn(1, T, 10), torch.randn(1, T, J)
    slots = torch.full((1, T, M), -1, dtype=torch.int32)
    for t in range(T):
        own = torch.randperm(t + 1)[:M].sort().values if t != 3 else torch.arange(0)
        slots[0, t, M - len(own) :] = own.int()
    teacher = torch.where(slots >= 0, torch.rand(1, T, M), 0.0)
    teacher[0, -1, -1] = 0.0
    teacher = teacher / teacher.sum(-1, keepdim=True).clamp(min=1e-9)
    return [x.to(DEVICE) for x in (q.to(dtype), k.to(dtype), w, teacher, slots)]


def outcome(args: list[Tensor], impl: str) -> list[Tensor]:
    def loss(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        return 3.0 * indexer_kl(q, k, w, *args[3:], SCALE)

    with use_impl(indexer_kl=impl), record_impls() as calls, poisoned():
        value, grads = value_and_grad(loss, (0, 1, 2))(*args[:3])
    assert calls == {("indexer_kl", impl): 1}
    return [value, *grads]


def errors(args: list[Tensor]) -> list[float]:
    ours = outcome(args, "triton")
    exact = outcome([x.double() if x.is_floating_point() else x for x in args], "reference")
    pairs = zip(ours, exact, strict=True)
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)], ids=str
)
def test_equals_the_reference(dtype: torch.dtype, most: float, monkeypatch: pytest.MonkeyPatch):
    """Two steps of slots, two tiles of keys, and strips of one tile of queries."""
    monkeypatch.setattr(kernels, "_STRIP", 1)
    assert max(errors(inputs(34, 3, 18, dtype))) < most


def test_under_vmap():
    args = (*inputs(12, 2, 5), SCALE)
    # the teacher has no gradient, and the reference says so with zeros
    assert_op_matches(
        indexer_kl, "triton", args, rtol=1e-5, atol=1e-5, reference_dtype=torch.float64
    )


def test_a_strip_that_gives_the_keys_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch):
    class Skipped:
        def __getitem__(self, grid: tuple[int]):
            return lambda *_, **__: None

    monkeypatch.setattr(kernels, "indexer_kl_keys", Skipped())
    assert errors(inputs(12, 2, 5))[2] > 0.5


def test_a_refused_teacher_is_passed_on():
    args = inputs(8, 2, 4)
    args[3][0, 5, 3] = torch.nan
    assert outcome(args, "triton")[0].isnan()


def test_refusals():
    q, k, w, teacher, slots = inputs(4, 2, 3)
    assert kernels.accepts(q, k, w, teacher, slots, 1.0) == ""
    assert "one dtype" in kernels.accepts(q, k.bfloat16(), w, teacher, slots, 1.0)
    assert "64 heads" in kernels.accepts(q.repeat(1, 1, 40, 1), k, w, teacher, slots, 1.0)


@pytest.mark.cuda
def test_at_full_width():
    """32 heads of 128 dims over 700 queries; twenty repeats are bit-identical."""
    _, _, w, teacher, slots = inputs(700, 32, 96)
    q, k = torch.randn(1, 700, 32, 128, device=DEVICE), torch.randn(1, 700, 128, device=DEVICE)
    args = [q.bfloat16(), k.bfloat16(), w / 6, teacher, slots]
    assert max(errors(args)) < 2**-6
    runs = [outcome(args, "triton") for _ in range(20)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
