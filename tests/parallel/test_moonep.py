"""LatentMoE with MoonEP against one device and against plain EP, for any skew."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from k31fn import tree
from k31fn.autodiff import vjp
from k31fn.jit.watch import MethodWatch, Watch
from k31fn.kernels.registry import use_impl
from k31fn.layers import latent_moe, routed
from k31fn.parallel import Mesh, P, partition, record_collectives, shard_map
from k31fn.parallel.backends.abstract import abstract_axes
from k31fn.parallel.moonep import route as moonep
from k31fn.testing import Ranks, assert_close_trees, assert_sharded_equals_dense
from tests.parallel import cases_moe
from tests.parallel import cases_moonep as cases

SPECS = latent_moe.specs(cases.CFG)
EXPERT = torch.arange(16)
# What the router adds to scores between 0 and 1.
SKEWS = {
    "uniform": 0.0 * EXPERT,
    "zipf": 1.5 / (1.0 + (5 * EXPERT) % 16),
    "two experts of one rank take all": 9.0 * (EXPERT // 2 == 1),
    "two experts of two ranks take all": 9.0 * (EXPERT % 11 == 3),
    "the first ranks get none": -9.0 * (EXPERT < 4),
}
MESHES = {
    "ep2 fsdp2": Mesh(fsdp=2, ep=2),
    "fsdp4 ep2": Mesh(fsdp=4, ep=2),
    "fsdp4 ep4": Mesh(fsdp=4, ep=4),
    "tp4 ep2": Mesh(tp=4, ep=2),
    "cp2 tp2 ep2": Mesh(cp=2, tp=2, ep=2),
    "fsdp2 tp2 ep4": Mesh(fsdp=2, tp=2, ep=4),
    "fsdp4 tp2 ep8": Mesh(fsdp=4, tp=2, ep=8),
}
HOT = SKEWS["two experts of one rank take all"]
ON_TWO_BACKENDS = pytest.mark.parametrize("backend", ["simulated", "threads"])


def collectives(mesh: Mesh, *, layers: int = 1, replays: int = 0) -> Counter[str]:
    """Of the layers and their gradients: as many on every backend, whatever the routes."""
    axes, n = mesh.axes(), Counter()
    n["psum"] += 7 * bool(axes.data) + 3 * bool(axes.view("dp", "efsdp"))  # gradients of weights
    if axes.tp:
        n["psum"] += 4  # of router, latent down and up, norm
        n.update(all_gather=2, psum_scatter=2)  # shared experts
    if axes.etp:
        n.update(all_gather=4, psum_scatter=3)  # latent, weights, choices; the sum
    n.update(all_gather=3, psum_scatter=1)  # counts, places; weights of copies and their gradient
    n.update(all_to_all=2 * (1 + 3 + 1))  # tokens, three matrices, sums; and back
    n = Counter({kind: layers * count for kind, count in n.items()})
    n.update(all_gather=replays, all_to_all=5 * replays)  # neither counts nor places again
    return +n


def check(f, mesh: Mesh, backend: str, bias, **kwargs):
    args = kwargs.pop("args", None) or cases.arguments(bias, batch=max(4, mesh.fsdp))
    options = {"collectives": collectives(mesh), "rtol": 1e-10, "atol": 1e-12}
    return assert_sharded_equals_dense(
        f,
        args,
        (partition(SPECS, cases_moe.WHOLE, mesh), cases_moe.TOKENS, P()),
        cases_moe.TOKENS,
        mesh,
        backends=(backend,),
        **{**options, **kwargs},
    )


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("ep2 fsdp2", "threads"),
        ("tp4 ep2", "threads"),
        ("fsdp4 ep2", "simulated"),
        ("fsdp2 tp2 ep4", "simulated"),
    ],
)
def test_values_and_gradients_equal_one_device(name: str, backend: str):
    check(cases.moe, MESHES[name], backend, HOT)


@pytest.mark.slow
@ON_TWO_BACKENDS
@pytest.mark.parametrize("name", MESHES)
def test_on_every_mesh(name: str, backend: str):
    check(cases.moe, MESHES[name], backend, HOT)


@pytest.mark.parametrize("skew", [name for name in SKEWS if SKEWS[name] is not HOT])
def test_any_skew(skew: str):
    check(cases.moe, MESHES["fsdp4 ep4"], "simulated", SKEWS[skew])


@pytest.mark.parametrize("skew", ["uniform", "two experts of one rank take all"])
def test_on_two_processes(skew: str, two_ranks: Ranks):
    check(cases.moe, MESHES["ep2 fsdp2"], "processes", SKEWS[skew], ranks=two_ranks)


def test_float32_on_two_processes(two_ranks: Ranks):
    """The tolerance is that of sums in another order."""
    args = tree.map(lambda t: t.float(), cases.arguments(HOT))
    mesh = MESHES["ep2 fsdp2"]
    check(cases.moe, mesh, "processes", HOT, args=args, ranks=two_ranks, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp4 ep4", "tp4 ep2", "fsdp2 tp2 ep4"])
def test_on_four_processes(name: str, four_ranks: Ranks):
    check(cases.moe, MESHES[name], "processes", HOT, ranks=four_ranks)


def test_every_rank_does_an_equal_share_of_the_work():
    """Two experts take all tokens, and each rank does no more than its part; with plain EP the rank
    that owns them does all.
    """
    mesh = MESHES["fsdp4 ep4"]
    args = cases.arguments(HOT, batch=8, length=64)
    # The products that add gradients of replicas are no work of one device: 1% here.
    report = check(cases.moe, mesh, "threads", None, args=args, flops=1.03 / mesh.world_size)
    assert report.flops > 0.97 / mesh.world_size


def value_and_gradients(f, mesh: Mesh, backend: str, bias):
    """Of the sum of squares over all ranks."""
    weights, x, bias = cases.arguments(bias)
    specs = partition(SPECS, cases_moe.WHOLE, mesh), cases_moe.TOKENS

    def run(axes, weights, x):
        y, pull = vjp(lambda w, x: f(axes, w, x, bias), weights, x)
        return y, *pull(2 * y)

    run_on = shard_map(run, mesh, specs, (cases_moe.TOKENS, *specs), backend=backend)
    return run_on(weights, x)


def test_a_replay_uses_the_plan_and_has_the_same_bits():
    mesh = MESHES["ep2 fsdp2"]
    plain = value_and_gradients(cases.moe, mesh, "threads", HOT)
    again = value_and_gradients(cases.remat_moe, mesh, "threads", HOT)
    assert all(map(torch.equal, tree.leaves(plain), tree.leaves(again)))
    check(cases.remat_moe, mesh, "threads", HOT, collectives=collectives(mesh, replays=1))


def test_a_stack_of_layers_with_replicas_equals_plain_ep():
    mesh = MESHES["ep2 fsdp2"]
    bias = SKEWS["zipf"]
    ours = value_and_gradients(cases.stack, mesh, "threads", bias)

    def plain(*args):
        return cases.three_layers(cases.PLAIN, *args)

    expected = value_and_gradients(plain, mesh, "threads", bias)
    assert_close_trees(ours, expected, rtol=1e-10, atol=1e-11)


def test_the_host_reads_no_count():
    """Nothing in the layer or its backward that a graph could not hold."""
    reasons: list[str] = []

    def watched(axes, weights, x, bias):
        watch = Watch("cpu", [])
        with watch, MethodWatch(watch):
            y, pull = vjp(lambda w, x: cases.moe(axes, w, x, bias), weights, x)
            pull(y)
        reasons.extend(watch.reasons)
        return y

    mesh = MESHES["ep2 fsdp2"]
    specs = partition(SPECS, cases_moe.WHOLE, mesh), cases_moe.TOKENS, P()
    run = shard_map(watched, mesh, specs, cases_moe.TOKENS, backend="threads")
    with use_impl(grouped_matmul="reference"):
        run(*cases.arguments(HOT))
    assert reasons == []


def test_one_rank_needs_no_plan():
    args = cases.arguments(HOT)
    with record_collectives() as record:
        ours = cases.moe(Mesh().axes(), *args)
    assert torch.equal(ours, cases.plain_moe(Mesh().axes(), *args))
    assert not record.events


def test_on_meta_tensors_and_what_travels():
    """Each rank is sent every token once, and of each other rank as many experts as it has
    slots.
    """
    axes = abstract_axes(MESHES["fsdp4 ep4"])
    weights, x, bias = tree.map(lambda t: t.to("meta"), cases.arguments(HOT))
    experts = tree.map(lambda w: w[:4], weights.experts)
    weights = dataclasses.replace(weights, experts=experts)
    with record_collectives() as record:
        y = cases.moe(axes, weights, x, bias)
    assert y.shape == x.shape
    own = sum(w.nbytes for w in tree.leaves(experts))
    tokens = x.nbytes  # as wide as the latent
    assert record.nbytes["all_to_all"] == 4 * own + 2 * 4 * tokens


def test_refusals():
    for slots, placement in ((-1, "moonep"), (1, "plain")):
        with pytest.raises(ValueError, match=rf"slots={slots} with placement='{placement}'"):
            latent_moe.Config(8, 8, 8, 8, 8, 2, placement=placement, slots=slots)
    axes = abstract_axes(MESHES["ep2 fsdp2"])
    with pytest.raises(ValueError, match="2 ranks do not divide num_experts=3"):
        routed.plan(torch.tensor([[0], [2]]), 3, 1, axes.ep)


# ----------------------------------------------------------------------------------- planted errors
def swapped(name, right):
    """A route with one field that another rank's would have."""

    def plan(*args):
        route = right(*args)
        return route._replace(**{name: getattr(route, name).flip(0)})

    return plan


@pytest.mark.parametrize("name", ["order", "inverse", "sizes", "sent", "taken"])
def test_a_wrong_route_is_found(name: str, monkeypatch):
    monkeypatch.setattr(moonep, "plan_route", swapped(name, moonep.plan_route))
    with pytest.raises((AssertionError, RuntimeError), match="threads against one device"):
        check(cases.moe, MESHES["ep2 fsdp2"], "threads", HOT)


def test_gradients_of_replicas_that_do_not_come_home_are_found(monkeypatch):
    """Invisible in the value."""
    stopped = lambda weight, index: weight.detach().index_select(0, index)  # noqa: E731
    monkeypatch.setattr(moonep, "_experts_at", stopped)
    with pytest.raises(AssertionError, match="3 of 12 leaves differ"):
        check(cases.moe, MESHES["ep2 fsdp2"], "threads", HOT)
