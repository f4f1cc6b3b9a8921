"""LatentMoE split by expert, by the experts' width, by token and by any of them together, against
one device.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections import Counter

import pytest
import torch

from k31fn import tree
from k31fn.autodiff import vjp
from k31fn.kernels.expert_mlp import reference as expert_mlp_reference
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.layers import latent_moe, mlp, norm, router
from k31fn.parallel import (
    AxisRules,
    Mesh,
    P,
    all_gather_invariant,
    note_event,
    partition,
    pslice,
    psum,
    psum_scatter,
    pvary,
    record_collectives,
    shard_map,
)
from k31fn.parallel.backends.abstract import abstract_axes
from k31fn.parallel.partition import local_shape
from k31fn.params import LowRank, Quantized
from k31fn.segments import from_lengths
from k31fn.testing import Ranks, assert_close_trees, assert_sharded_equals_dense
from tests.parallel import cases_moe as cases
from tests.parallel.every import every

SPECS = latent_moe.specs(cases.CFG)
IMPL = {"simulated": "reference", "threads": "ragged", "processes": "ragged"}
MESHES = {
    "ep2 fsdp2": Mesh(fsdp=2, ep=2),
    "fsdp4 ep2": Mesh(fsdp=4, ep=2),
    "dp2 fsdp2 ep2": Mesh(dp=2, fsdp=2, ep=2),
    "tp2": Mesh(tp=2),
    "tp2 ep2": Mesh(tp=2, ep=2),
    "tp4 ep2": Mesh(tp=4, ep=2),
    "cp2 ep2": Mesh(cp=2, ep=2),
    "fsdp2 tp2 ep4": Mesh(fsdp=2, tp=2, ep=4),
    "cp2 tp2 ep2": Mesh(cp=2, tp=2, ep=2),
}
ON_TWO = [name for name, mesh in MESHES.items() if mesh.world_size == 2]


def collectives(mesh: Mesh, backend: str, *, leaves: int = 10) -> Counter[str]:
    """Of one layer and its gradients; ``leaves`` weights, three of them experts."""
    axes, n = mesh.axes(), Counter()
    n["psum"] += (leaves - 3) * bool(axes.data) + 3 * bool(axes.view("dp", "efsdp"))  # gradients
    if axes.tp:
        n["psum"] += 4  # gradients of router, latent down and up, norm
        n.update(all_gather=2, psum_scatter=2)  # shared experts
    if axes.etp:
        n.update(all_gather=3 + 1, psum_scatter=2 + 1)  # latent, weights, choices; the sum
    if axes.ep and backend == "simulated":
        n["all_to_all"] += 1 + 4
    elif axes.ep:
        n.update(all_to_all=1, ragged_all_to_all=4)
    return +n


def check(f, mesh: Mesh, backend: str, args=None, specs=None, **kwargs):
    args = args or cases.arguments()
    specs = (partition(SPECS, cases.WHOLE, mesh), cases.TOKENS, P()) if specs is None else specs
    options = {
        "collectives": collectives(mesh, backend),
        "out_specs": cases.TOKENS,
        "rtol": 1e-10,
        "atol": 1e-12,
    }
    return assert_sharded_equals_dense(
        f, args, specs, mesh=mesh, backends=(backend,), **{**options, **kwargs}
    )


@every(
    "name backend",
    itertools.product(MESHES, ["simulated", "threads"]),
    [
        ("ep2 fsdp2", "simulated"),
        ("fsdp2 tp2 ep4", "simulated"),
        ("dp2 fsdp2 ep2", "threads"),
        ("tp4 ep2", "threads"),
        ("cp2 tp2 ep2", "threads"),
    ],
)
def test_values_and_gradients_equal_one_device(name: str, backend: str):
    check(
        cases.moe,
        MESHES[name],
        backend,
        impls={"grouped_matmul": IMPL[backend], "situ_glu": "reference"},
    )


@pytest.mark.parametrize("mesh", [MESHES[name] for name in ON_TWO], ids=ON_TWO)
def test_on_two_processes(mesh: Mesh, two_ranks: Ranks):
    check(cases.moe, mesh, "processes", impls={"grouped_matmul": "ragged"}, ranks=two_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, mesh in MESHES.items() if mesh.world_size == 4])
def test_on_four_processes(name: str, four_ranks: Ranks):
    check(cases.moe, MESHES[name], "processes", ranks=four_ranks)


def test_fp32_on_two_processes(two_ranks: Ranks):
    mesh = MESHES["tp2 ep2"]
    args = tree.map(lambda t: t.float(), cases.arguments())
    check(
        cases.moe, mesh, "processes", args, ranks=two_ranks, rtol=1e-5, atol=1e-5
    )  # sums in another order


@pytest.mark.parametrize(
    "mesh", [MESHES[n] for n in ("ep2 fsdp2", "tp4 ep2", "fsdp4 ep2")], ids=str
)
def test_the_padded_form_equals_the_ragged_one(mesh: Mesh):
    """Value and gradients; the tolerance is that of sums in another order."""
    static, ragged = (
        value_and_gradients(cases.moe, mesh, backend) for backend in ("simulated", "threads")
    )
    assert_close_trees(static, ragged, rtol=1e-12, atol=1e-13)


def value_and_gradients(
    f, mesh: Mesh, backend: str, rules: AxisRules = cases.WHOLE, device: str = "cpu"
):
    """Of the sum of squares over all ranks."""
    weights, x, bias = tree.map(lambda t: t.to(device), cases.arguments())
    specs = partition(SPECS, rules, mesh), cases.TOKENS

    def run(axes, weights, x):
        y, pull = vjp(lambda w, x: f(axes, w, x, bias), weights, x)
        return y, *pull(2 * y)

    return shard_map(run, mesh, specs, (cases.TOKENS, *specs), backend=backend)(weights, x)


@pytest.mark.parametrize("backend", ["simulated", "threads"])
def test_expert_gradients_do_not_depend_on_ep(backend: str):  # field case D18
    """EP 1, 2 and all ranks (where the ranks that share an expert are one); weights spread as in
    training.
    """
    meshes = [Mesh(fsdp=4, ep=ep) for ep in (1, 2, 4)] + [Mesh()]
    first, *others = (
        value_and_gradients(cases.spread_moe, mesh, backend, AxisRules()) for mesh in meshes
    )
    assert first[1].experts.w_gate.abs().min() > 0
    for other in others:
        assert_close_trees(other, first, rtol=1e-11, atol=1e-12)


# ------------------------------------------------------------------------------------------- routes
def one_sided(offset: float = 9.0):
    """All tokens choose the first two experts, which the first rank of ep has."""
    weights, x, bias = cases.arguments()
    return weights, x, bias + offset * (torch.arange(8) < 2)


@every(
    "name backend remat",
    itertools.product(
        ["ep2 fsdp2", "tp2 ep2"], ["simulated", "threads", "processes"], [False, True]
    ),
    [
        ("tp2 ep2", "simulated", True),
        ("tp2 ep2", "threads", False),
        ("ep2 fsdp2", "threads", True),
        ("ep2 fsdp2", "processes", False),
    ],
)
def test_a_rank_whose_experts_get_no_token(
    name: str, backend: str, remat: bool, two_ranks: Ranks
):  # field case D22
    """No hang, the same collectives on all ranks; and the counters count a token once (D23)."""
    mesh = MESHES[name]
    counts = collectives(mesh, backend)
    counts["psum"] += 1  # of the counters
    if remat:
        again = {"all_to_all": 2} if backend == "simulated" else {"ragged_all_to_all": 2}
        counts.update(again)  # rows travel again; choices and counts do not
        counts.update({"psum": 0} | ({"all_gather": 1, "psum_scatter": 1} if mesh.tp > 1 else {}))
    f = cases.remat_moe if remat else cases.counted_moe
    out = (cases.TOKENS, P())
    check(f, mesh, backend, one_sided(), collectives=counts, out_specs=out, ranks=two_ranks)


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
@pytest.mark.parametrize("mesh", [MESHES[n] for n in ("fsdp4 ep2", "tp4 ep2")], ids=str)
def test_tokens_are_counted_once(mesh: Mesh, remat: bool):  # field case D23
    weights, x, bias = one_sided()
    f = cases.remat_moe if remat else cases.counted_moe
    specs = partition(SPECS, cases.WHOLE, mesh), cases.TOKENS, P()
    _, load = shard_map(f, mesh, specs, (cases.TOKENS, P()), backend="threads")(weights, x, bias)
    assert load.tolist() == [32, 32, 0, 0, 0, 0, 0, 0]  # 4 x 8 tokens, 2 experts each


@every(
    "name backend",
    itertools.product(["ep2 fsdp2", "tp2 ep2", "cp2 ep2"], ["simulated", "threads", "processes"]),
    [("ep2 fsdp2", "threads"), ("tp2 ep2", "simulated"), ("cp2 ep2", "processes")],
)
def test_a_rank_that_holds_padding_only(
    name: str, backend: str, two_ranks: Ranks
):  # field case D22
    """Of rows (fsdp), or of the second half of each row (tp, cp)."""
    mesh = MESHES[name]
    segments = from_lengths([[8], [5], [], []] if mesh.fsdp > 1 else [[4], [3], [1, 2], []], 8)
    check(
        cases.padded_moe,
        mesh,
        backend,
        (*cases.arguments(), segments),
        (partition(SPECS, cases.WHOLE, mesh), cases.TOKENS, P(), P("fsdp", "cp")),
        ranks=two_ranks,
    )


def balanced():
    """Token t chooses the experts t and t + 1, so that every rank of any mesh here has as many rows
    to compute.
    """
    weights, x, bias = cases.arguments()
    there = torch.eye(8, dtype=torch.float64)
    x = 0.1 * x + 3 * there + 2 * there.roll(1, 1)
    return dataclasses.replace(weights, router=router.Params(there)), x, 0 * bias


@pytest.mark.parametrize("name", ["ep2 fsdp2", "fsdp4 ep2", "tp2", "tp4 ep2", "cp2 ep2"])
def test_work_per_rank_falls_with_the_number_of_ranks(name: str):
    mesh = MESHES[name]
    report = check(cases.moe, mesh, "threads", balanced(), flops=1 / mesh.world_size)
    assert report.flops > 0.95 / mesh.world_size


def test_low_rank_and_quantised_experts_over_ep():
    weights, x, bias = cases.arguments()
    randn = lambda *s: torch.randn(*s, dtype=torch.float64)  # noqa: E731
    adapted = tree.map(
        lambda w: LowRank(w, randn(8, w.shape[1], 2), randn(8, 2, w.shape[2])), weights.experts
    )
    codes = tree.map(
        lambda w: Quantized((4 * w).round().to(torch.int8), 0.25 + 0 * w[:, :1]), weights.experts
    )
    mesh, specs = Mesh(fsdp=2, ep=2), tree.map(lambda _: P(), weights)
    for experts in (adapted, codes):
        args = dataclasses.replace(weights, experts=experts), x, bias
        over_ep = dataclasses.replace(specs, experts=tree.map(lambda _: P("ep"), experts))
        for backend in ("simulated", "threads"):
            check(cases.moe_with_other_leaves, mesh, backend, args, (over_ep, cases.TOKENS, P()))


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_one_rank_alone_on_meta_tensors(mesh: Mesh):
    """Shapes and collectives without values, for any mesh; the bytes of rows are those of even
    routes.
    """
    axes, parts = abstract_axes(mesh), partition(SPECS, cases.WHOLE, mesh)
    weights, x, bias = tree.map(lambda t: t.to("meta"), cases.arguments())
    weights = tree.map(lambda w, p: w.new_empty(local_shape(p, w.shape, mesh)), weights, parts)
    x = x.new_empty(local_shape(cases.TOKENS, x.shape, mesh))
    with record_collectives() as record:
        y, pull = vjp(lambda w, x: cases.moe(axes, w, x, bias), weights, x)
        grads = pull(y)
    assert y.shape == x.shape
    assert [g.shape for g in tree.leaves(grads)] == [t.shape for t in tree.leaves((weights, x))]
    assert record.counts == collectives(mesh, "threads")
    etp, ep = (math.prod(a.size for a in view) for view in (axes.etp, axes.ep))
    travel = (
        4 * 2 * x.nbytes * etp if ep > 1 else 0
    )  # four times, two copies of each token, as wide as x is
    assert record.nbytes["ragged_all_to_all"] == travel


def test_buckets_on_a_mesh():
    mesh = MESHES["fsdp4 ep2"]
    with use_impl(grouped_matmul="buckets"):
        check(cases.moe, mesh, "threads", impls={"grouped_matmul": "buckets"})


# ------------------------------------------------------------------------------------------ overlap
class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, x):
        note_event(name)
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        note_event(f"{ctx.name} backward")
        return None, *grads


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
def test_the_shared_experts_run_while_rows_travel(remat: bool, monkeypatch):
    """Their first products beside the dispatch, the last beside the combine; in the backward the
    other way round.
    """
    inner, outer = mlp.inner, mlp.outer
    monkeypatch.setattr(mlp, "inner", lambda *args, sh: _Noted.apply("inner", inner(*args, sh=sh)))
    monkeypatch.setattr(mlp, "outer", lambda *args, sh: _Noted.apply("outer", outer(*args, sh=sh)))
    mesh = MESHES["ep2 fsdp2"]
    with record_collectives() as record:
        value_and_gradients(cases.remat_moe_output if remat else cases.moe, mesh, "threads")
    travel, rows = {"issue": "send", "wait": "come"}, "ragged_all_to_all"
    order = [
        travel.get(e.what, e.kind) for e in record.events if e.what == "note" or e.kind == rows
    ]
    forward = ["send", "inner", "come", "send", "outer", "come"]
    backward = ["send", "outer backward", "come", "send", "inner backward", "come"]
    assert order == forward * (1 + remat) + backward


# ----------------------------------------------------------------------------------- planted errors
ON_TWO_BACKENDS = every("backend", ["simulated", "threads"], ["threads"])


@ON_TWO_BACKENDS
@pytest.mark.parametrize("which", [1, 2])
def test_rows_sorted_with_the_wrong_inverse_are_found(backend: str, which: int, monkeypatch):
    """Before the experts, or after them."""
    right, calls = expert_mlp_reference.permute, Counter()

    def swapped(rows, index, inverse):
        calls[threading.get_ident()] += 1
        wrong = calls[threading.get_ident()] == which
        return right(rows, inverse, index) if wrong else right(rows, index, inverse)

    monkeypatch.setattr(expert_mlp_reference, "permute", swapped)
    with pytest.raises(AssertionError, match=f"{backend} against one device"):
        check(cases.moe, MESHES["ep2 fsdp2"], backend)


@ON_TWO_BACKENDS
def test_a_sum_after_the_norm_is_found(backend: str, monkeypatch):
    """Each rank norms its part of the sum over the experts' width: the norm is not linear."""
    monkeypatch.setattr(latent_moe, "psum_scatter", lambda x, axis, dim: x)

    right = norm.apply
    late = lambda *args, sh: psum_scatter(right(*args, sh=sh), sh.expert_mlp, 1)  # noqa: E731
    monkeypatch.setattr(norm, "apply", late)
    with pytest.raises(AssertionError, match=f"{backend} against one device: 1 of 1 leaves"):
        check(cases.moe, MESHES["tp2"], backend)


