from __future__ import annotations

import functools

import pytest
import torch
from torch.func import grad, jacrev, vmap

from k31fn import tree
from k31fn.autodiff import hessian, remat, value_and_grad
from k31fn.parallel import (
    Mesh,
    P,
    all_gather_invariant,
    axis_index,
    check_invariance,
    each_rank,
    note_event,
    pslice,
    psum,
    pvary,
    record_collectives,
    shard_map,
)
from k31fn.testing import Ranks, assert_close_trees
from tests.parallel import cases

TP, BOTH = Mesh(tp=2), ("simulated", "threads")


def layers(count: int = 3, hidden: int = 8, inner: int = 16):
    def weights(i: int) -> dict[str, torch.Tensor]:
        return {"w1": torch.randn(hidden, inner) / 3, "w2": torch.randn(inner, hidden) / 4}

    return tree.map(lambda w: w.double(), [weights(i) for i in range(count)])


def plain(weights, x):
    for p in weights:
        x = x + torch.relu(x @ p["w1"]) @ p["w2"]
    return x.square().mean()


# -------------------------------------------------------------------------------------- composition
SPECS = [{"w1": P("fsdp", "tp"), "w2": P("tp", "fsdp")}] * 3
# per layer: two gathers, two reduce-scatters, a psum each way; the loss; a remat repeats its
# gathers and its psum
COUNTS = {
    "plain": {"all_gather": 6, "psum_scatter": 6, "psum": 3 + 3 + 1},
    "remat": {"all_gather": 12, "psum_scatter": 6, "psum": 3 + 3 + 3 + 1},
    "nested": {"all_gather": 22, "psum_scatter": 6, "psum": 11 + 3 + 1},
}


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize(
    "mesh", [Mesh(fsdp=2, tp=2), Mesh(fsdp=4, tp=4), Mesh(fsdp=4, tp=2, ep=4)], ids=str
)
@pytest.mark.parametrize("mode", COUNTS)
def test_gather_in_remat_with_tensor_parallelism_and_a_custom_vjp(mode: str, mesh: Mesh, backend):
    weights, x = layers(), torch.randn(4, 6, 8, dtype=torch.float64)
    expected = value_and_grad(plain, (0, 1))(weights, x)

    def step(axes, weights, x):
        return value_and_grad(functools.partial(cases.composition, axes, mode=mode), (0, 1))(
            weights, x
        )

    with record_collectives() as record, check_invariance():
        got = shard_map(step, mesh, (SPECS, P("fsdp")), (P(), (SPECS, P("fsdp"))), backend=backend)(
            weights, x
        )
    assert_close_trees(got, expected, rtol=1e-12, atol=1e-14)
    assert record.counts == COUNTS[mode]
    assert all(r.counts == record.counts for r in record.ranks)


