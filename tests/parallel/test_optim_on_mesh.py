"""Optimisers on the parts of a mesh: the steps of one device, the same bits on all replicas."""

from __future__ import annotations

import importlib
import itertools
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn import optim, params, random, tree
from k31fn.optim import matrix_owners
from k31fn.parallel import (
    AxisRules,
    Mesh,
    each_rank,
    fsdp,
    partition,
    record_collectives,
    shard_map,
)
from k31fn.parallel.partition import local_shape, tiles
from k31fn.testing import Ranks, assert_close_trees
from k31fn.trainer.ranks.agreement import coordinate_of
from tests.parallel import cases_optim as cases
from tests.parallel.every import every

INF = float("inf")
MESHES = [
    Mesh(fsdp=2),
    Mesh(tp=2),
    Mesh(fsdp=2, ep=2),
    Mesh(dp=2),
    Mesh(dp=2, fsdp=2),
    Mesh(fsdp=4, ep=2),
    Mesh(fsdp=2, tp=2),
    Mesh(tp=2, ep=2),
    Mesh(fsdp=2, cp=2, tp=2, ep=4),
]


def on_threads(mesh: Mesh, f: Any, *trees: dict[str, Tensor]) -> list[Any]:
    """``f(axes, *parts of trees)`` on each rank."""
    return each_rank(
        f, mesh, lambda coordinate: tuple(cases.local(mesh, t, coordinate) for t in trees)
    )


def check_replicas(mesh: Mesh, ranks: list[dict[str, Tensor]]) -> None:
    """Ranks that hold the same part hold the same bits."""
    held: dict[Any, Tensor] = {}
    for coordinate, got in zip(mesh.coordinates(), ranks, strict=True):
        for path, spec in partition(cases.SPECS, AxisRules(), mesh).items():
            names, x = {a.name for views in spec.dims for a in mesh.axes().view(*views)}, got[path]
            key = path, tuple((n, i) for n, i in coordinate.items() if n in names)
            assert torch.equal(held.setdefault(key, x), x), path


@every(
    "kind mesh",
    itertools.product(["adamw", "muon"], MESHES),
    [
        ("adamw", Mesh(dp=2, fsdp=2)),
        ("adamw", Mesh(fsdp=4, ep=2)),
        ("muon", Mesh(fsdp=2, tp=2)),
        ("muon", Mesh(tp=2, ep=2)),
        ("muon", Mesh(fsdp=2, cp=2, tp=2, ep=4)),
    ],
)
def test_three_steps_equal_one_device(mesh, kind):
    wanted = cases.three_steps(Mesh().axes(), Mesh(), kind, cases.weights(), *cases.gradients())
    ranks = on_threads(
        mesh,
        lambda axes, *trees: cases.three_steps(axes, mesh, kind, *trees),
        cases.weights(),
        *cases.gradients(),
    )
    for coordinate, got in zip(mesh.coordinates(), ranks, strict=True):
        assert_close_trees(
            got.params, cases.local(mesh, wanted.params, coordinate), rtol=1e-10, atol=1e-12
        )
        torch.testing.assert_close(got.norm, wanted.norm, rtol=1e-12, atol=0)
        for path, shape in got.state_shapes.items():
            assert shape == got.params[path].shape
    check_replicas(mesh, [r.params for r in ranks])


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_three_steps_on_processes(kind, four_ranks: Ranks):
    mesh = Mesh(fsdp=2, tp=2)
    wanted = cases.three_steps(Mesh().axes(), Mesh(), kind, cases.weights(), *cases.gradients())
    answers = four_ranks.run(cases.steps_on_rank, mesh, kind, [cases.weights(), *cases.gradients()])
    got = [dict(zip(cases.SPECS, tensors, strict=True)) for tensors, _ in answers]
    for coordinate, mine in zip(mesh.coordinates(), got, strict=True):
        assert_close_trees(
            mine, cases.local(mesh, wanted.params, coordinate), rtol=1e-10, atol=1e-12
        )
    check_replicas(mesh, got)


def test_a_step_in_the_simulated_mesh():
    """Where the same code is traced for all ranks at once."""
    mesh = Mesh(fsdp=2, tp=2)
    part = partition(cases.SPECS, AxisRules(), mesh)

    def step(axes: Any, w: Any, g: Any) -> Any:
        transform = cases.optimizer("muon", fsdp.placements(cases.SPECS, part, axes))
        return transform.update(g, transform.init(w), w, lr=0.1, donate=False)[0]

    one = cases.optimizer("muon", ())
    w, g = cases.weights(), cases.gradients()[0]
    want = one.update(g, one.init(w), w, lr=0.1, donate=False)[0]
    assert_close_trees(
        shard_map(step, mesh, (part, part), part)(w, g), want, rtol=1e-10, atol=1e-12
    )