@ON_TWO_BACKENDS
def test_a_missing_gather_over_the_experts_width_is_found(backend: str, monkeypatch):
    """Each rank works on its own tokens only, and parts of different tokens are added."""
    monkeypatch.setattr(latent_moe, "all_gather", lambda x, axis, dim: x)
    monkeypatch.setattr(latent_moe, "psum_scatter", lambda x, axis, dim: pvary(psum(x, axis), axis))
    with pytest.raises(AssertionError, match=f"{backend} against one device"):
        check(cases.moe, MESHES["tp2"], backend)


@ON_TWO_BACKENDS
def test_a_missing_sum_over_the_experts_width_is_found(backend: str, monkeypatch):
    def own(x, axis, dim):
        return pslice(all_gather_invariant(x, axis, dim)[:, : x.shape[1]], axis, dim) if axis else x

    monkeypatch.setattr(latent_moe, "psum_scatter", own)
    with pytest.raises((AssertionError, ValueError), match=f"{backend} against one device"):
        check(cases.moe, MESHES["tp2"], backend)


@ON_TWO_BACKENDS
def test_a_missing_pvary_on_the_latent_weights_is_found(backend: str, monkeypatch):
    """Invisible in the value: their gradients are one rank's part."""
    monkeypatch.setattr(latent_moe, "pvary", lambda w, axis: w)
    with pytest.raises(ValueError, match=r"does not name 'tp'|varies over an axis"):
        check(cases.moe, MESHES["tp2"], backend)


