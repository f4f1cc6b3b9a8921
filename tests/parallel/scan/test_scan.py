from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from k31fn import autodiff, tree
from k31fn.autodiff import value_and_grad, vjp
from k31fn.parallel import (
    AxisRules,
    Mesh,
    P,
    each_rank,
    partition,
    psum,
    record_collectives,
    shard_map,
)
from k31fn.parallel.scan import Prefetch, prefetch, scan
from k31fn.parallel.tiling import cut
from k31fn.testing import Ranks, assert_close_trees, assert_sharded_equals_dense, live_bytes
from tests.parallel import cases_fsdp as cases

MIX = torch.tensor(0.7, dtype=torch.float64)
FSDP2 = Mesh(fsdp=2)
LEAVES, SMALL = 3 * cases.LAYERS, cases.LAYERS


def specs_on(mesh: Mesh) -> tuple[Any, ...]:
    return partition(cases.SPECS, AxisRules(), mesh), cases.ROWS, P()


@pytest.mark.parametrize("mode", ["scan", "prefetch"])
@pytest.mark.parametrize(
    ("mesh", "psums"),
    [
        (Mesh(fsdp=2), SMALL + 1),
        (Mesh(fsdp=4), SMALL + 1),
        (Mesh(dp=2), LEAVES + 1),
        (Mesh(dp=2, fsdp=2), 2 * SMALL + 1),  # the matrices of a layer as one
        (Mesh(fsdp=2, cp=2), SMALL + 2),
        (Mesh(fsdp=2, tp=2), SMALL + 1 + 2 * cases.LAYERS),
    ],
    ids=str,
)
def test_equals_one_device(mesh, psums, mode, two_ranks: Ranks, four_ranks: Ranks):
    again = mode == "scan"
    counts = {"psum": psums + (cases.LAYERS if mesh.tp > 1 and again else 0)}
    if mesh.fsdp > 1:
        counts |= {
            "all_gather": cases.LAYERS * (1 + again),
            "psum_scatter": cases.LAYERS,
        }  # both matrices as one
    report = assert_sharded_equals_dense(
        cases.chain if again else cases.prefetched,
        (cases.weights(), cases.inputs(), MIX),
        specs_on(mesh),
        (cases.ROWS, P(("dp", "fsdp"))),
        mesh,
        collectives=counts,
        dense=cases.plain,
        rtol=1e-10,
        atol=1e-12,
        ranks=two_ranks if mesh.world_size == 2 else four_ranks,
    )
    assert report.backends == ("simulated", "threads", "processes")


@pytest.mark.parametrize("backend", ["simulated", "threads"])
def test_prefetch_alone_has_every_derivative(backend):
    mesh, (part, rows, _) = Mesh(dp=2, fsdp=2), specs_on(Mesh(dp=2, fsdp=2))

    def squared(axes: Any, layers: Any, x: Tensor, mode: str) -> Tensor:
        def total(w: Any) -> Tensor:
            return psum(loss(axes, w, x, mode), axes.data)

        grads = value_and_grad(total)(layers)[1]
        return sum((psum(g["a"].square().sum(), axes.fsdp) for g in grads), torch.zeros(()))

    def second(axes: Any, layers: Any, x: Tensor, mode: str = "prefetch") -> Any:
        return value_and_grad(lambda w: squared(axes, w, x, mode))(layers)[1]

    got = shard_map(second, mesh, (part, rows), part, backend=backend)(
        cases.weights(), cases.inputs()
    )
    want = second(Mesh().axes(), cases.weights(), cases.inputs(), "plain")
    assert_close_trees(got, want, rtol=1e-9, atol=1e-9)


def run(f: Any, mesh: Mesh, *args: Any) -> tuple[list[Any], list[list[str]]]:
    """``f(axes, layers, x, *args)`` on each rank (threads), and each rank's events, repetitions
    left out.
    """
    part, values, structure = specs_on(mesh)[0], *tree.flatten(cases.weights())

    def local(coordinate: Any) -> tuple[Any, ...]:
        layers = tree.unflatten(structure, cut(tree.leaves(part), values, mesh, coordinate))
        return layers, cut([cases.ROWS], [cases.inputs()], mesh, coordinate)[0], *args

    with record_collectives() as record:
        results = each_rank(f, mesh, local)
    events = [
        [e.kind if e.what == "note" else f"{e.what} {e.kind}" for e in r.events]
        for r in record.ranks
    ]
    return results, [[e for i, e in enumerate(own) if i == 0 or own[i - 1] != e] for own in events]


