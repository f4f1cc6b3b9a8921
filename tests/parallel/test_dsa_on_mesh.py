"""Gated MLA and Gated DSA on meshes: values, gradients, what travels, and how much work a rank
does.
"""

from __future__ import annotations

import contextvars
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn import tree
from k31fn.autodiff import remat, vjp
from k31fn.kernels import tiling
from k31fn.kernels.registry import record_impls
from k31fn.layers import dsa, indexer, mla
from k31fn.parallel import (
    Mesh,
    MeshAxes,
    P,
    Sharding,
    all_gather_invariant,
    axis_index,
    axis_size,
    pslice,
    record_collectives,
    shard_map,
)
from k31fn.testing import Ranks, assert_close_trees, assert_sharded_equals_dense
from tests.parallel import cases_dsa as cases
from tests.parallel.cases_dsa import CASES, PACKED, B, T, arguments, specs
from tests.parallel.every import every

MESHES = [
    Mesh(tp=2),
    Mesh(tp=4, ep=2),
    Mesh(cp=2),
    Mesh(cp=4),
    Mesh(cp=2, tp=2),
    Mesh(fsdp=2, cp=2),
]
IN_ONE_PROCESS = ("simulated", "threads")
# value and gradients: latents of keys and queries and x, the output and its gradient; DSA's sets,
# teacher
OVER_TP = {
    "mla": {"all_gather": 3 + 1, "psum_scatter": 1 + 3},
    "expanded mla": {"all_gather": 3 + 1, "psum_scatter": 1 + 3},
    "dsa": {"all_gather": 4 + 1, "psum_scatter": 2 + 3},
    "warmup": {"all_gather": 3 + 1, "psum_scatter": 2 + 3},
}


def collectives(name: str, mesh: Mesh) -> dict[str, int]:
    """What a rank issues for value and gradients: over cp alone just the latents, and the sums of
    gradients.

    One sum over the data axes for each weight, one over tp for each that is whole there, and that
    of the KL.
    """
    counts = OVER_TP[name] if mesh.tp > 1 else {"all_gather": 1, "psum_scatter": 1}
    weights, whole, kl = (8, 4, 0) if "mla" in name else (13, 9, 1)
    return {**counts, "psum": weights * (mesh.cp * mesh.fsdp > 1) + whole * (mesh.tp > 1) + kl}


def check(name: str, mesh: Mesh, rows: list[list[int]] | None = PACKED, **kwargs: Any) -> None:
    in_specs, out_specs = specs(name, mesh, packed=rows is not None)
    args = arguments(name, rows)
    options = {
        "fn": CASES[name].fn,
        "collectives": collectives(name, mesh),
        "backends": IN_ONE_PROCESS,
        **kwargs,
    }
    fn = options.pop("fn")
    assert_sharded_equals_dense(
        fn, args, in_specs, out_specs, mesh, rtol=1e-10, atol=1e-10, **options
    )


# ------------------------------------------------------------------------------ value and gradients
@every(
    "name mesh",
    itertools.product(CASES, MESHES),
    [
        *((name, Mesh(cp=2, tp=2)) for name in CASES),
        ("mla", Mesh(cp=4)),
        ("dsa", Mesh(tp=4, ep=2)),
        ("warmup", Mesh(fsdp=2, cp=2)),
    ],
)
def test_value_and_gradients_equal_one_device(name: str, mesh: Mesh):
    check(name, mesh, flops=None if name == "expanded mla" else 1 / mesh.world_size)