@ON_TWO_BACKENDS
def test_experts_gathered_in_place_of_rows_sent_are_found(backend: str):
    """Equal in every number: each rank has all experts."""
    mesh = MESHES["ep2 fsdp2"]
    with pytest.raises(
        AssertionError,
        match=rf"{backend}: a rank issued \{{.*'all_gather': 3.*expected .*all_to_all",
    ):
        check(cases.moe_with_all_experts, mesh, backend)


def test_all_tokens_through_all_experts_on_every_rank_are_found():
    """Equal in every number, and without any work split."""
    mesh = MESHES["ep2 fsdp2"]
    counts = {"all_gather": 4, "psum_scatter": 4, "psum": 7}
    with pytest.raises(
        AssertionError, match=r"threads: a rank did 1 of one device's work, at most 0.5"
    ):
        check(cases.moe_of_all_tokens, mesh, "threads", balanced(), collectives=counts, flops=0.5)


# ------------------------------------------------------------------------------------------ one GPU
@pytest.mark.cuda
@pytest.mark.parametrize("name", ["ep2 fsdp2", "fsdp4 ep2", "tp2 ep2", "tp4 ep2", "cp2 tp2 ep2"])
@pytest.mark.parametrize("f", [cases.moe, cases.remat_moe_output], ids=["plain", "remat"])
def test_threads_on_one_gpu_equal_the_cpu(f, name: str):
    mesh = MESHES[name]
    on_cpu, on_gpu = (
        value_and_gradients(f, mesh, "threads", device=device) for device in ("cpu", "cuda")
    )
    assert_close_trees(tree.map(lambda t: t.cpu(), on_gpu), on_cpu, rtol=1e-10, atol=1e-11)


@pytest.mark.cuda
def test_bfloat16_on_one_gpu():
    """The fused experts run on what arrives."""
    on_gpu = tree.map(lambda t: t.cuda().bfloat16(), cases.arguments())
    wide = tree.map(lambda t: t.cpu().double(), on_gpu)
    (weights, x, bias), exact = on_gpu, latent_moe.apply(*wide[:2], cases.CFG, bias=wide[2]).y
    mesh = MESHES["ep2 fsdp2"]
    specs = partition(SPECS, cases.WHOLE, mesh), cases.TOKENS, P()
    with record_impls() as ran:
        y = shard_map(cases.moe, mesh, specs, cases.TOKENS, backend="threads")(
            weights, x, bias.float()
        )
    assert {impl for op, impl in ran if op == "expert_mlp"} == {"fused"}
    assert (
        (y.cpu().double() - exact).norm() / exact.norm()
    ).item() < 0.03  # six roundings to bf16 in a chain
