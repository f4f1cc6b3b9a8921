"""The whole model on meshes against one device: loss, its parts and all gradients; and planted
errors.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from k31fn import model, segments, tree
from k31fn.layers import attn_res, embedding, losses, mlp, norm, router
from k31fn.model import layers as reports
from k31fn.parallel import (
    AxisRules,
    Mesh,
    P,
    Sharding,
    all_gather_invariant,
    check_invariance,
    partition,
    pmax,
    psum,
    shard_map,
)
from k31fn.parallel.tiling import assemble
from k31fn.testing import Ranks, assert_close_trees
from tests.parallel import cases_model as cases
from tests.parallel.every import every

MESHES = {
    "dp2": Mesh(dp=2),
    "fsdp2": Mesh(fsdp=2),
    "cp2": Mesh(cp=2),
    "tp2": Mesh(tp=2),
    "ep2": Mesh(fsdp=2, ep=2),
    "tp2 ep2": Mesh(tp=2, ep=2),
    "fsdp2 tp2": Mesh(fsdp=2, tp=2),
    "dp2 fsdp2": Mesh(dp=2, fsdp=2),
    "cp2 fsdp2": Mesh(cp=2, fsdp=2),
    "cp2 tp2": Mesh(cp=2, tp=2),
    "fsdp4 ep2": Mesh(fsdp=4, ep=2),
}
ALL_MESHES = MESHES | {
    "cp2 ep2": Mesh(cp=2, ep=2),
    "fsdp2 tp2 ep4": Mesh(fsdp=2, tp=2, ep=4),
    "tp4 ep2": Mesh(tp=4, ep=2),
    "cp4": Mesh(cp=4),
}
IN_ONE_PROCESS = ("simulated", "threads")
each_backend = pytest.mark.parametrize("backend", IN_ONE_PROCESS)


def mesh_and_backend(*default: tuple[str, str]) -> Any:
    return every("name backend", itertools.product(MESHES, IN_ONE_PROCESS), default)


@functools.cache
def arguments(name: str, dtype: torch.dtype = torch.float64) -> tuple[Any, model.Batch]:
    cfg = cases.CONFIGS[name]
    return cases.shaken(model.specs(cfg), dtype), cases.batch(cfg)


@functools.cache
def one_device(name: str, dtype: torch.dtype = torch.float64) -> cases.Step:
    return cases.step(Mesh().axes(), *arguments(name, dtype), name=name)


def on_mesh(
    mesh: Mesh,
    backend: str,
    name: str = "k31",
    step: Any = cases.step,
    device: str = "cpu",
    **options: Any,
) -> cases.Step:
    specs = partition(model.specs(cases.CONFIGS[name]), options.get("rules") or AxisRules(), mesh)
    run = functools.partial(step, name=name, **options)
    mapped = shard_map(
        run, mesh, (specs, cases.BATCH_SPECS), cases.Step(P(), P(), specs), backend=backend
    )
    with check_invariance():
        return mapped(*tree.map(lambda x: x.to(device), arguments(name)))


def check(mesh: Mesh, backend: str, name: str = "k31", **options: Any) -> None:
    assert_close_trees(
        on_mesh(mesh, backend, name, **options), one_device(name), rtol=1e-10, atol=1e-12
    )


@every("name", ALL_MESHES, ["ep2", "tp2 ep2", "dp2 fsdp2", "cp2 tp2"])
def test_loss_and_all_gradients_equal_one_device(name: str):
    check(ALL_MESHES[name], "threads")


@every("name", ALL_MESHES, ["cp2 fsdp2", "tp2 ep2"])
def test_in_the_simulated_mesh(name: str):
    check(ALL_MESHES[name], "simulated")


@every("name", ALL_MESHES, ["cp2 tp2"])
def test_blocks_of_several_layers(name: str):
    check(ALL_MESHES[name], "threads", "k31 deep")


@mesh_and_backend(("cp2", "simulated"), ("fsdp2 tp2", "threads"))
def test_recomputed_layers(name: str, backend: str):
    check(MESHES[name], backend, remat="layer")


@every(
    "name remat",
    itertools.product(MESHES, ["intra_layer", "cross_layer"]),
    [("fsdp2 tp2", "cross_layer")],
)
def test_kept_branches(name: str, remat: model.Remat):
    check(MESHES[name], "threads", remat=remat)


@mesh_and_backend(("tp2", "simulated"), ("cp2 fsdp2", "threads"))
def test_hyper_connections(name: str, backend: str):
    check(MESHES[name], backend, "mhc", remat="cross_layer" if "fsdp" in name else "none")


@mesh_and_backend(("cp2", "simulated"), ("cp2 tp2", "threads"))
def test_a_multi_token_prediction_layer(name: str, backend: str):
    """What the last token of a slice predicts, and its embedding, are on the next rank."""
    check(MESHES[name], backend, "k31 mtp", remat="layer" if "cp" in name else "none")


@mesh_and_backend(("tp2", "simulated"), ("cp2 fsdp2", "threads"))
def test_a_model_without_indexers_blocks_and_balancing(name: str, backend: str):
    check(MESHES[name], backend, "k3")


def test_weights_that_are_whole_on_every_data_rank():
    check(Mesh(fsdp=2), "threads", rules=cases.WHOLE)


@each_backend
def test_rows_of_one_document_need_no_segments(backend: str):
    """Positions count from the beginning of the row, not of the slice."""
    cfg, mesh = cases.CONFIGS["k31"], Mesh(cp=2, tp=2)
    weights, rows = arguments("k31")
    specs = partition(model.specs(cfg), cases.WHOLE, mesh)

    def hidden(axes: Any, weights: Any, tokens: Any) -> Any:
        weights = cases.vary(axes, weights)
        return model.apply(
            weights, tokens, cfg, balance=cases.biases(cfg), sh=Sharding.on(axes)
        ).hidden

    got = shard_map(hidden, mesh, (specs, cases.SLICE), cases.TOKENS, backend=backend)(
        weights, rows.tokens
    )
    torch.testing.assert_close(
        got, hidden(Mesh().axes(), weights, rows.tokens), rtol=1e-10, atol=1e-12
    )


@pytest.mark.cuda
@each_backend
@pytest.mark.parametrize("name", ["tp2", "cp2 tp2", "fsdp4 ep2"])
def test_on_one_gpu_it_equals_the_cpu(name: str, backend: str):
    got = tree.map(lambda x: x.cpu(), on_mesh(MESHES[name], backend, device="cuda"))
    assert_close_trees(got, one_device("k31"), rtol=1e-10, atol=1e-11)


# ---------------------------------------------------------------------------------------- processes
def on_processes(
    name: str, mesh: Mesh, ranks: Ranks, *, double: bool, remat: str = "none"
) -> cases.Step:
    answers = ranks.run(cases.step_on_rank, mesh, name, remat, double)
    dtype = torch.float64 if double else torch.float32
    structure = tree.flatten(one_device(name, dtype))[1]
    specs = partition(model.specs(cases.CONFIGS[name]), AxisRules(), mesh)
    places = [P()] * (len(answers[0][0]) - len(tree.leaves(specs))) + tree.leaves(specs)
    whole = [
        assemble([tensors[i] for tensors, _ in answers], p, mesh) for i, p in enumerate(places)
    ]
    return tree.unflatten(structure, whole)


def check_fp32(mesh: Mesh, ranks: Ranks) -> None:
    """To 1e-5 of the largest entry of each tensor: sums are taken in another order; routes are the
    same.

    The KL to 1e-6 per query: each is a sum of differences of numbers near 1.
    """
    num_queries = int(cases.batch().num_queries)
    got, want = on_processes("k31", mesh, ranks, double=False), one_device("k31", torch.float32)
    for (path, a), b in zip(tree.flatten_with_paths(got), tree.leaves(want), strict=True):
        if a.is_floating_point():
            assert (a - b).abs().max() <= (
                1e-6 * num_queries if path == "parts.kl" else 1e-5 * b.abs().max()
            ), path
        else:
            assert torch.equal(a, b), path


@every("name", [n for n, mesh in ALL_MESHES.items() if mesh.world_size == 2], ["tp2", "cp2"])
def test_fp32_on_two_processes(name: str, two_ranks: Ranks):
    check_fp32(ALL_MESHES[name], two_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, mesh in ALL_MESHES.items() if mesh.world_size == 4])
def test_fp32_on_four_processes(name: str, four_ranks: Ranks):
    check_fp32(ALL_MESHES[name], four_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2 tp2", "cp2 fsdp2"])
def test_float64_on_four_processes(name: str, four_ranks: Ranks):
    got = on_processes("k31", MESHES[name], four_ranks, double=True, remat="layer")
    assert_close_trees(got, one_device("k31"), rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------------ work per rank
@every("name", ["tp2", "cp2", "ep2", "tp2 ep2", "cp2 tp2"], ["ep2", "cp2 tp2"])
def test_work_per_rank_falls_with_the_number_of_ranks(name: str):
    """All of a step's matrix products, forward and backward, within 5%."""
    mesh, counts = MESHES[name], []

    def counted(axes: Any, *args: Any, **options: Any) -> cases.Step:
        with FlopCounterMode(display=False) as counter:
            out = cases.step(axes, *args, **options)
        counts.append(counter.get_total_flops())
        return out

    counted(Mesh().axes(), *arguments("k31"), name="k31")
    one = counts.pop()
    on_mesh(mesh, "threads", step=counted)
    assert len(counts) == mesh.world_size
    assert sum(counts) <= 1.05 * one


