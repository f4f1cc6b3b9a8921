"""assert_sharded_equals_dense: passes on what is right on every backend, and finds each planted
error.
"""

from __future__ import annotations

import functools

import pytest
import torch

from k31fn import params, random, tree
from k31fn.layers import mlp
from k31fn.parallel import (
    AxisRules,
    Mesh,
    P,
    Sharding,
    all_gather,
    partition,
    ppermute,
    psum,
    psum_scatter,
    pvary,
)
from k31fn.testing import Ranks, assert_sharded_equals_dense, spawn_ranks
from tests.parallel import cases
from tests.parallel.test_shard_map import COUNTS, SPECS, layers

ON_TWO = ("simulated", "threads")


def mlp_arguments(dtype: torch.dtype = torch.float64):
    weights = params.init(mlp.specs(cases.MLP), random.key(1), dtype=dtype)
    return tree.map(lambda w: w * 30, weights), torch.randn(2, 4, 6, dtype=dtype)


def tp_specs(mesh: Mesh):
    return partition(mlp.specs(cases.MLP), AxisRules(spread=()), mesh)


TOKENS = P(("dp", "fsdp"), "tp")
BY_TP = {
    "all_gather": 2,
    "psum_scatter": 2,
}  # tokens come together and go apart, forward and backward

check_mlp = functools.partial(
    assert_sharded_equals_dense,
    collectives=BY_TP,
    rtol=1e-10,
    atol=1e-12,
    impls={"situ_glu": "reference"},
)


def test_the_mlp_with_tensor_parallelism_on_every_backend(two_ranks: Ranks):
    mesh = Mesh(tp=2)
    report = check_mlp(
        cases.tensor_parallel_mlp,
        mlp_arguments(),
        (tp_specs(mesh), TOKENS),
        TOKENS,
        mesh,
        ranks=two_ranks,
        flops=0.5,
    )
    assert report.backends == ("simulated", "threads", "processes")
    assert report.flops == pytest.approx(0.5)


@pytest.mark.parametrize(
    "mesh", [Mesh(tp=4), Mesh(fsdp=2, tp=2), Mesh(dp=2, fsdp=2, tp=2), Mesh(tp=4, ep=2)], ids=str
)
def test_the_mlp_on_other_meshes(mesh: Mesh):
    """Batch rows go over fsdp; a gradient of weights that are whole there would need a psum, so
    they pass pvary.
    """

    def f(axes, weights, x):
        return mlp.apply(
            tree.map(lambda w: pvary(w, axes.data), weights), x, cases.MLP, sh=Sharding.on(axes)
        ).y

    counts = BY_TP | ({"psum": 3} if mesh.fsdp > 1 else {})  # for the gradient of each weight
    if mesh.dp > 1:
        weights, x = mlp_arguments()
        args = weights, torch.cat([x, x + 1])
    else:
        args = mlp_arguments()
    report = check_mlp(
        f,
        args,
        (tp_specs(mesh), TOKENS),
        TOKENS,
        mesh,
        collectives=counts,
        flops=1 / mesh.world_size,
    )
    assert report.backends == ON_TWO
    assert "only a function at the top of an importable module" in report.skipped


def test_gathered_weights_inside_remat(two_ranks: Ranks):
    mesh = Mesh(fsdp=2)
    specs = partition(mlp.specs(cases.MLP), AxisRules(), mesh)
    check_mlp(
        cases.gathered_mlp,
        mlp_arguments(),
        (specs, P("fsdp")),
        P("fsdp"),
        mesh,
        collectives={"all_gather": 6, "psum_scatter": 3},
        ranks=two_ranks,
    )


def test_fp32_on_processes(two_ranks: Ranks):
    mesh = Mesh(tp=2)
    check_mlp(
        cases.tensor_parallel_mlp,
        mlp_arguments(torch.float32),
        (tp_specs(mesh), TOKENS),
        TOKENS,
        mesh,
        rtol=1e-5,
        atol=1e-5,  # sums in another order
        ranks=two_ranks,
        backends=("processes",),
    )


@pytest.mark.slow
def test_the_composition_on_four_processes(four_ranks: Ranks):
    args = layers(), torch.randn(4, 6, 8, dtype=torch.float64)
    modes = {
        "plain": cases.plain_composition,
        "remat": cases.composition,
        "nested": cases.nested_composition,
    }
    for mode, f in modes.items():
        for mesh in (Mesh(fsdp=2, tp=2), Mesh(fsdp=4), Mesh(tp=4), Mesh(fsdp=4, ep=2)):
            absent = {v for v in ("fsdp", "tp") if getattr(mesh, v) == 1}
            counts = dict(COUNTS[mode])
            if "fsdp" in absent:
                counts = {"psum": counts["psum"] - 1}
            if "tp" in absent:
                counts["psum"] = 1
            assert_sharded_equals_dense(
                f,
                args,
                (SPECS, P("fsdp")),
                P(),
                mesh,
                collectives=counts,
                rtol=1e-12,
                atol=1e-14,
                ranks=four_ranks,
            )


# ----------------------------------------------------------------------------------- planted errors
def check_two(f, weights=None, tokens=TOKENS, **kwargs):
    mesh = Mesh(tp=2)
    specs = (weights or tp_specs(mesh), tokens)
    return check_mlp(f, mlp_arguments(), specs, tokens, mesh, backends=ON_TWO, **kwargs)


