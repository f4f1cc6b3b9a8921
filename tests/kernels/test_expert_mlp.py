"""Routed experts as one operator: the fused rule against the reference in float64.

Tolerances: sums of at most 72 products in float32, norms off by 1e-6. In bfloat16 rows, gate and
up, activation, outputs and sums are rounded, by 2^-9 each: norms off by 1e-2.
"""

import pytest
import torch
from torch import Tensor

from k31fn import autodiff
from k31fn.kernels.expert_mlp import expert_mlp
from k31fn.kernels.experts import sort_by_expert
from k31fn.kernels.registry import record_impls, use_impl
from tests.kernels.fused import DEVICE, poisoned

fused = pytest.importorskip("k31fn.kernels.expert_mlp.fused", exc_type=ImportError)
BOUNDS = (4.0, 25.0)


def inputs(tokens: int, choices: int, experts: int, width: int = 72, inner: int = 40):
    x = torch.randn(tokens, width)
    weights = torch.rand(tokens, choices) + 0.1
    w_gate = 2 * torch.randn(experts, width, inner) / width**0.5
    w_up = 8 * torch.randn(experts, width, inner) / width**0.5
    w_down = torch.randn(experts, inner, width) / inner**0.5
    return [a.to(DEVICE) for a in (x, weights, w_gate, w_up, w_down)]


def route(tokens: int, choices: int, experts: int, chosen: int):
    """Among the first ``chosen`` experts: the others get no row."""
    idx = torch.rand(tokens, chosen).argsort(1)[:, :choices]
    return sort_by_expert(idx.to(DEVICE), experts)


def results(f, xs: list[Tensor], order, dtype: torch.dtype) -> list[Tensor]:
    """The value, and the gradients of all inputs."""
    leaves = [a.to(dtype) for a in xs]
    y, pull = autodiff.vjp(lambda *a: f(*a, *order, *BOUNDS), *leaves)
    ct = torch.linspace(-1, 1, y.numel(), device=DEVICE, dtype=dtype).view(y.shape)
    return [y, *pull(ct)]


def check(ours: list[Tensor], exact: list[Tensor], limit: float) -> None:
    for a, b in zip(ours, exact, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b).norm() <= limit * b.norm()


@pytest.mark.parametrize(
    ("tokens", "choices", "experts", "chosen"),
    [(9, 3, 5, 5), (7, 2, 11, 3), (5, 1, 4, 1), (1, 1, 2, 2)],
    ids=["all", "few of many", "all rows to one", "one row"],
)
def test_equals_the_reference(tokens: int, choices: int, experts: int, chosen: int):
    """In float32, for which it is registered nowhere: its own arithmetic, without roundings."""
    xs = inputs(tokens, choices, experts)
    order = route(tokens, choices, experts, chosen)
    if DEVICE == "cuda":
        pytest.skip("the library's product of float32 reads the counts on the host")
    exact = results(expert_mlp, xs, order, torch.float64)
    with poisoned():
        ours = results(fused.expert_mlp, xs, order, torch.float32)
    check(ours, exact, 1e-6)
    for d_w in ours[3:]:
        assert not d_w[order.sizes == 0].any()


def test_absent_copies():
    """Rows of some of the copies only, as on a rank that computes a part."""
    xs = inputs(9, 3, 5)
    order, inverse, _ = route(9, 3, 5, 5)
    order = order[4:15]
    inverse = torch.where((inverse >= 4) & (inverse < 15), inverse - 4, -1)
    part = (order, inverse, torch.tensor([3, 0, 5, 2, 1], device=DEVICE))
    exact = results(expert_mlp, xs, part, torch.float64)
    assert not exact[2][inverse < 0].any()  # gradients of weights
    dtype, limit = (torch.bfloat16, 1e-2) if DEVICE == "cuda" else (torch.float32, 1e-6)
    with poisoned():
        check(results(fused.expert_mlp, xs, part, dtype), exact, limit)


def test_rows_that_are_weighted_elsewhere():
    xs = inputs(6, 1, 3)
    order = route(6, 1, 3, 3)
    f = lambda x, *w: expert_mlp(x, (), *w, *order)  # noqa: E731
    with use_impl(expert_mlp="fused"), record_impls() as ran:
        y, pull = autodiff.vjp(f, *(a.bfloat16() for a in (xs[0], *xs[2:])))
        ours = [y, *pull(torch.ones_like(y))]
    assert ran == {("expert_mlp", "fused"): 1}
    y, pull = autodiff.vjp(f, *(a.bfloat16().double() for a in (xs[0], *xs[2:])))
    check(ours, [y, *pull(torch.ones_like(y))], 1e-2)
    wide = [a.bfloat16().double() for a in xs]
    weighted = expert_mlp(wide[0], torch.ones_like(wide[1]), *wide[2:], *order)
    torch.testing.assert_close(y, weighted, rtol=1e-12, atol=1e-12)


