"""Rows to the owners of their experts and back: both forms against one device, for any skew."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.func import grad

from k31fn.autodiff import value_and_grad, vjp
from k31fn.parallel import Mesh, P, record_collectives, shard_map
from k31fn.parallel.backends.abstract import abstract_axes
from k31fn.parallel.expert import Exchange, plan_exchange, receive_back, send_back, send_rows
from k31fn.parallel.overlap import wait
from k31fn.testing import Ranks, assert_close_trees, assert_sharded_equals_dense
from tests.parallel import cases_moe as cases

BACKENDS = {
    "simulated": {"all_to_all": 5},
    "threads": {"all_to_all": 1, "ragged_all_to_all": 4},
    "processes": {"all_to_all": 1, "ragged_all_to_all": 4},
}
# rows of each of four experts, on each of two or four ranks, twelve together
SIZES = {
    "even": [[3, 3, 3, 3], [3, 3, 3, 3]],
    "uneven": [[5, 2, 4, 1], [1, 7, 0, 4]],
    "all to the first": [[7, 5, 0, 0], [12, 0, 0, 0]],
    "all to the last": [[0, 0, 0, 12], [0, 0, 0, 12]],
    "each to the other": [[0, 0, 12, 0], [6, 6, 0, 0]],
    "each to itself": [[6, 6, 0, 0], [0, 0, 12, 0]],
}


def arguments(sizes):
    rows = torch.randn(len(sizes), 12, 3, dtype=torch.float64)
    return rows, torch.tensor(sizes), torch.randn(4, 3, 3, dtype=torch.float64)


def check(mesh: Mesh, args, backend: str, f=cases.exchanged, **kwargs):
    parts = P(("fsdp", "tp"))
    return assert_sharded_equals_dense(
        f,
        args,
        (parts, parts, P("ep")),
        parts,
        mesh,
        dense=cases.by_hand,
        rtol=1e-12,
        atol=1e-13,
        backends=(backend,),
        **{"collectives": BACKENDS[backend], **kwargs},
    )


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks(backend: str, name: str, two_ranks: Ranks):
    check(Mesh(fsdp=2, ep=2), arguments(SIZES[name]), backend, ranks=two_ranks)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replay_sends_rows_again_and_no_counts(backend: str, name: str, two_ranks: Ranks):
    """As many collectives on every rank for any skew: forward, replay and backward send rows twice
    each.
    """
    counts = (
        {"all_to_all": 7} if backend == "simulated" else {"all_to_all": 1, "ragged_all_to_all": 6}
    )
    mesh, args = Mesh(fsdp=2, ep=2), arguments(SIZES[name])
    check(mesh, args, backend, cases.exchanged_twice, collectives=counts, ranks=two_ranks)


@pytest.mark.parametrize("backend", ["simulated", "threads"])
@pytest.mark.parametrize(
    "mesh", [Mesh(fsdp=2, tp=2, ep=4), Mesh(fsdp=4, ep=4)], ids=["two axes", "one axis"]
)
def test_four_ranks_that_own_one_expert_each(backend: str, mesh: Mesh):
    check(mesh, arguments([[12, 0, 0, 0], [0, 3, 9, 0], [3, 3, 3, 3], [0, 0, 0, 12]]), backend)


@pytest.mark.parametrize("backend", ["simulated", "threads"])
def test_second_derivatives(backend: str):
    def norm(f, rows, w):
        """Of the gradients of a function of the rows; a rank's part of it."""
        y, pull = vjp(lambda rows, w: f(rows, w).sin(), rows, w)
        return sum(g.square().sum() for g in pull(torch.ones_like(y)))

    def second(axes, rows, sizes, w):
        g = value_and_grad(
            lambda rows, w: norm(lambda r, w: cases.exchanged(axes, r, sizes, w), rows, w), (0, 1)
        )
        return g(rows, w)[1]

    rows, sizes, w = arguments(SIZES["uneven"])
    specs = P("fsdp"), P("fsdp"), P("ep")
    got = shard_map(second, Mesh(fsdp=2, ep=2), specs, (P("fsdp"), P("ep")), backend=backend)(
        rows, sizes, w
    )
    dense = grad(
        lambda rows, w: norm(lambda r, w: cases.by_hand(None, r, sizes, w), rows, w), (0, 1)
    )
    assert_close_trees(got, dense(rows, w), rtol=1e-12, atol=1e-13)