close = functools.partial(assert_close_trees, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backend", BOTH)
def test_derivatives_taken_outside_are_those_of_one_device(backend):
    """By tape and by transform, second derivatives, over remat: each of the whole shard_map."""
    mesh = Mesh(fsdp=2, tp=2)
    weights, x = layers(1, 2, 4), torch.randn(2, 1, 2, dtype=torch.float64)
    f = shard_map(
        functools.partial(cases.composition, mode="plain"),
        mesh,
        (SPECS[:1], P("fsdp")),
        P(),
        backend=backend,
    )
    close(value_and_grad(f, (0, 1))(weights, x), value_and_grad(plain, (0, 1))(weights, x))

    def smooth(axes, w, x):  # without the opaque rule, which is first order only
        block = remat(
            lambda w, x: psum(torch.tanh(pvary(x, axes.tp) @ w).square().sum(-1), axes.tp)
        )
        return psum(block(pvary(w, axes.fsdp), x).sum(), axes.fsdp)

    def dense(w, x):
        return torch.tanh(x @ w).square().sum()

    g = shard_map(smooth, mesh, (P(None, "tp"), P("fsdp")), P(), backend=backend)
    w, x = torch.randn(2, 4, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)
    close(grad(g, (0, 1))(w, x), grad(dense, (0, 1))(w, x))
    v = torch.randn(2, 4, dtype=torch.float64)
    close(*[grad(lambda w, x, h=h: (grad(h)(w, x) * v).sum(), (0, 1))(w, x) for h in (g, dense)])
    if backend == "simulated":
        close(jacrev(grad(g))(w, x), jacrev(grad(dense))(w, x))
        close(hessian(g, 1)(w, x), hessian(dense, 1)(w, x))
        many = torch.stack([x, 2 * x])
        close(vmap(grad(g), (None, 0))(w, many), vmap(grad(dense), (None, 0))(w, many))


def test_second_derivatives_taken_inside():
    def smooth(axes, w, x):
        return psum(torch.tanh(pvary(x, axes.tp) * w).sum(), axes.tp)

    def dense(w, x):
        return torch.tanh(x * w).sum()

    w, x = torch.randn(4, dtype=torch.float64), torch.randn((), dtype=torch.float64)
    inside = shard_map(
        lambda axes, w, x: hessian(functools.partial(smooth, axes), 1)(w, x),
        TP,
        (P("tp"), P()),
        P(),
    )
    assert_close_trees(inside(w, x), hessian(dense, 1)(w, x), rtol=1e-12, atol=1e-14)


# ----------------------------------------------------------------------------------- planted errors
@pytest.mark.parametrize("backend", BOTH)
def test_a_pvary_forgotten_on_an_activation_is_refused(backend):
    w, x = torch.arange(6.0), torch.ones(3)
    f = shard_map(
        lambda axes, w, x: value_and_grad(lambda w: cases.forgotten_pvary(axes, w, x).sum())(w),
        TP,
        (P("tp"), P()),
        (P(), P("tp")),
        backend=backend,
    )
    with (
        check_invariance(),
        pytest.raises(ValueError, match=r"over .*tp.* varies: a pvary is missing"),
    ):
        f(w, x)


def test_a_pvary_forgotten_on_an_activation_is_found_on_processes_when_asked(two_ranks: Ranks):
    for _, value in two_ranks.run(cases.forgotten_on_rank, True):
        assert (
            "cotangent of psum over ('tp',) varies: a pvary is missing downstream" in value["error"]
        )
    assert all(not value["error"] for _, value in two_ranks.run(cases.forgotten_on_rank, False))


@pytest.mark.parametrize("backend", BOTH)
def test_a_pvary_forgotten_on_a_weight_is_refused(backend):
    """The gradient of a norm weight that each rank uses on its own heads is then one rank's
    part.
    """

    def step(axes, scale, w, mark):
        return grad(lambda s: psum((mark(s, axes.tp) * w).sum(), axes.tp))(scale)

    scale, w = torch.ones(3), torch.arange(6.0)
    run = functools.partial(
        shard_map, mesh=TP, in_specs=(P(), P("tp")), out_specs=P(), backend=backend
    )
    with pytest.raises(ValueError, match=r"does not name|varies over an axis"):
        run(functools.partial(step, mark=lambda s, axis: s))(scale, w)
    assert torch.equal(run(functools.partial(step, mark=pvary))(scale, w), w.reshape(2, 3).sum(0))


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (
            lambda axes, x: psum(psum(x, axes.tp), axes.tp),
            "psum over 'tp' of a value that is equal on all its ranks",
        ),
        (
            lambda axes, x: pvary(x, axes.tp).sum(),
            "pvary over 'tp' of a value that varies over it already",
        ),
        (lambda axes, x: pslice(x, axes.tp).sum(), "pslice over 'tp' of a value that varies"),
        (lambda axes, x: x.sum(), "out_spec .* does not name 'tp', but it varies over it"),
        (
            lambda axes, x: all_gather_invariant(x, axes.tp) * axis_index(axes.tp),
            "does not name 'tp'",
        ),
    ],
    ids=[
        "doubled psum",
        "doubled pvary",
        "slice of a part",
        "undeclared output",
        "undeclared after index",
    ],
)
def test_the_simulated_mesh_refuses(f, message: str):
    with pytest.raises(ValueError, match=message):
        shard_map(f, TP, (P("tp"),), P())(torch.arange(4.0))


def test_an_undeclared_varying_output_is_refused_by_threads():
    with pytest.raises(ValueError, match="varies over an axis that the spec does not name"):
        shard_map(lambda axes, x: x.sum(), TP, (P("tp"),), P(), backend="threads")(
            torch.arange(4.0)
        )


