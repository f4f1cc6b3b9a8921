from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.func import grad

from k31fn.autodiff import value_and_grad
from k31fn.parallel import (
    Mesh,
    P,
    all_gather,
    note_event,
    psum,
    pvary,
    record_collectives,
    shard_map,
    start,
    wait,
)
from k31fn.parallel.overlap import Pending
from k31fn.testing import Ranks, assert_close_trees, assert_sharded_equals_dense
from tests.parallel import cases

MESH, BOTH = Mesh(fsdp=2), ("simulated", "threads")


def arguments():
    weights = [torch.randn(4, 4, dtype=torch.float64) for _ in range(3)]
    return weights, torch.randn(2, 4, dtype=torch.float64)


def test_prefetched_gathers_equal_one_device(two_ranks: Ranks):
    assert_sharded_equals_dense(
        cases.prefetched,
        arguments(),
        (P("fsdp"), P("fsdp")),
        P("fsdp"),
        MESH,
        collectives={"all_gather": 3, "psum_scatter": 3},
        rtol=1e-12,
        atol=1e-14,
        ranks=two_ranks,
    )


@pytest.mark.parametrize("backend", BOTH)
def test_second_derivatives_through_start_and_wait(backend):
    def loss(axes, w, x):
        pending = start(all_gather, w, axes.fsdp)
        return psum(torch.tanh(x @ wait(pending)).sum(), axes.fsdp)

    def norm(axes, w, x):
        g = value_and_grad(lambda w: loss(axes, w, x))(w)[1]
        return psum(g.square().sum(), axes.fsdp)

    def dense(w):
        return grad(lambda w: torch.tanh(x @ w).sum())(w).square().sum()

    (w, *_), x = arguments()
    f = shard_map(
        lambda axes, w, x: value_and_grad(lambda w: norm(axes, w, x))(w),
        MESH,
        (P("fsdp"), P("fsdp")),
        (P(), P("fsdp")),
        backend=backend,
    )
    assert_close_trees(f(w, x), value_and_grad(dense)(w), rtol=1e-12, atol=1e-14)


def test_what_runs_between_start_and_wait_is_between_in_the_backward_too():
    """Threads run the asynchronous rules: the transpose is issued, the layer's backward runs, then
    it is waited for.
    """

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            note_event("forward")
            return x * 2

        @staticmethod
        def backward(ctx, *grads):
            note_event("backward")
            return grads[0] * 2

    def f(axes, w, x):
        def loss(w, x):
            pending = start(all_gather, w, axes.fsdp)
            y = Layer.apply(x)
            return (y * wait(pending)).sum()

        return value_and_grad(loss, (0, 1))(w, x)[1]

    with record_collectives() as record:
        g, _ = shard_map(f, MESH, (P("fsdp"), P()), (P("fsdp"), P("fsdp")), backend="threads")(
            torch.ones(4), torch.arange(4.0)
        )
    assert g.tolist() == [0.0, 4.0, 8.0, 12.0]  # two ranks, each 2 x
    assert [(e.what, e.kind) for e in record.events] == [
        ("issue", "all_gather"),
        ("note", "forward"),
        ("wait", "all_gather"),
        ("issue", "psum_scatter"),
        ("note", "backward"),
        ("wait", "psum_scatter"),
    ]


@pytest.mark.parametrize("backend", BOTH)
def test_local_moves_and_identities_may_be_started_too(backend):
    def f(axes, x):
        a, b = start(pvary, x, axes.tp), start(psum, x, axes.dp)
        assert isinstance(a, Pending)
        return wait(a), wait(b)

    a, b = shard_map(f, Mesh(tp=2), (P(),), (P("tp"), P()), backend=backend)(torch.ones(2))
    assert (a.tolist(), b.tolist()) == ([1.0] * 4, [1.0] * 2)


@pytest.mark.parametrize("backend", BOTH)
def test_a_value_is_waited_for_once(backend):
    def f(axes, x):
        pending = start(psum, x, axes.tp)
        return wait(pending) + wait(pending)

    with pytest.raises(ValueError, match="waited for already"):
        shard_map(f, Mesh(tp=2), (P("tp"),), P(), backend=backend)(torch.ones(2))


def test_a_start_returns_before_the_other_ranks_have_come(two_ranks: Ranks, tmp_path):
    answers = two_ranks.run(cases.started_before_the_other_came, str(tmp_path))
    assert all(value["in time"] for _, value in answers)
    assert all(tensors[0].tolist() == [3.0, 3.0] for tensors, _ in answers)


def test_operands_are_freed_with_their_graph():
    """Without Python's collector, which does not see a cycle through an autograd node."""
    alive: list[weakref.ref] = []

    def f(axes, w):
        def loss(w):
            operand = torch.sin(w)
            pending = start(all_gather, operand, axes.fsdp)
            alive.append(weakref.ref(operand.untyped_storage()))
            del operand
            return wait(pending).square().sum()

        return value_and_grad(loss)(w)[1]

    enabled = gc.isenabled()
    gc.disable()
    try:
        shard_map(f, MESH, (P("fsdp"),), P("fsdp"), backend="threads")(
            torch.ones(4, 4, dtype=torch.float64)
        )
        assert [ref() for ref in alive] == [None, None]
    finally:
        if enabled:
            gc.enable()
