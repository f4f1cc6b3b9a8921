"""A small K3.1 as a pipeline on any mesh: loss, gradients and reports put together from all
ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import balance, model, segments, tree
from k31fn.autodiff import SplitWork, value_and_grad
from k31fn.layers import attn_res, mhc, plain_residual
from k31fn.model import stages
from k31fn.parallel import (
    AxisRules,
    Mesh,
    MeshAxes,
    P,
    Sharding,
    axes_of_process,
    check_invariance,
    each_rank,
    fsdp,
    partition,
    psum,
    record_collectives,
)
from k31fn.parallel.collective_record import CollectiveRecord
from k31fn.parallel.collectives import own_index
from k31fn.parallel.pipeline import check_stages, run, schedule, stage_ranges
from k31fn.parallel.tiling import assemble, cut
from k31fn.testing import Ranks
from tests import small
from tests.parallel import cases_model

ROWS, TOKENS = 8, 16
# KDA and dense, DSA and MoE, KDA and MoE, DSA and MoE; blocks of two layers
CFG = small.replace(
    cases_model.CFG,
    num_layers=4,
    full_attention_layers=(1, 3),
    residual=attn_res.Config(block_size=2, query_std=0.1),
)
CONFIGS = {
    "k31": CFG,
    "plain": dataclasses.replace(CFG, residual=plain_residual.Config()),
    "mhc": dataclasses.replace(
        CFG, residual=mhc.Config(num_streams=2, iterations=3, init_std=0.5, init_scale=0.5)
    ),
    "dense half": small.replace(
        CFG, num_dense_layers=2
    ),  # of two stages the first has no MoE layer
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """A pipeline of the small model."""

    pp: int = 2
    fsdp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    kind: str = "1f1b"
    chunks: int = 1
    cuts: tuple[int, ...] = ()
    micro_batches: int = 2
    remat: str = "none"
    name: str = "k31"
    double: bool = True
    counted: bool = False  # whether the work of split backwards is

    @property
    def mesh(self) -> Mesh:
        return Mesh(pp=self.pp, fsdp=self.fsdp, cp=self.cp, tp=self.tp, ep=self.ep)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32


def micro_batches(count: int) -> list[model.Batch]:
    """The same rows, in ``count`` micro-batches, with the denominators of all."""
    tokens = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS).square() % 17 % cases_model.VOCAB
    lengths = [[3, 7, 4], [1, 12], [16], [5, 6], [16], [8, 8], [2, 2, 9], [14]]
    batch = model.make_batch(
        tokens, segments.from_lengths(lengths, TOKENS), vocab_size=cases_model.VOCAB
    )
    rows, structure = tree.flatten((batch.tokens, batch.labels, batch.segments))
    parts = zip(*(x.chunk(count) for x in rows), strict=True)
    return [
        model.Batch(*tree.unflatten(structure, p), batch.num_labels, batch.num_queries)
        for p in parts
    ]


@functools.cache
def dense(name: str, double: bool = True) -> tuple[Tensor, dict[str, Tensor], model.Losses]:
    """Loss, gradients by path and summed reports on one device, all rows at once."""
    cfg = CONFIGS[name]
    (batch,) = micro_batches(1)
    gradient = value_and_grad(
        lambda w: model.loss(w, batch, cfg, balance=cases_model.biases(cfg)), has_aux=True
    )
    weights = cases_model.shaken(model.specs(cfg), torch.float64 if double else torch.float32)
    (loss, sums), grads = gradient(weights)
    return loss, dict(tree.flatten_with_paths(grads)), sums


class OnRank(NamedTuple):
    """A rank's result; ``grads`` is a tree like the model's parameters, with ``()`` for what other
    ranks have.
    """

    loss: Tensor
    grads: model.Params[Tensor]
    sums: tuple[model.Losses, ...]
    num_live: int
    work: tuple[SplitWork, ...]


def step(axes: MeshAxes, coordinate: dict[str, int], setup: Setup) -> OnRank:
    """What a training step does on one rank before the optimiser."""
    cfg, mesh, sh = CONFIGS[setup.name], setup.mesh, Sharding.on(axes)
    table = schedule(setup.kind, setup.pp, setup.micro_batches, num_chunks=setup.chunks)
    cuts = setup.cuts or None
    parts = stages.stages(cfg, stage_ranges(cfg.num_layers, table.num_stages, cuts=cuts))
    mine = [parts[s] for s in table.stages_of(own_index(axes.pp))]
    specs = stages.select(model.specs(cfg), mine)
    split = partition(specs, AxisRules(), mesh)
    places = fsdp.placements(specs, split, axes)
    weights = stages.select(cases_model.shaken(model.specs(cfg), setup.dtype), mine)
    held, inner = (
        fsdp.enter_step(_tiles(split, weights, mesh, coordinate), places),
        fsdp.gather_only(places),
    )
    rows = P(("dp", "fsdp"), "cp")
    batches = [
        _tiles(tree.map(lambda x: rows if x.ndim else P(), b), b, mesh, coordinate)
        for b in micro_batches(setup.micro_batches)
    ]
    biases = rows_of(cases_model.biases(cfg), stages.stage_moe_layers(cfg, mine))
    how: Any = {"balance": biases, "remat": setup.remat, "sh": sh}
    functions = [
        stages.make_stage(cfg, p, placements=stages.select(inner, [p]), **how) for p in mine
    ]
    owned = [stages.select(held, [p]) for p in mine]
    line: Any = {
        "axis": axes.pp,
        "carries": stages.stage_carries(cfg, parts, batches[0], setup.dtype, sh=sh),
    }
    work = check_stages(table, functions, owned, batches[0], **line) if setup.counted else ()
    result = run(table, functions, owned, batches, **line)
    grads = fsdp.sum_gradients(stages.merge(result.grads), places)
    sums = tuple(tree.map(lambda x: psum(x, axes.data), s) for s in result.sums)
    return OnRank(psum(result.loss, axes.data), grads, sums, result.num_live, work)


def _tiles(specs: Any, values: Any, mesh: Mesh, coordinate: dict[str, int]) -> Any:
    leaves, structure = tree.flatten(values)
    return tree.unflatten(structure, cut(tree.leaves(specs), leaves, mesh, coordinate))


def rows_of(state: balance.State, layers: tuple[int, ...]) -> balance.State:
    """What a stage with these MoE layers holds of the biases."""
    return balance.State(state.bias[[state.layers.index(i) for i in layers]], layers)


def on_threads(setup: Setup) -> tuple[list[OnRank], CollectiveRecord]:
    """Results in the order of ranks, and the record of collectives."""
    with record_collectives() as record, check_invariance():
        results = each_rank(
            lambda axes, c: step(axes, c, setup), setup.mesh, lambda c: (c,), timeout=100.0
        )
    return results, record


def on_process(setup: Setup) -> tuple[list[Tensor], dict[str, Any]]:
    """For spawned processes: the leaves of a rank's loss, gradients and sums."""
    axes, coordinate = axes_of_process(setup.mesh)
    out = step(axes, coordinate, setup)
    return tree.leaves((out.loss, out.grads, out.sums)), {
        "paths": tree.paths(out.grads),
        "live": out.num_live,
    }