@pytest.mark.parametrize("backend", BOTH)
def test_a_spec_that_does_not_fit_is_refused(backend):
    run = functools.partial(shard_map, lambda axes, x: x, TP, backend=backend)
    with pytest.raises(ValueError, match="ranks do not divide a dimension of 3"):
        run((P("tp"),), P("tp"))(torch.ones(3))
    with pytest.raises(ValueError, match="has 2 entries for a tensor of 1 dimensions"):
        run((P("tp"),), P("tp", None))(torch.ones(4))
    with pytest.raises(ValueError, match="do not fit the tree"):
        run((P("tp"), P()), P("tp"))(torch.ones(4))
    with pytest.raises(ValueError, match="an output is 3; every leaf must be a tensor"):
        shard_map(lambda axes, x: 3, TP, (P("tp"),), P(), backend=backend)(torch.ones(4))


def test_a_captured_differentiated_tensor_is_refused():
    def f(w):
        return shard_map(lambda axes, x: psum((x * w).sum(), axes.tp), TP, (P("tp"),), P())(
            torch.ones(4)
        )

    with pytest.raises(ValueError, match="captured a differentiated tensor"):
        grad(f)(torch.ones(()))


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend='mpi' unknown"):
        shard_map(lambda axes, x: x, TP, (P(),), P(), backend="mpi")


# ------------------------------------------------------------------------------------------ threads
def test_the_error_of_a_rank_stops_the_others_and_names_it():
    def f(axes):
        if int(axis_index(axes.tp)) == 1:
            raise KeyError("lost")
        psum(torch.ones(1), axes.tp)

    with pytest.raises(KeyError, match="lost") as caught:
        each_rank(f, TP, lambda _: ())
    assert caught.value.__notes__ == ["on the rank at {'tp': 1}"]


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (
            lambda axes, me: me or psum(torch.ones(1), axes.tp),
            r"the rank at \{'tp': 1\} returned without taking part",
        ),
        (
            lambda axes, me: psum(torch.ones(1 + me), axes.tp),
            r"operand \[1\] .* called psum of \[2\]|\[2\].*of \[1\]",
        ),
        (lambda axes, me: (pslice if me else psum)(torch.ones(2), axes.tp), "called ps"),
    ],
    ids=["absent", "other shape", "other collective"],
)
def test_ranks_that_disagree_are_refused(f, message: str):
    with pytest.raises(ValueError, match=message):
        each_rank(f, TP, lambda c: (c["tp"],))


def test_a_rank_that_hangs_is_reported_after_the_timeout():
    import threading

    release = threading.Event()

    def f(axes, me):
        return release.wait(5) if me else psum(torch.ones(1), axes.tp)

    def first(axes, me):
        try:
            return f(axes, me)
        finally:
            release.set()

    with pytest.raises(ValueError, match=r"waited 0.2 s for the ranks at \[\{'tp': 1\}\]"):
        each_rank(first, TP, lambda c: (c["tp"],), timeout=0.2)


def test_records_hold_events_in_order_and_of_every_rank():
    def f(axes, x):
        note_event("before")
        return psum(x.sum(), axes.tp)

    with record_collectives() as record:
        shard_map(f, TP, (P("tp"),), P(), backend="threads")(torch.ones(4))
    assert [(e.what, e.kind) for e in record.events] == [
        ("note", "before"),
        ("issue", "psum"),
        ("wait", "psum"),
    ]
    assert record.over("tp") == {"psum": 1}
    assert record.nbytes == {"psum": 4}
    assert len(record.ranks) == 2


def test_an_inner_record_takes_nothing_from_the_outer_one():
    f = shard_map(lambda axes, x: psum(x.sum(), axes.tp), TP, (P("tp"),), P())
    with record_collectives() as outer:
        f(torch.ones(4))
        with record_collectives() as inner:
            f(torch.ones(4))
    assert (outer.counts, inner.counts) == ({"psum": 2}, {"psum": 1})


def test_a_pullback_on_another_thread_issues_and_records_the_same():
    """A device's backward runs on threads of its own: nothing may live in the forward's thread
    only.
    """
    import threading

    def f(axes, x):
        from k31fn.autodiff import vjp

        _, pull = vjp(lambda x: psum(torch.tanh(x) * 2, axes.tp), x)
        grads = []
        thread = threading.Thread(target=lambda: grads.append(pull(torch.ones(2))[0]))
        thread.start()
        thread.join()
        return grads[0]

    with record_collectives() as record, check_invariance():
        g = shard_map(f, TP, (P("tp"),), P("tp"), backend="threads")(torch.zeros(4))
    assert g.tolist() == [2.0] * 4
    assert record.counts == {"psum": 1}