def test_one_case_absorbs_on_ranks_and_one_does_not():
    assert mla._absorbs(cases.MLA, T // 2, T)
    assert not mla._absorbs(cases.WIDE, T // 4, T)


@pytest.mark.parametrize("name", ["mla", "dsa", "warmup"])
def test_one_document_per_row(name: str):
    check(name, Mesh(cp=2, tp=2), rows=None)


@pytest.mark.parametrize("name", ["mla", "dsa", "warmup"])
def test_ranks_that_hold_padding_only(name: str):
    check(name, Mesh(cp=4), rows=[[2], [5, 3]])


@every(
    "name mesh",
    itertools.product(["mla", "dsa", "warmup"], [Mesh(tp=2), Mesh(cp=2)]),
    [("mla", Mesh(tp=2)), ("dsa", Mesh(cp=2)), ("warmup", Mesh(cp=2))],
)
def test_on_two_processes(name: str, mesh: Mesh, two_ranks: Ranks):
    check(name, mesh, ranks=two_ranks, backends=("processes",))


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(cp=2, tp=2)], ids=str)
def test_more_keys_than_anyone_sees(mesh: Mesh):
    """Sets of all visible keys, and -1: the warm-up's values."""
    everything = dataclasses.replace(cases.DSA, topk=100)

    def f(axes: MeshAxes, *args: Any) -> Any:
        return cases.apply(dsa, everything, axes, *args)

    check("dsa", mesh, fn=f, dense=cases.warmup)