LAYERS = {f"{i}.{name}": spec for i in range(3) for name, spec in cases.SPECS.items()}


def flops(shape: Any) -> int:
    """Of Newton-Schulz on a batch of matrices, up to a factor."""
    count, (short, long) = shape[0], sorted(shape[1:])
    return count * short * short * (2 * long + short)


def worked_on(mesh: Mesh, monkeypatch: Any) -> tuple[list[list[tuple[int, ...]]], list[Any]]:
    """The shapes that each rank orthogonalises in a step, and its record of collectives."""
    seen: dict[str, list[tuple[int, ...]]] = {}
    muon = importlib.import_module("k31fn.optim.muon")
    plain = muon.orthogonalize

    def noting(x: Tensor, **kw: Any) -> Tensor:
        seen.setdefault(threading.current_thread().name, []).append(tuple(x.shape))
        return plain(x, **kw)

    part = partition(LAYERS, AxisRules(), mesh)
    weights = params.init(LAYERS, random.key(0), dtype=torch.float64)

    def step(axes: Any, w: Any) -> Any:
        transform = optim.muon(LAYERS, placements=fsdp.placements(LAYERS, part, axes))
        return transform.update(w, transform.init(w), w, lr=0.1, donate=True)

    monkeypatch.setattr(muon, "orthogonalize", noting)
    with record_collectives() as record:
        each_rank(step, mesh, lambda c: (cases.cut_tree(part, weights, mesh, c),))
    monkeypatch.setattr(muon, "orthogonalize", plain)
    return [seen.get(f"rank {r}", []) for r in range(mesh.world_size)], record.ranks


@pytest.mark.parametrize(
    "mesh", [Mesh(fsdp=2), Mesh(tp=2), Mesh(fsdp=2, ep=2), Mesh(dp=2), *MESHES[4:]], ids=str
)
def test_each_rank_does_its_share(mesh, monkeypatch):
    """Together the work of one device; none has more than the mean and one block, or two matrices
    at once.
    """
    monkeypatch.setattr(matrix_owners, "_LEAST", 0)
    (alone,), _ = worked_on(Mesh(), monkeypatch)
    ranks, records = worked_on(mesh, monkeypatch)
    total = sum(map(flops, alone))
    assert sum(flops(shape) for shapes in ranks for shape in shapes) == total
    largest = max(flops((1, *shape[1:])) for shape in alone)
    assert max(sum(map(flops, shapes)) for shapes in ranks) <= total / mesh.world_size + largest
    elements = max(math.prod(shape[1:]) for shape in alone)
    assert max(math.prod(shape) for shapes in ranks for shape in shapes) <= elements
    for record in records:
        sent = [e.nbytes for e in record.events if e.what == "issue"]
        assert set(record.counts) <= {"ragged_all_to_all"}
        assert max(sent) <= 8 * elements * mesh.world_size


def test_at_most_two_rounds_are_under_way(monkeypatch):
    """The parts of a round are asked for while the one before is worked on, never earlier."""
    monkeypatch.setattr(matrix_owners, "_LEAST", 0)
    mesh = Mesh(fsdp=2)
    part = partition(LAYERS, AxisRules(), mesh)

    def step(axes: Any) -> Any:
        places = fsdp.placements(LAYERS, part, axes)
        w = tree.map(lambda s, p: torch.randn(local_shape(p, s.shape, mesh)), LAYERS, part)
        transform = optim.muon(LAYERS, placements=places)
        return transform.update(w, transform.init(w), w, lr=0.1, donate=True)

    with record_collectives() as record:
        each_rank(step, mesh, lambda _: ())
    under_way = most = 0
    for event in record.events:
        under_way += {"issue": 1, "wait": -1}[event.what]
        most = max(most, under_way)
    assert most == 2
    assert record.counts["ragged_all_to_all"] > 8