def test_bfloat16_and_what_runs():
    xs = inputs(8, 2, 4)
    order = route(8, 2, 4, 4)
    low = [x.bfloat16() for x in xs]
    with use_impl(expert_mlp="fused"), record_impls() as ran:
        ours = results(expert_mlp, low, order, torch.bfloat16)
    assert ran == {("expert_mlp", "fused"): 1}
    check(ours, results(expert_mlp, low, order, torch.float64), 1e-2)
    y = fused.expert_mlp(*(x.requires_grad_() for x in low), *order)
    (grad,) = torch.autograd.grad(y.sum(), low[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"expert_mlp \(fused\) is first order only"):
        torch.autograd.grad(grad.sum(), low[1])


def test_padding_may_be_nan():
    xs = inputs(6, 2, 4)
    order = route(6, 2, 4, 4)
    xs[1][2] = 0.0
    clean = results(fused.expert_mlp, xs, order, torch.bfloat16)
    xs[0][2] = float("nan")
    for a, b in zip(results(fused.expert_mlp, xs, order, torch.bfloat16), clean, strict=True):
        assert torch.equal(a, b)
    assert not clean[0][2].any()


def test_a_frozen_weight_has_no_gradient_and_gate_and_up_are_all_that_is_kept():
    xs = [a.bfloat16() for a in inputs(8, 2, 4)]
    order = route(8, 2, 4, 4)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fused.expert_mlp(*(x.requires_grad_() for x in xs), *order)
    own = {x.data_ptr() for x in (*xs, *order)}
    assert [tuple(t.shape) for t in kept if t.data_ptr() not in own] == [(16, 40)] * 2
    frozen = [xs[0], *(x.detach() for x in xs[1:])]
    (d_x,) = torch.autograd.grad(fused.expert_mlp(*frozen, *order).sum(), frozen[:1])
    d_all = torch.autograd.grad(fused.expert_mlp(*xs, *order).sum(), xs)
    assert torch.equal(d_x, d_all[0])


def test_refusals():
    x, weights, *matrices = (a.bfloat16() for a in inputs(3, 2, 4))
    order = route(3, 2, 4, 4)
    assert "w_down [E F D], got" in fused.accepts(x, weights, *matrices[:2], matrices[0], *order)
    assert "one dtype" in fused.accepts(x.float(), weights, *matrices, *order)
    assert "2 copies needs weights" in fused.accepts(x, (), *matrices, *order)
    assert "a place for each copy" in fused.accepts(x[:2], weights, *matrices, *order)
    assert "weights are [3, 2]" in fused.accepts(x, weights.T, *matrices, *order)
    odd = (matrices[0][..., :3], matrices[1][..., :3], matrices[2][:, :3])
    assert "multiples of 8" in fused.accepts(x, weights, *odd, *order)


@pytest.mark.cuda
@pytest.mark.parametrize(("experts", "chosen"), [(64, 64), (112, 20), (896, 896), (64, 16)])
def test_at_full_width(experts: int, chosen: int):
    """Numbers of rows that nothing divides, many experts without any; twenty repeats are
    bit-identical.
    """
    tokens = 333
    xs = inputs(tokens, 16, experts, 512, 384)
    low = [a if i == 1 else a.bfloat16() for i, a in enumerate(xs)]
    order = route(tokens, 16, experts, chosen)
    exact = _with_gradients(low, order, torch.float64)
    with poisoned(), record_impls() as ran:
        ours = _with_gradients(low, order, None)
    assert ran == {("expert_mlp", "fused"): 1}
    check(ours, exact, 1e-2)
    for d_w in ours[3:]:
        assert not d_w[order.sizes == 0].any()
    for _ in range(20):
        again = _with_gradients(low, order, None)
        assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))


def _with_gradients(xs: list[Tensor], order, dtype: torch.dtype | None) -> list[Tensor]:
    leaves = [x if dtype is None else x.to(dtype) for x in xs]
    y, pull = autodiff.vjp(lambda *a: expert_mlp(*a, *order), *leaves)
    return [y, *pull(torch.linspace(-1, 1, y.numel(), device=DEVICE).view(y.shape).to(y.dtype))]


@pytest.mark.cuda
def test_a_captured_call_follows_other_routes():
    """Captured once, replayed with other routes: the bits of an eager call."""
    xs = [a if i == 1 else a.bfloat16() for i, a in enumerate(inputs(64, 4, 8, 128, 64))]
    order = [a.clone() for a in route(64, 4, 8, 8)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _with_gradients(xs, order, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = _with_gradients(xs, order, None)
    for chosen in (8, 4, 5):
        for given, new in zip(order, route(64, 4, 8, chosen), strict=True):
            given.copy_(new)
        graph.replay()
        eager = _with_gradients(xs, order, None)
        assert all(torch.equal(a, b) for a, b in zip(kept, eager, strict=True))