def test_samples_of_vmap_on_real_ranks_are_refused():
    def f(axes, sizes):
        return torch.vmap(lambda s: plan_exchange(s, axes.ep, 4).sizes)(sizes[0])

    sizes = torch.tensor([[[4, 0], [1, 3]]] * 2)
    with pytest.raises(ValueError, match=r"plan_exchange under vmap: .* use the simulated mesh"):
        shard_map(f, Mesh(fsdp=2, ep=2), (P("fsdp"),), P("fsdp"), backend="threads")(sizes)


@pytest.mark.parametrize("backend", ["simulated", "threads"])
def test_two_groups_do_not_meet(backend: str):
    """(fsdp 4, ep 2): ranks 0 and 1 exchange, and ranks 2 and 3; the weights of an expert lie in
    both groups.
    """
    args = arguments(SIZES["uneven"] + SIZES["all to the last"])
    check(Mesh(fsdp=4, ep=2), args, backend, collectives={**BACKENDS[backend], "psum": 1})


def of_plan(change):
    def broken(sizes, axis, num_rows):
        return change(plan_exchange(sizes, axis, num_rows))

    return broken


MUTANTS = {
    "send and recv swapped": (
        "plan_exchange",
        of_plan(lambda e: e._replace(send=e.recv, recv=e.send)),
    ),
    "no inverse": ("plan_exchange", of_plan(lambda e: e._replace(inverse=e.order))),
    "order and inverse swapped": (
        "plan_exchange",
        of_plan(lambda e: e._replace(order=e.inverse, inverse=e.order)),
    ),
    "rows out of order": (
        "send_rows",
        lambda rows, *plan: send_rows(rows.flip(0), *plan),
    ),
    "back out of order": ("receive_back", lambda *plan: receive_back(*plan).flip(0)),
}


@pytest.mark.parametrize("backend", ["simulated", "threads"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_errors_are_found(backend: str, mutant: str, monkeypatch):
    monkeypatch.setattr(cases, *MUTANTS[mutant])
    found = rf"{backend} against one device|ragged_all_to_all: send=.* for 2 ranks|out of bounds"
    with pytest.raises((AssertionError, ValueError, IndexError), match=found):
        check(Mesh(fsdp=2, ep=2), arguments(SIZES["uneven"]), backend)


def test_one_rank_exchanges_nothing():
    rows = torch.randn(5, 2)
    with record_collectives() as record:
        exchange = plan_exchange(torch.tensor([2, 3]), (), 5)
        there = wait(send_rows(rows, exchange, ()))
        back = receive_back(send_back(there, exchange, ()), exchange, ())
    assert exchange.send.tolist() == exchange.recv.tolist() == [5]
    assert exchange.order == exchange.inverse == ()
    assert exchange.sizes.tolist() == [2, 3]
    assert torch.equal(back, rows)
    assert not record.events


def test_ranks_that_do_not_divide_the_experts_are_refused():
    with pytest.raises(ValueError, match="2 ranks do not divide num_experts=3"):
        plan_exchange(torch.tensor([1, 1, 1]), abstract_axes(Mesh(fsdp=2, ep=2)).ep, 3)


def test_on_meta_tensors_rows_are_spread_evenly():
    axis = abstract_axes(Mesh(fsdp=4, ep=4)).ep
    rows = torch.empty(10, 3, device="meta")

    def there_and_back(rows):
        exchange = plan_exchange(torch.empty(8, dtype=torch.int64, device="meta"), axis, 10)
        assert isinstance(exchange, Exchange)
        assert exchange.sizes.shape == (2,)
        assert exchange.send.tolist() == [2, 2, 3, 3]
        there = wait(send_rows(rows, exchange, axis))
        return receive_back(send_back(there[exchange.order], exchange, axis), exchange, axis)

    with record_collectives() as record:
        y, pull = vjp(there_and_back, rows)
        (g,) = pull(y)
    assert y.shape == g.shape == rows.shape
    assert record.counts == BACKENDS["threads"]
    assert record.nbytes["ragged_all_to_all"] == 4 * rows.nbytes


def test_the_host_waits_for_the_counts_once_per_layer(monkeypatch):
    """A replay finds the plan."""
    reads, cpu = [], torch.Tensor.cpu

    def noted(tensor):
        caller = sys._getframe(1).f_globals["__name__"]
        reads.extend([caller] if caller == plan_exchange.__module__ else [])
        return cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", noted)
    counts = {"all_to_all": 1, "ragged_all_to_all": 6}
    check(
        Mesh(fsdp=2, ep=2),
        arguments(SIZES["uneven"]),
        "threads",
        cases.exchanged_twice,
        collectives=counts,
    )
    assert len(reads) == 2  # of two ranks