def loss(axes: Any, layers: Any, x: Tensor, mode: str = "scan") -> Tensor:
    return cases.loss_of(axes, layers, x, cases.placed(axes, cases.mesh_of(axes)), mode)


def gradient(axes: Any, layers: Any, x: Tensor, mode: str = "scan") -> Any:
    return value_and_grad(lambda w: loss(axes, w, x, mode))(layers)[1]


FORWARD = [
    *("issue all_gather", "wait all_gather"),
    *("issue all_gather", "run 0", "wait all_gather"),
    *("issue all_gather", "run 1", "wait all_gather"),
    "run 2",
]
BACKWARD = [
    *("issue all_gather", "wait all_gather"),
    *("issue all_gather", "run 2", "pull 2", "issue psum_scatter", "wait all_gather"),
    *(
        "issue all_gather",
        "run 1",
        "pull 1",
        "wait psum_scatter",
        "issue psum_scatter",
        "wait all_gather",
    ),
    *(
        "run 0",
        "wait psum_scatter",
        "issue psum_scatter",
        "wait psum_scatter",
    ),  # nobody asks for the first carry's
]


def without_psums(events: list[str]) -> list[str]:
    """Those of the small leaves."""
    kept = [e for e in events if not e.endswith(" psum")]
    return [e for i, e in enumerate(kept) if i == 0 or kept[i - 1] != e]


@pytest.mark.parametrize(
    "differentiate", [gradient, lambda a, w, x: torch.func.grad(lambda w: loss(a, w, x))(w)]
)
def test_gathers_run_a_layer_ahead_and_scatters_a_layer_behind(differentiate):
    _, ranks = run(differentiate, FSDP2)
    for events in ranks:
        assert without_psums(events) == FORWARD + BACKWARD


def test_prefetch_alone_keeps_weights():
    _, ranks = run(functools.partial(gradient, mode="prefetch"), FSDP2)
    for events in ranks:
        got = without_psums(events)
        assert got[: len(FORWARD)] == FORWARD
        assert "issue all_gather" not in got[len(FORWARD) :]
        assert (
            got.index("issue psum_scatter") < got.index("pull 1") < got.index("wait psum_scatter")
        )


def test_the_pullback_runs_on_another_thread():
    """As on CUDA: nothing of the forward's context is there."""

    def elsewhere(axes: Any, layers: Any, x: Tensor) -> Any:
        value, pull = vjp(lambda w: loss(axes, w, x), layers)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(pull(torch.ones_like(value))[0]))
        thread.start()
        thread.join()
        return found[0]

    here, _ = run(gradient, FSDP2)
    there, ranks = run(elsewhere, FSDP2)
    assert_close_trees(there, here, rtol=0.0, atol=0.0)
    for events in ranks:
        assert without_psums(events) == FORWARD + BACKWARD


class Everything(Prefetch):
    """Asks for the weights of all layers at once."""

    def __init__(self, params: Any, placements: Any, order: Any) -> None:
        pairs = [(params[i], placements[i]) for i in order]
        self.all = [prefetch.start_gather(*pair) for pair in pairs]

    def take(self) -> Any:
        return prefetch.wait_gather(self.all.pop(0))


def most_alive(monkeypatch: pytest.MonkeyPatch) -> int:
    """The largest number of layers whose weights a rank asked for and has not let go of, in a
    gradient.
    """
    start, wait = prefetch.start_gather, prefetch.wait_gather
    alive: collections.Counter[int] = collections.Counter()
    most: collections.Counter[int] = collections.Counter()

    def counted_start(params: Any, placements: Any) -> Any:
        rank = threading.get_ident()
        alive[rank] += 1
        most[rank] = max(most[rank], alive[rank])
        return start(params, placements)

    def counted_wait(gathering: Any) -> Any:
        found, rank = wait(gathering), threading.get_ident()
        weakref.finalize(found["a"].untyped_storage(), lambda: alive.subtract({rank: 1}))
        return found

    monkeypatch.setattr(prefetch, "start_gather", counted_start)
    monkeypatch.setattr(prefetch, "wait_gather", counted_wait)
    run(gradient, FSDP2)
    assert set(alive.values()) == {0}
    return max(most.values())