@every("mesh", [Mesh(tp=2), Mesh(cp=2, tp=2), Mesh(cp=4)], [Mesh(cp=2, tp=2)])
def test_a_tile_of_the_warm_up_issues_one_collective_and_one_in_its_replay(
    monkeypatch: pytest.MonkeyPatch, mesh: Mesh
):
    monkeypatch.setattr(
        tiling, "TILE_QUERIES", 3
    )  # of the 8 or 4 tokens of a rank; the last tile is smaller
    monkeypatch.setattr(tiling, "KEPT_ELEMENTS", 0)
    counts = collectives("warmup", mesh)
    if mesh.tp > 1:
        counts["psum_scatter"] += 2 * -(-T // mesh.world_size // 3) - 1
    check("warmup", mesh, collectives=counts)


@pytest.mark.parametrize("name", ["mla", "dsa", "warmup"])
def test_inside_remat(name: str):
    """What the forward of the layer issues, the replay issues again, and chooses no set anew."""
    mesh = Mesh(cp=2, tp=2)

    def f(axes: MeshAxes, *args: Any) -> Any:
        return cases.apply(*CASES[name][:2], axes, *args, transform=remat)

    again = {
        "all_gather": OVER_TP[name]["all_gather"] - 1,
        "psum_scatter": OVER_TP[name]["psum_scatter"] - 3,
        "psum": 0,
    }
    once = collectives(name, mesh)
    with record_impls() as ran:
        check(
            name,
            mesh,
            fn=f,
            dense=CASES[name].fn,
            collectives={k: once[k] + again[k] for k in once},
        )
    assert ran["index_topk", "reference"] == (0 if name != "dsa" else 2 + 1 + mesh.world_size)


@pytest.mark.cuda
@pytest.mark.parametrize("backend", IN_ONE_PROCESS)
@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(cp=2, tp=2)], ids=str)
@pytest.mark.parametrize("name", ["mla", "dsa", "warmup"])
def test_on_a_gpu(name: str, mesh: Mesh, backend: str):
    """Ranks that share one GPU, against one CPU."""
    in_specs, out_specs = specs(name, mesh, packed=True)

    def both(axes: MeshAxes, weights: Any, x: Tensor, segments: Any) -> Any:
        out, pull = vjp(lambda weights, x: CASES[name].fn(axes, weights, x, segments), weights, x)
        return out, pull(tree.map(torch.ones_like, out))

    found = []
    for device in ("cpu", "cuda"):
        args = tree.map(lambda t, device=device: t.to(device), arguments(name, PACKED))
        out = shard_map(both, mesh, in_specs, (out_specs, in_specs[:2]), backend=backend)(*args)
        found.append(tree.map(lambda t: t.cpu(), out))
    assert_close_trees(found[1], found[0], rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------------------------- what travels
@every(
    "name mesh",
    itertools.product(["mla", "dsa", "warmup"], [Mesh(cp=2), Mesh(cp=4), Mesh(cp=2, tp=2)]),
    [("mla", Mesh(cp=4)), ("dsa", Mesh(cp=2, tp=2)), ("warmup", Mesh(cp=2))],
)
def test_only_latents_and_index_keys_cross_the_context(name: str, mesh: Mesh):
    """Forward, then the gradient of the tokens only: no weight is summed."""
    values = 4 + 2 if name == "mla" else 4 + 2 + 4

    def both(axes: MeshAxes, weights: Any, x: Tensor, segments: Any) -> Any:
        layer, cfg, _ = CASES[name]
        out, pull = vjp(
            lambda x: layer.apply(weights, x, cfg, segments=segments, sh=Sharding.on(axes)), x
        )
        return pull(tree.map(torch.ones_like, out))[0]

    in_specs, _ = specs(name, mesh, packed=True)
    tokens = P(None, ("cp", "tp"))
    with record_collectives() as record:
        shard_map(both, mesh, in_specs, tokens, backend="threads")(*arguments(name, PACKED))
    crossing = [e for e in record.events if e.what == "issue" and "cp" in e.axes]
    own = B * T // mesh.world_size * values * 8
    assert [(e.kind, e.nbytes) for e in crossing] == [
        ("all_gather", own),
        ("psum_scatter", own * mesh.world_size),
    ]


def test_values_per_token_at_the_published_size():
    cfg = dsa.Config(mla.Config(7168, 96, 1536, 512, 128, 64, 128), indexer.Config(7168, 1536))
    assert cfg.attn.kv_lora_rank + cfg.attn.qk_rope_head_dim + cfg.indexer.head_dim == 704


_WHERE: contextvars.ContextVar[tuple[int, int]] = contextvars.ContextVar("rank")


@pytest.mark.parametrize("mesh", [Mesh(tp=4), Mesh(cp=2, tp=2)], ids=str)
def test_all_tensor_parallel_ranks_use_the_sets_of_one_device(
    monkeypatch: pytest.MonkeyPatch, mesh: Mesh
):
    sets: dict[tuple[int, int], Tensor] = {}

    def spied(right: Any, position: int) -> Any:
        def spy(*args: Any) -> Any:
            sets[_WHERE.get()] = args[position].sort(-1).values
            return right(*args)

        return spy

    def f(axes: MeshAxes, *args: Any) -> Any:
        _WHERE.set((int(axis_index(axes.cp)), int(axis_index(axes.tp))))
        return cases.gated_dsa(axes, *args)

    # one device has few keys for each query, and ranks many: they absorb
    monkeypatch.setattr(dsa, "sparse_attention", spied(dsa.sparse_attention, 4))
    monkeypatch.setattr(dsa, "latent_attention", spied(dsa.latent_attention, 2))
    f(Mesh().axes(), *arguments("dsa", PACKED))
    whole = sets.pop((0, 0))
    shard_map(f, mesh, *specs("dsa", mesh, packed=True), backend="threads")(
        *arguments("dsa", PACKED)
    )
    assert len(sets) == mesh.world_size
    for (cp, _), found in sets.items():
        assert torch.equal(found, whole.chunk(mesh.cp, 1)[cp])


# ----------------------------------------------------------------------------------- planted errors
def caught(name: str, mesh: Mesh, backend: str, match: str, **kwargs: Any) -> None:
    with pytest.raises((AssertionError, ValueError), match=match):
        check(name, mesh, backends=(backend,), **kwargs)


each_backend = every("backend", IN_ONE_PROCESS, ["threads"])
WRONG = "against one device"


@each_backend
@pytest.mark.parametrize("name", ["mla", "dsa"])
def test_positions_counted_from_the_slice_are_found(
    monkeypatch: pytest.MonkeyPatch, name: str, backend: str
):
    monkeypatch.setattr(mla, "axis_index", lambda axis: torch.zeros((), dtype=torch.int64))
    caught(name, Mesh(cp=2), backend, WRONG)
    caught(name, Mesh(cp=2), backend, WRONG, rows=None)


@each_backend
@pytest.mark.parametrize("name", ["dsa", "warmup"])
def test_documents_that_end_at_the_slice_are_found(
    monkeypatch: pytest.MonkeyPatch, name: str, backend: str
):
    right = mla.visible_range

    def wrong(queries: Tensor, segments: Any, *, context: Any) -> tuple[Tensor, Tensor]:
        start, stop = right(queries, segments, context=context)
        first = axis_index(context) * queries.shape[1]
        return torch.minimum(torch.maximum(start, first), stop), stop

    monkeypatch.setattr(mla, "visible_range", wrong)
    caught(name, Mesh(cp=2), backend, WRONG)


@each_backend
@pytest.mark.parametrize("name", ["mla", "dsa"])
def test_a_causal_mask_without_documents_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, backend: str
):
    right = mla.visible_range

    def wrong(queries: Tensor, segments: Any, *, context: Any) -> tuple[Tensor, Tensor]:
        start, stop = right(queries, segments, context=context)
        return torch.where(axis_index(context) > 0, 0, start), stop

    monkeypatch.setattr(mla, "visible_range", wrong)
    caught(name, Mesh(cp=2), backend, WRONG)