@every(
    "kind mesh",
    itertools.product(["adamw", "muon"], [Mesh(fsdp=2), Mesh(tp=2), Mesh(fsdp=2, tp=2)]),
    [("adamw", Mesh(fsdp=2, tp=2)), ("muon", Mesh(fsdp=2, tp=2))],
)
def test_every_mesh_draws_the_same_bits(mesh, kind):
    """Of parameters that are bfloat16 alone: every rank rounds its part as one device does."""

    def steps(mesh: Mesh, axes: Any, w: Any, *grads: Any) -> Any:
        part = partition(cases.SPECS, AxisRules(), mesh)
        inner = cases.optimizer(kind, fsdp.placements(cases.SPECS, part, axes))
        tile = tiles(cases.SPECS, part, mesh, coordinate_of(axes))
        transform = optim.rounded(inner, cases.SPECS, 7, tile=tile)
        state = transform.init(w)
        for g in grads:
            w, state = transform.update(g, state, w, lr=0.1, donate=True)
        return w

    def start() -> Any:
        return cases.weights(torch.bfloat16), *cases.gradients(torch.float32)

    whole = steps(Mesh(), Mesh().axes(), *start())
    assert whole["up"].dtype == torch.bfloat16
    ranks = on_threads(mesh, lambda axes, *trees: steps(mesh, axes, *trees), *start())
    for coordinate, got in zip(mesh.coordinates(), ranks, strict=True):
        for path, want in cases.local(mesh, whole, coordinate).items():
            assert torch.equal(got[path], want), path


# -------------------------------------------------------------------------------------- global norm
@pytest.mark.parametrize("p", [2, INF])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_norm_counts_each_element_once(mesh, p):
    grads = cases.gradients()[0]
    every = torch.cat([g.flatten() for g in grads.values()])
    part = partition(cases.SPECS, AxisRules(), mesh)

    def norm(axes: Any, g: Any) -> Tensor:
        return optim.global_norm(g, placements=fsdp.placements(cases.SPECS, part, axes), p=p)

    ranks = on_threads(mesh, norm, grads)
    torch.testing.assert_close(ranks[0], torch.linalg.vector_norm(every, ord=p), rtol=1e-12, atol=0)
    assert all(torch.equal(n, ranks[0]) for n in ranks)


@pytest.mark.parametrize("p", [2, INF])
def test_the_norm_over_pipeline_stages(p):
    """Each has other leaves, one none that is trained."""
    mesh = Mesh(pp=3, fsdp=2)
    grads = cases.gradients()[0]
    stages = [["up", "norm"], ["down", "query", "experts", "small"], []]
    every = torch.cat([grads[path].flatten() for own in stages for path in own])
    part = partition(cases.SPECS, AxisRules(), mesh)

    def norm(axes: Any, g: Any, own: list[str]) -> Tensor:
        places = fsdp.placements(cases.SPECS, part, axes)
        zero = torch.zeros((), dtype=torch.float64)
        mine = {path: g[path] for path in own}
        return optim.global_norm(mine, placements=places, stages=axes.pp, p=p, empty=zero)

    ranks = each_rank(norm, mesh, lambda c: (cases.local(mesh, grads, c), stages[c["pp"]]))
    torch.testing.assert_close(ranks[0], torch.linalg.vector_norm(every, ord=p), rtol=1e-12, atol=0)
    assert all(torch.equal(n, ranks[0]) for n in ranks)


@pytest.mark.parametrize("p", [2, INF])
@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_one_bad_element_is_known_to_all(bad, p, four_ranks: Ranks):
    mesh = Mesh(dp=2, fsdp=2)
    grads = cases.gradients()[0]
    grads["up"][7, 3] = bad  # the second half of its rows
    assert all(info["bad"] for _, info in four_ranks.run(cases.bad_on_rank, mesh, grads, p))
    part = partition(cases.SPECS, AxisRules(), mesh)

    def norm(axes: Any, g: Any) -> Tensor:
        return optim.global_norm(g, placements=fsdp.placements(cases.SPECS, part, axes), p=p)

    assert all(optim.non_finite(n) for n in on_threads(mesh, norm, grads))


def test_clipping_scales_all_ranks_alike():
    mesh, grads = Mesh(fsdp=2, tp=2), cases.gradients()[0]
    part = partition(cases.SPECS, AxisRules(), mesh)

    def clip(axes: Any, g: Any) -> Any:
        return optim.clip_by_global_norm(
            g, 0.5, placements=fsdp.placements(cases.SPECS, part, axes)
        )[0]

    want = optim.clip_by_global_norm(grads, 0.5)[0]
    ranks = on_threads(mesh, clip, grads)
    for coordinate, got in zip(mesh.coordinates(), ranks, strict=True):
        assert_close_trees(got, cases.local(mesh, want, coordinate), rtol=1e-12, atol=0)
    check_replicas(mesh, ranks)


def test_errors():
    with pytest.raises(ValueError, match="p=1 must be 2 or inf"):
        optim.global_norm({"a": torch.ones(1)}, p=1)