def test_at_most_two_layers_are_gathered(monkeypatch):
    assert most_alive(monkeypatch) == 2


def test_a_prefetch_of_everything_is_found(monkeypatch):
    monkeypatch.setattr(prefetch, "Prefetch", Everything)
    assert most_alive(monkeypatch) == cases.LAYERS


def kept_bytes(*, shared_block: bool) -> int:
    """Between forward and backward, on one device: six layers that pass on a block, or a copy of
    it.
    """
    layers, x = cases.weights()[:1] * 6, cases.inputs()
    places = cases.placed(Mesh().axes(), Mesh(), cases.SPECS[:1] * 6)

    def step(w: Any, carry: Any, shared: Any, own: Any) -> Any:
        x, block = carry
        return (
            torch.tanh(x @ w["a"]) @ w["b"] + block,
            block if shared_block else block.clone(),
        ), ()

    def f(layers: Any, x: Tensor) -> Tensor:
        return scan([step] * 6, places, layers, (x.clone(), x.clone()), (), [()] * 6)[0][0]

    with live_bytes() as live:
        y, pull = vjp(f, layers, x)
        kept = live.current - y.nbytes
    assert pull(y)
    return kept


def test_a_layer_keeps_only_what_it_added_to_the_carry():
    size = cases.inputs().nbytes
    assert kept_bytes(shared_block=True) == (6 + 1) * size  # each layer's x, and the block
    assert kept_bytes(shared_block=False) == (6 + 6) * size


def test_carries_are_freed_as_the_backward_goes():
    """The gradients of inputs as large as a carry take the place of carries that were used."""
    n, size = 12, cases.inputs().nbytes
    specs = [{"a": cases.ParamSpec((8, 4, cases.D), ("", "", ""), cases.Normal(1.0))}] * n
    places = cases.placed(Mesh().axes(), Mesh(), specs)
    layers = [{"a": cases.inputs(i)} for i in range(n)]

    def f(layers: Any) -> Tensor:
        steps = [lambda w, x, shared, own: (torch.sin(x * w["a"]), ())] * n
        return scan(steps, places, layers, cases.inputs(), (), [()] * n)[0].sum()

    with live_bytes() as live:
        value_and_grad(f)(layers)
    assert live.peak < (n + 10) * size  # not 2 n


def test_choices_are_made_once():
    """A choice that would come out differently the second time."""
    calls: list[int] = []
    axes = Mesh().axes()
    places = cases.placed(axes, Mesh())

    def choose(x: Tensor) -> Tensor:
        calls.append(1)
        return torch.full_like(x, len(calls), dtype=torch.int64)

    def step(w: Any, x: Tensor, shared: Any, own: Any) -> Any:
        return x + (x @ w["a"] @ w["b"]) * autodiff.decision("count", choose, x), ()

    def f(layers: Any) -> Tensor:
        return scan([step] * 3, places, layers, cases.inputs(), (), [()] * 3)[0].square().sum()

    def fixed(layers: Any) -> Tensor:
        x = cases.inputs()
        for i, w in enumerate(layers):
            x = x + (x @ w["a"] @ w["b"]) * (i + 1)
        return x.square().sum()

    got = value_and_grad(f)(cases.weights())
    assert len(calls) == 3
    assert_close_trees(got, value_and_grad(fixed)(cases.weights()), rtol=1e-13, atol=1e-13)
    calls.clear()
    assert_close_trees(
        value_and_grad(autodiff.remat(f))(cases.weights()), got, rtol=1e-13, atol=1e-13
    )
    assert len(calls) == 3
    with autodiff.record_decisions() as made:
        first = f(cases.weights())
    with autodiff.replay_decisions(made):
        assert torch.equal(f(cases.weights()), first)
    assert len(calls) == 6