def test_the_dense_path_in_place_of_the_sharded_one_is_found():
    with pytest.raises(
        AssertionError, match=r"simulated: a rank issued \{.*all_gather_invariant.*\}, expected"
    ):
        check_two(cases.dense_in_disguise, dense=cases.tensor_parallel_mlp)
    counts = {"all_gather_invariant": 5}
    with pytest.raises(
        AssertionError, match=r"threads: a rank did 1 of one device's work, at most 0.5"
    ):
        check_two(
            cases.dense_in_disguise, dense=cases.tensor_parallel_mlp, collectives=counts, flops=0.5
        )
    with pytest.raises(
        AssertionError, match=r"a rank issued {}, expected {'all_gather': 2, 'psum_scatter': 2}"
    ):
        check_two(lambda axes, w, x: mlp.apply(w, x, cases.MLP).y, weights=P(), tokens=P())


@pytest.mark.parametrize("backend", ON_TWO)
def test_a_missing_psum_is_found(backend):
    def f(axes, w, x):
        x = pvary(x, axes.tp)
        h = mlp.apply(w, x, cases.MLP).y
        return h if axes.tp else mlp.apply(w, x, cases.MLP).y

    with pytest.raises(ValueError, match=r"does not name 'tp'|varies over an axis"):
        check_mlp(
            f, mlp_arguments(), (tp_specs(Mesh(tp=2)), P()), P(), Mesh(tp=2), backends=(backend,)
        )


@pytest.mark.parametrize("backend", ON_TWO)
def test_a_missing_pvary_is_found(backend):
    """Invisible in the value: only the gradient of x is wrong, and varies."""

    def f(axes, w, x):
        return psum(mlp.apply(w, x, cases.MLP).y, axes.tp)

    with pytest.raises(ValueError, match=r"does not name 'tp'|varies over an axis"):
        check_mlp(
            f, mlp_arguments(), (tp_specs(Mesh(tp=2)), P()), P(), Mesh(tp=2), backends=(backend,)
        )


@pytest.mark.parametrize("backend", ON_TWO)
def test_a_doubled_psum_and_a_wrong_denominator_are_found(backend):
    def doubled(axes, w, x):
        y = mlp.apply(w, x, cases.MLP, sh=Sharding.on(axes)).y
        return psum_scatter(all_gather(y, axes.tp, 1), axes.tp, 1)

    with pytest.raises(AssertionError, match=f"{backend} against one device"):
        check_mlp(
            doubled,
            mlp_arguments(),
            (tp_specs(Mesh(tp=2)), TOKENS),
            TOKENS,
            Mesh(tp=2),
            backends=(backend,),
        )


@pytest.mark.parametrize("backend", ON_TWO)
def test_a_wrong_permutation_is_found(backend):
    def relay(axes, x, step):
        """Each rank adds the sum of its left neighbour."""
        n = 4 if axes.cp else 1
        before = ppermute(
            x.sum()[None], axes.cp, [(i, i + step) for i in range(n) if 0 <= i + step < n]
        )
        return x + before

    def dense(axes, x):
        rows = x.reshape(4, 2)
        return (
            rows + torch.cat([torch.zeros(1, dtype=x.dtype), rows.sum(1)[:-1]])[:, None]
        ).reshape(8)

    check = functools.partial(
        assert_sharded_equals_dense,
        args=(torch.randn(8, dtype=torch.float64),),
        in_specs=(P("cp"),),
        out_specs=P("cp"),
        mesh=Mesh(cp=4),
        dense=dense,
        collectives={"ppermute": 2},
        rtol=1e-12,
        atol=1e-14,
        backends=(backend,),
    )
    check(functools.partial(relay, step=1))
    with pytest.raises(AssertionError, match=f"{backend} against one device"):
        check(functools.partial(relay, step=-1))


def test_another_implementation_than_asked_for_is_found():
    with pytest.raises(
        AssertionError, match=r"op 'situ_glu' ran as \['reference'\], expected 'triton'"
    ):
        check_two(cases.tensor_parallel_mlp, impls={"situ_glu": "triton"})


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_reported_in_time_with_the_coordinate_of_who_waits():
    with (
        spawn_ranks(2, timeout=1.5) as ranks,
        pytest.raises(RuntimeError, match=r"in psum over .* on rank 0 at {'tp': 0}"),
    ):
        ranks.run(cases.absent_rank, timeout=30)


@pytest.mark.slow
def test_a_rank_that_fails_or_dies_is_reported():
    with spawn_ranks(1) as ranks:
        with pytest.raises(RuntimeError, match=r"rank 0 failed:\n(?s:.*)KeyError: 'no such'"):
            ranks.run(cases.on_rank, "no such", [], Mesh(), [[], [], []], [torch.ones(1)] * 3)
        with pytest.raises(ValueError, match="cannot be sent to another process"):
            ranks.run(cases.on_rank, object())
        ranks._processes[0].kill()
        with pytest.raises((RuntimeError, BrokenPipeError), match=r"rank 0 died|Broken pipe"):
            ranks.run(cases.rows_on_rank)