class Whole(NamedTuple):
    """Of the whole model, from all ranks; gradients by path."""

    loss: Tensor
    grads: dict[str, Tensor]
    sums: model.Losses


def together(results: list[OnRank], setup: Setup) -> Whole:
    """Puts tiles together, and stages one after the other."""
    cfg, mesh = CONFIGS[setup.name], setup.mesh
    inner = dataclasses.replace(mesh, pp=1)
    paths = tree.paths(model.specs(cfg))
    split = dict(
        zip(paths, tree.leaves(partition(model.specs(cfg), AxisRules(), inner)), strict=True)
    )
    size = math.prod((inner.fsdp, inner.cp, inner.tp))
    ranks = [results[i * size : (i + 1) * size] for i in range(mesh.pp)]  # pp is outermost
    grads: dict[str, Tensor] = {}
    for some in ranks:
        by_path = [dict(tree.flatten_with_paths(r.grads)) for r in some]
        for path in by_path[0]:
            assert path not in grads, f"two stages have {path}"
            grads[path] = assemble([g[path] for g in by_path], split[path], inner)
    in_order = [ranks[s % mesh.pp][0].sums[s // mesh.pp] for s in range(mesh.pp * setup.chunks)]
    rows = [torch.cat([getattr(s, n) for s in in_order]) for n in ("kl", "load", "histogram")]
    loss = torch.stack([some[0].loss for some in ranks]).sum()
    return Whole(
        loss, {p: grads[p] for p in paths}, model.Losses(in_order[-1].lm, in_order[-1].mtp, *rows)
    )


def on_processes(setup: Setup, ranks: Ranks) -> Whole:
    """The same from spawned processes."""
    cfg = CONFIGS[setup.name]
    results = []
    for tensors, info in ranks.run(on_process, setup):
        like = model.specs(cfg)
        count = len(info["paths"])
        values = dict(zip(info["paths"], tensors[1 : 1 + count], strict=True))
        grads = _with_paths(like, values)
        sums = tensors[1 + count :]
        losses = [model.Losses(*sums[i : i + 5]) for i in range(0, len(sums), 5)]
        results.append(OnRank(tensors[0], grads, tuple(losses), info["live"], ()))
    return together(results, setup)


def _with_paths(like: Any, values: dict[str, Tensor]) -> Any:
    """A tree of those leaves of ``like`` whose paths are given; ``()`` where a part has none."""

    def part(prefix: str, node: Any) -> Any:
        if not any(path.startswith(prefix) for path in values):
            return ()
        return tree.map_with_path(lambda p, _: values[f"{prefix}{p}" if p else prefix], node)

    layers = tuple(part(f"layers.{i}.", layer) for i, layer in enumerate(like.layers))
    named = {n: part(f"{n}.", getattr(like, n)) for n in ("embedding", "final_mix", "final_norm")}
    return model.Params(**named, layers=layers, head=values.get("head", ()), mtp=())