def test_a_second_derivative_is_refused():
    axes = Mesh().axes()

    def squared(layers: Any) -> Tensor:
        grads = value_and_grad(lambda w: loss(axes, w, cases.inputs()))(layers)[1]
        return sum((g.square().sum() for g in tree.leaves(grads)), torch.zeros(()))

    with pytest.raises(RuntimeError, match=r"scan is first order only.*use remat='none'"):
        value_and_grad(squared)(cases.weights())


def test_a_second_backward_is_refused():
    layers = tree.map(lambda w: w.requires_grad_(), cases.weights())
    value = loss(Mesh().axes(), layers, cases.inputs())
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran already"):
        value.backward()


def test_no_layers_and_absent_gradients():
    carry = torch.ones(2)
    assert scan([], [], [], carry, (), []) == (carry, ())
    places = cases.placed(Mesh().axes(), Mesh())

    def ignores(w: Any, x: Tensor, shared: Any, own: Any) -> Any:
        return x * w["small"].sum(), ()

    layers = cases.weights()
    grads = value_and_grad(
        lambda w: scan([ignores] * 3, places, w, cases.inputs(), (), [()] * 3)[0].sum()
    )(layers)[1]
    assert all(not g["a"].any() and g["small"].all() for g in grads)


@pytest.mark.parametrize("mode", ["scan", "prefetch", "plain"])
def test_frozen_weights_have_no_gradient_and_send_none(mode):
    def freeze(path: str, spec: Any) -> Any:
        return (
            dataclasses.replace(spec, tags=spec.tags | {"frozen"})
            if path.endswith(("a", "small"))
            else spec
        )

    specs = tree.map_with_path(freeze, cases.SPECS)

    def trained_only(axes: Any, layers: Any, x: Tensor) -> Any:
        places = cases.placed(axes, FSDP2, specs)
        with FlopCounterMode(display=False) as flops:
            grads = value_and_grad(lambda w: cases.loss_of(axes, w, x, places, mode))(layers)[1]
        return grads, flops.get_total_flops()

    every, _ = run(functools.partial(gradient, mode=mode), FSDP2)
    got, ranks = run(trained_only, FSDP2)
    for (grads, flops), want in zip(got, every, strict=True):
        assert not any(g["a"].any() or g["small"].any() for g in grads)
        assert_close_trees([g["b"] for g in grads], [g["b"] for g in want], rtol=1e-12, atol=1e-12)
        product = 2 * 4 * 4 * cases.D * cases.F  # a rank has 4 rows of 4 tokens
        runs = 2 if mode == "scan" else 1
        # backward: both products of b, and that of a for its input; of layer 0 only that for the
        # weight
        assert flops == cases.LAYERS * product * (2 * runs + 3) - 2 * product
    assert not any(e.endswith(" psum") for events in ranks for e in events)


@pytest.mark.parametrize("backend", ["simulated", "threads"])
def test_a_forgotten_pvary_of_a_small_leaf_is_found(backend, monkeypatch):
    mesh = FSDP2
    part = specs_on(mesh)[0]
    forgetting = functools.partial(
        shard_map, gradient, mesh, (part, cases.ROWS), part, backend=backend
    )
    forgetting()(cases.weights(), cases.inputs())
    placed = cases.placed
    monkeypatch.setattr(
        cases, "placed", lambda *args, **kw: cases.fsdp.gather_only(placed(*args, **kw))
    )
    with pytest.raises(ValueError, match="pvary"):
        forgetting()(cases.weights(), cases.inputs())


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["scan", "prefetch"])
def test_ranks_that_share_a_gpu_equal_the_cpu(mode):
    mesh, args = Mesh(fsdp=2, dp=2), (cases.weights(), cases.inputs())
    part = partition(cases.SPECS, AxisRules(), mesh)
    step = shard_map(
        functools.partial(gradient, mode=mode), mesh, (part, cases.ROWS), part, backend="threads"
    )
    got = step(*tree.map(lambda x: x.cuda(), args))
    assert_close_trees(tree.map(lambda x: x.cpu(), got), step(*args), rtol=1e-12, atol=1e-12)
