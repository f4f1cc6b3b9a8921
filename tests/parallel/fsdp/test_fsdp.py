from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn import params, tree
from k31fn.autodiff import value_and_grad
from k31fn.parallel import (
    AxisRules,
    Mesh,
    P,
    each_rank,
    fsdp,
    partition,
    record_collectives,
    shard_map,
)
from k31fn.parallel.collective_record import Event
from k31fn.parallel.fsdp import replicas
from k31fn.parallel.tiling import cut
from k31fn.params import Normal, ParamSpec
from k31fn.testing import Ranks, assert_close_trees, assert_sharded_equals_dense
from tests.parallel import cases_fsdp as cases

LAYERS, MATRICES = cases.LAYERS, 2 * cases.LAYERS


def spec(
    *shape: int,
    axes: tuple[str, ...],
    tags: tuple[str, ...] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    return ParamSpec(shape, axes, Normal(1.0), dtype, frozenset(tags))


def names(place: fsdp.Placement) -> tuple[list[str], list[str]]:
    return [a.name for a in place.gather], [a.name for a in place.vary]


def test_where_each_leaf_is():
    specs = {
        "dense": spec(8, 16, axes=("hidden", "mlp")),
        "experts": spec(4, 8, 16, axes=("experts", "hidden", "expert_mlp"), tags=("expert",)),
        "odd": spec(4, 3, 5, axes=("experts", "", ""), tags=("expert",)),
        "small": spec(3, axes=("",), dtype=torch.float32),
    }
    mesh = Mesh(dp=2, fsdp=4, tp=2, ep=4)  # experts over tp and half of fsdp
    part = partition(specs, AxisRules(), mesh)
    places = fsdp.placements(specs, part, mesh.axes(), compute=torch.bfloat16, reduce=torch.float32)
    assert names(places["dense"]) == (["fsdp_outer", "fsdp_inner"], ["dp"])
    assert names(places["experts"]) == (
        ["fsdp_outer"],
        ["dp"],
    )  # split over fsdp_inner: neither gathered nor varied
    assert [a.name for a in places["experts"].axes] == ["fsdp_inner", "tp", "fsdp_outer"]
    assert names(places["odd"]) == ([], ["dp", "fsdp_outer"])
    assert names(places["small"]) == ([], ["dp", "fsdp_outer", "fsdp_inner"])
    assert [p.dtype for p in places.values()] == [torch.bfloat16] * 3 + [torch.float32]
    assert all(p.grad_dtype == torch.float32 for p in places.values())
    assert names(fsdp.gather_only(places)["dense"]) == (["fsdp_outer", "fsdp_inner"], [])


@pytest.mark.parametrize(
    ("p", "message"),
    [
        (P("fsdp", "cp"), r"w: P\('fsdp', 'cp'\): data axes split its dimensions \[0, 1\]"),
        (P(("fsdp", "tp")), r"w: .*data axes \['fsdp'\] must come last"),
        (
            P(("cp", "fsdp")),
            r"w: .*data axes \['fsdp', 'cp'\] must come last in their dimension, in this order",
        ),
    ],
)
def test_what_gathering_would_disorder_is_refused(p, message):
    mesh = Mesh(fsdp=2, cp=2, tp=2)
    with pytest.raises(ValueError, match=message):
        fsdp.placements({"w": spec(8, 8, axes=("", ""))}, {"w": p}, mesh.axes())


@pytest.mark.parametrize(
    ("mesh", "psums"),
    [
        (Mesh(fsdp=2), LAYERS + 1),
        (Mesh(dp=2), MATRICES + LAYERS + 1),
        (Mesh(dp=2, fsdp=2), MATRICES + LAYERS + 1),
    ],
    ids=str,
)
def test_gather_where_used_equals_one_device(mesh, psums):
    """To any order; FSDP, DDP and HSDP."""
    counts = {"psum": psums}
    if mesh.fsdp > 1:
        counts |= {"all_gather": MATRICES, "psum_scatter": MATRICES}
    assert_sharded_equals_dense(
        cases.plain,
        (cases.weights(), cases.inputs(), torch.tensor(0.7, dtype=torch.float64)),
        (partition(cases.SPECS, AxisRules(), mesh), cases.ROWS, P()),
        (cases.ROWS, P(("dp", "fsdp"))),
        mesh,
        collectives=counts,
        backends=("simulated", "threads"),
        rtol=1e-10,
        atol=1e-12,
    )


# ------------------------------------------------------------------------------------ a step's sums
STEPS = {
    "DDP": Mesh(dp=4),
    "FSDP": Mesh(fsdp=4),
    "HSDP": Mesh(dp=2, fsdp=2),
    "FSDP and TP": Mesh(fsdp=2, tp=2),
}


def expected() -> tuple[Tensor, Any, Tensor]:
    """Of the whole batch at once, on one device."""
    axes, x = Mesh().axes(), cases.inputs(rows=12)
    loss = functools.partial(
        cases.loss_of, axes, x=x, places=cases.placed(axes, Mesh()), mode="plain"
    )
    value, grads = value_and_grad(lambda w: loss(w))(cases.weights())
    return value, grads, torch.cat([g.flatten() for g in tree.leaves(grads)]).norm()


@pytest.mark.parametrize("backend", ["simulated", "threads"])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("kind", STEPS)
def test_gradients_and_norm_of_a_step(kind, micro, backend):
    """Whatever the mesh and the accumulation; replicas are summed once."""
    mesh = STEPS[kind]
    part = partition(cases.SPECS, AxisRules(), mesh)
    step = functools.partial(cases.gradients, micro=micro)
    mapped = shard_map(
        lambda a, w, x: step(a, w, x), mesh, (part, cases.ROWS), (P(), part, P()), backend=backend
    )
    with record_collectives() as record:
        got = mapped(cases.weights(), cases.inputs(rows=12))
    assert_close_trees(got, expected(), rtol=1e-10, atol=1e-12)
    # gradients of split and of whole leaves, each kind at once; what else is summed are scalars
    replicas = [
        e
        for e in record.events
        if e.what == "issue" and e.kind == "psum" and "tp" not in e.axes and e.nbytes > 8
    ]
    assert len(replicas) == {"DDP": 1, "FSDP": 1, "HSDP": 2, "FSDP and TP": 1}[kind]


@pytest.mark.slow
def test_gradients_of_a_step_on_processes(four_ranks: Ranks):
    mesh, x = Mesh(dp=2, fsdp=2), cases.inputs(rows=12)
    part = partition(cases.SPECS, AxisRules(), mesh)
    want = expected()
    for rank, (got, info) in enumerate(
        four_ranks.run(cases.gradients_on_rank, mesh, cases.weights(), x, 3)
    ):
        tiles = cut(tree.leaves(part), tree.leaves(want[1]), mesh, mesh.coordinate(rank))
        assert_close_trees(got, [want[0], want[2], *tiles], rtol=1e-10, atol=1e-12)
        assert (
            info["psum"] == 2 + 1 + 1
        )  # two kinds of leaves, the loss, the norm of the split ones


def test_buckets_are_bounded(monkeypatch):
    monkeypatch.setattr(replicas, "_BUCKET", 8 * (8 * 12 + 3))  # one matrix and a small leaf
    mesh = Mesh(dp=2)
    part = partition(cases.SPECS, AxisRules(), mesh)
    mapped = shard_map(
        lambda a, w, x: cases.gradients(a, w, x, 1), mesh, (part, cases.ROWS), (P(), part, P())
    )
    with record_collectives() as record:
        got = mapped(cases.weights(), cases.inputs(rows=12))
    assert_close_trees(got, expected(), rtol=1e-10, atol=1e-12)
    sizes = [
        e.nbytes for e in record.events if e.what == "issue" and e.kind == "psum" and e.nbytes > 8
    ]
    assert sum(sizes) == LAYERS * 8 * (2 * 8 * 12 + 3)
    assert max(sizes) <= 8 * (8 * 12 + 3)


def test_gradients_may_lack_leaves():
    """Those of frozen parameters."""
    mesh = Mesh(dp=2)

    def f(axes: Any, w: Any) -> Any:
        places = cases.placed(axes, mesh)
        grads = [{"a": layer["a"], "b": (), "small": ()} for layer in fsdp.enter_step(w, places)]
        return fsdp.sum_gradients(grads, places)

    got = shard_map(f, mesh, (P(),), P(), backend="threads")(cases.weights())
    assert_close_trees([g["a"] for g in got], [2 * w["a"] for w in cases.weights()], rtol=0, atol=0)


# ------------------------------------------------------------------------------------------- dtypes
def wide_and_narrow(axes: Any, w: Any, x: Tensor, **dtypes: Any) -> Any:
    specs = {"m": spec(2, 1, axes=("", "")), "s": spec(1, axes=("",))}
    places = fsdp.placements(specs, partition(specs, AxisRules(), Mesh(fsdp=2)), axes, **dtypes)

    def loss(w: Any) -> Tensor:
        full = fsdp.gather(w, places)
        assert {t.dtype for t in full.values()} == {torch.bfloat16}
        return ((full["m"] * x).sum() + (full["s"] * x[0]).sum()).to(torch.float32)

    return value_and_grad(loss)(w)[1]


def run_dtypes(param: torch.dtype, **dtypes: Any) -> tuple[Any, list[Event]]:
    """Gradients whose sum over two ranks, 256 + 1, bfloat16 does not hold."""
    w = {"m": torch.ones(2, 1, dtype=param), "s": torch.ones(1, dtype=param)}
    x = torch.tensor([[256.0], [256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    part = {"m": P("fsdp"), "s": P()}
    f = functools.partial(wide_and_narrow, **dtypes)
    mapped = shard_map(
        lambda a, w, x: f(a, w, x), Mesh(fsdp=2), (part, P("fsdp")), part, backend="threads"
    )
    with record_collectives() as record:
        grads = mapped(w, x)
    return grads, [e for e in record.events if e.what == "issue"]


def test_gradients_are_summed_in_the_reduce_dtype():
    grads, issued = run_dtypes(torch.float32, compute=torch.bfloat16, reduce=torch.float32)
    assert grads["m"].tolist() == [[257.0], [257.0]]
    assert grads["s"].tolist() == [257.0]
    assert {e.kind: e.nbytes for e in issued} == {"all_gather": 2, "psum_scatter": 2 * 4, "psum": 4}


def test_without_one_gradients_travel_in_the_compute_dtype():
    grads, issued = run_dtypes(torch.bfloat16)
    assert grads["m"].to(torch.float32).tolist() == [[256.0], [256.0]]
    assert {e.kind: e.nbytes for e in issued} == {"all_gather": 2, "psum_scatter": 2 * 2, "psum": 2}


def test_a_step_sums_micro_batches_in_the_reduce_dtype():
    """Also gradients of parameters that are narrower."""
    places = fsdp.placements(
        {"w": spec(4, axes=("",))}, {"w": P()}, Mesh().axes(), reduce=torch.float32
    )
    held = fsdp.enter_step({"w": torch.ones(4, dtype=torch.bfloat16)}, places)
    assert (
        value_and_grad(lambda w: fsdp.gather(w, fsdp.gather_only(places))["w"].sum())(held)[1][
            "w"
        ].dtype
        == torch.float32
    )


def test_codes_travel_as_they_are():
    specs = params.Quantized(spec(4, 2, axes=("", ""), dtype=torch.int8), spec(2, 2, axes=("", "")))
    w = params.Quantized(torch.arange(8, dtype=torch.int8).reshape(4, 2), torch.ones(2, 2))
    part = partition(specs, AxisRules(), Mesh(fsdp=2))

    def f(axes: Any, w: Any) -> Any:
        places = fsdp.placements(specs, part, axes, compute=torch.bfloat16, reduce=torch.float32)
        return fsdp.gather(w, places)

    first = each_rank(
        lambda axes, c: f(axes, c), Mesh(fsdp=2), lambda c: (cut_tree(part, w, Mesh(fsdp=2), c),)
    )[0]
    assert torch.equal(first.codes, w.codes)
    assert first.scales.dtype == torch.bfloat16


def cut_tree(part: Any, values: Any, mesh: Mesh, coordinate: Any) -> Any:
    flat, structure = tree.flatten(values)
    return tree.unflatten(structure, cut(tree.leaves(part), flat, mesh, coordinate))


# ------------------------------------------------------------------------------------------- memory
@pytest.mark.slow
def test_memory_of_a_rank_shrinks(two_ranks: Ranks, four_ranks: Ranks):
    wide = sum(s.numel for s in tree.leaves(cases.WIDE)) * 4
    whole, small = wide // len(cases.WIDE), 4 * 3 * len(cases.WIDE)
    peaks = {}
    for n, ranks in ((2, two_ranks), (4, four_ranks)):
        for mode in ("scan", "prefetch"):
            for _, got in ranks.run(cases.peak_on_rank, mode):
                mine = (wide - small) // n + small
                assert (got["params"], got["grads"], got["state"]) == (mine, mine, 2 * mine)
                peaks[n, mode] = got["peak"]
    # gradients of all parts; two layers' weights and gradients, half as much again while one is put
    # in order
    for n in (2, 4):
        assert peaks[n, "scan"] < wide // n + 5 * whole
        assert peaks[n, "prefetch"] > wide  # all weights
    assert peaks[4, "scan"] < peaks[2, "scan"] - 0.7 * (
        wide // 2 - wide // 4
    )  # two layers before the last gradient