# -------------------------------------------------------------- labels at the cuts (field case D17)
def token_losses(
    axes: Any, weights: Any, rows: model.Batch, *, late: bool = False
) -> tuple[Any, ...]:
    """Mean, largest and number of the token losses; ``late``: labels are shifted after the
    split.
    """
    cfg = cases.CONFIGS["k31"]
    weights = cases.vary(axes, weights)
    labels = segments.next_token_labels(rows.tokens, rows.segments) if late else rows.labels
    out = model.apply(
        weights,
        rows.tokens,
        cfg,
        balance=cases.biases(cfg),
        segments=rows.segments,
        sh=Sharding.on(axes),
    )
    scores = torch.log_softmax(model.logits(weights, out.hidden), -1)
    own = torch.where(labels >= 0, -scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0], 0)
    count = psum((labels >= 0).sum(), axes.data)
    total = psum(model.lm_loss(weights, out.hidden, labels, sh=Sharding.on(axes)), axes.data)
    return total / count, psum(own.sum(), axes.data) / count, pmax(own.max(), axes.data), count


@each_backend
@pytest.mark.parametrize("n", [2, 4])
def test_logged_losses_do_not_depend_on_the_cuts(n: int, backend: str):
    weights, rows = arguments("k31")

    def run(mesh: Mesh, **options: Any) -> Any:
        f = functools.partial(token_losses, **options)
        return shard_map(f, mesh, (P(), cases.BATCH_SPECS), P(), backend=backend)(weights, rows)

    one, cut, late = run(Mesh()), run(Mesh(cp=n)), run(Mesh(cp=n), late=True)
    assert_close_trees(cut, one, rtol=1e-12, atol=1e-12)
    assert int(one[3]) == int(rows.num_labels)
    # rows whose document goes on at a cut: the last token of the slice has a label, which a late
    # shift drops
    at_cuts = rows.labels[:, cases.T // n - 1 : -1 : cases.T // n] >= 0
    assert int(one[3]) - int(late[3]) == int(at_cuts.sum()) > 0
    assert abs(float(late[0] - one[0])) > 1e-3


# ---------------------------------------------------------- what all tp ranks hold (field case D20)
HELD = ("norm", "router", "latent", "mix", "w_qa", "w_kva", "w_fa", "indexer")


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_gradients_of_weights_that_all_tensor_parallel_ranks_hold(backend: str, two_ranks: Ranks):
    """Bit-equal on the ranks, in float32, and those of one device; so are per-head gates, put
    together.
    """
    mesh, (weights, rows) = Mesh(tp=2), arguments("k31", torch.float32)
    specs = partition(model.specs(cases.CFG), cases.WHOLE, mesh)
    if backend == "processes":
        found = [
            tensors[-len(tree.leaves(specs)) :]
            for tensors, _ in two_ranks.run(cases.step_on_rank, mesh, "k31", "none", False)
        ]
    else:
        stacked = tree.map(lambda _: P("tp"), specs)
        run = shard_map(
            lambda axes, w, b: tree.map(
                lambda g: g[None], cases.step(axes, w, b, rules=cases.WHOLE).grads
            ),
            mesh,
            (specs, cases.BATCH_SPECS),
            stacked,
            backend=backend,
        )
        found = list(zip(*(g.unbind(0) for g in tree.leaves(run(weights, rows))), strict=True))
    want = dict(tree.flatten_with_paths(one_device("k31", torch.float32).grads))
    held = 0
    for i, (path, spec) in enumerate(tree.flatten_with_paths(specs)):
        a, b = found[0][i], found[1][i]
        if not any(spec.dims):
            held += 1
            assert torch.equal(a, b), path
        whole = assemble([a, b], spec, mesh)
        assert (whole - want[path]).abs().max() <= 1e-5 * want[path].abs().max(), path
    names = [path for path, spec in tree.flatten_with_paths(specs) if not any(spec.dims)]
    assert all(any(part in path for path in names) for part in HELD), names


# ----------------------------------------------------------------------------------- planted errors
def drop(x: Any, axis: Any, *args: Any) -> Any:
    """In place of a collective."""
    del axis, args
    return x


@each_backend
@pytest.mark.parametrize(
    "module", [norm, router, attn_res], ids=lambda m: m.__name__.rpartition(".")[2]
)
def test_a_missing_pvary_on_a_weight_is_found(
    module: Any, backend: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "pvary", drop)
    with pytest.raises(ValueError, match="varies over"):
        check(Mesh(tp=2), backend)


@each_backend
@pytest.mark.parametrize("module", [losses, mlp], ids=["losses", "mlp"])
def test_a_missing_pvary_on_an_activation_is_found(
    module: Any, backend: str, monkeypatch: pytest.MonkeyPatch
):
    """A gather to a value that is equal on all ranks, where each uses it differently: the loss
    stays right.
    """
    monkeypatch.setattr(
        module, "all_gather", lambda x, axis, dim, **kw: all_gather_invariant(x, axis, dim)
    )
    with pytest.raises((ValueError, AssertionError), match=r"varies over|grads"):
        check(Mesh(tp=2), backend)


@each_backend
@pytest.mark.parametrize("module", [losses, reports], ids=["cross-entropy", "KL"])
def test_a_missing_psum_is_found(module: Any, backend: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "psum", drop)
    with pytest.raises(ValueError, match="varies"):
        check(Mesh(tp=2), backend)


@each_backend
def test_a_row_that_each_rank_looks_up_is_found(backend: str, monkeypatch: pytest.MonkeyPatch):
    """The table's rows are split: without the exchange most tokens have no embedding."""
    monkeypatch.setattr(embedding, "psum_scatter", lambda x, axis, dim: x.chunk(2, dim)[0])
    with pytest.raises((ValueError, AssertionError)):
        check(Mesh(tp=2), backend)


@pytest.mark.parametrize("field", ["num_labels", "num_queries"])
@pytest.mark.parametrize(("name", "backend"), [("dp2", "simulated"), ("cp2", "threads")])
def test_a_denominator_of_one_rank_is_found(name: str, backend: str, field: str):
    def local(axes: Any, weights: Any, rows: model.Batch, **options: Any) -> cases.Step:
        counts = {
            "num_labels": (rows.labels >= 0).sum(),
            "num_queries": segments.valid(rows.segments).sum(),
        }
        return cases.step(
            axes, weights, dataclasses.replace(rows, **{field: counts[field]}), **options
        )

    with pytest.raises(AssertionError, match="leaves differ"):
        check(MESHES[name], backend, step=local)