@each_backend
@pytest.mark.parametrize("name", ["dsa", "warmup"])
def test_a_teacher_of_the_local_heads_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, backend: str
):
    def own_heads(x: Tensor, axis: Any, dim: int) -> Tensor:
        """This rank's part along ``dim``, as if its own heads were all."""
        n = axis_size(axis)
        return n * torch.stack(x.chunk(n, dim)).index_select(
            0, axis_index(axis).reshape(1)
        ).squeeze(0)

    monkeypatch.setattr(dsa, "psum_scatter", own_heads)
    caught(name, Mesh(tp=2), backend, WRONG)


@each_backend
@pytest.mark.parametrize(
    ("name", "module"), [("mla", mla), ("dsa", mla), ("dsa", indexer), ("warmup", indexer)]
)
def test_a_forgotten_pvary_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, module: Any, backend: str
):
    monkeypatch.setattr(module, "pvary", lambda w, axis: w)
    caught(name, Mesh(tp=2), backend, "does not name 'tp'|varies over an axis")


@each_backend
@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(cp=2)], ids=str)
def test_sets_of_the_own_keys_only_are_found(
    monkeypatch: pytest.MonkeyPatch, mesh: Mesh, backend: str
):
    right = dsa._choose

    def wrong(index: indexer.IndexerOut, start: Tensor, stop: Tensor, cfg: dsa.Config) -> Tensor:
        first = (
            stop[:, :1] - 1 if stop.shape[1] < T else 0
        )  # of one document per row; one device sees all its keys
        return right(index, torch.zeros_like(start) + first, stop, cfg)

    monkeypatch.setattr(dsa, "_choose", wrong)
    caught("dsa", mesh, backend, WRONG, rows=None)


@every(
    "name mesh",
    itertools.product(["mla", "dsa", "warmup"], [Mesh(tp=2), Mesh(cp=2)]),
    [("mla", Mesh(tp=2)), ("dsa", Mesh(cp=2)), ("warmup", Mesh(tp=2))],
)
def test_all_the_work_on_each_rank_is_found(name: str, mesh: Mesh):
    """Equal values and gradients: every token is gathered, everything computed, and the own part
    taken.
    """
    layer, cfg, right = CASES[name]

    def f(axes: MeshAxes, weights: Any, x: Tensor, segments: Any) -> Any:
        ranks = axes.cp + axes.tp
        row = tree.map(lambda t: all_gather_invariant(t, axes.cp, 1), segments)
        out = layer.apply(weights, all_gather_invariant(x, ranks, 1), cfg, segments=row)
        return tree.map(lambda y: pslice(y, ranks, 1) if y.ndim else y, out)

    in_specs, out_specs = specs(name, mesh, packed=True)
    with pytest.raises(AssertionError, match=r"a rank did 1 of one device's work, at most 0.5"):
        assert_sharded_equals_dense(
            f,
            arguments(name, PACKED),
            (P(), *in_specs[1:]),
            out_specs,
            mesh,
            dense=right,
            collectives={"all_gather_invariant": 2 + 2 * (mesh.cp > 1)},
            rtol=1e-10,
            atol=1e-10,
            flops=0.5,
            backends=("threads",),
        )
