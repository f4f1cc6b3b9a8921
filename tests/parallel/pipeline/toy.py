"""Toy stages with a stream, blocks that all later layers read, a loss on every stage and a
parameter per layer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from k31fn import tree
from k31fn.autodiff import value_and_grad
from k31fn.layers.linear import linear
from k31fn.parallel import Mesh, MeshAxes, axes_of_process, each_rank, record_collectives
from k31fn.parallel.collectives import own_index
from k31fn.parallel.pipeline import (
    PipelineResult,
    StageCarry,
    StageOutput,
    run,
    schedule,
    stage_ranges,
)

D, ROWS, LAYERS = 6, 3, 8
OPENS = frozenset({0, 2, 5})  # layers that freeze the stream as a block


def weights() -> list[dict[str, Tensor]]:
    """One dict per layer; the first has the embedding too."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64) / math.sqrt(D)

    layers = [{"w": draw(D, D), "mix": draw(D)} for _ in range(LAYERS)]
    layers[0]["embedding"] = draw(D, D)
    return layers


def micro_batches(count: int, samples: int = 8) -> list[Tensor]:
    """The same samples, in ``count`` micro-batches."""
    x = torch.randn(
        samples, ROWS, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return [part.flatten(0, 1) for part in x.chunk(count)]


def layer(
    p: dict[str, Tensor], i: int, x: Tensor, blocks: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    h = x
    for b in blocks:
        h = h + torch.tanh(b * p["mix"])
    y = linear(torch.tanh(h), p["w"])
    return (y, (*blocks, x)) if i in OPENS else (x + y, blocks)


def layers(
    params: Any, layer_numbers: range, x: Tensor, blocks: tuple[Tensor, ...]
) -> tuple[Any, Any, Tensor]:
    """Stream, blocks, and the loss of the layers."""
    loss = x.new_zeros(())
    for p, i in zip(params, layer_numbers, strict=True):
        x, blocks = layer(p, i, x, blocks)
        loss = loss + 0.1 * x.square().sum()
    return x, blocks, loss


def head(x: Tensor, blocks: tuple[Tensor, ...]) -> Tensor:
    return sum((torch.sin(b) for b in blocks), start=x).square().sum()


def whole(params: Any, batch: Tensor) -> Tensor:
    x, blocks, loss = layers(params, range(LAYERS), batch @ params[0]["embedding"], ())
    return loss + head(x, blocks)


def expected(batches: list[Tensor]) -> tuple[Tensor, Any]:
    """Loss and gradients on one device."""

    def total(params: Any) -> Tensor:
        return torch.stack([whole(params, b) for b in batches]).sum()

    return value_and_grad(total)(weights())


def stage(numbers: range) -> Any:
    def compute(params: Any, carry: StageCarry, batch: Tensor) -> StageOutput:
        first = not numbers.start
        x = batch @ params[0]["embedding"] if first else carry.stream["x"]
        x, blocks, loss = layers(params, numbers, x, () if first else carry.blocks)
        sums = {"calls": x.new_ones(())}
        if numbers.stop == LAYERS:
            return StageOutput(StageCarry(), loss + head(x, blocks), sums)
        return StageOutput(StageCarry({"x": x}, blocks), loss, sums)

    return compute


def carries(ranges: tuple[range, ...], batch: Tensor) -> list[StageCarry]:
    x = torch.empty_like(batch, device="meta")
    return [
        StageCarry({"x": x}, (x,) * sum(o < r.start for o in OPENS)) if r.start else StageCarry()
        for r in ranges
    ]


def step(
    axes: MeshAxes, kind: str, batches: list[Tensor], chunks: int = 1, cuts: Any = None
) -> tuple[PipelineResult, Any]:
    """What a rank does; its result, and the numbers of the layers of each of its stages."""
    ranks = axes.pp[0].size if axes.pp else 1
    table = schedule(kind, ranks, len(batches), num_chunks=chunks)
    ranges = stage_ranges(LAYERS, table.num_stages, cuts=cuts)
    mine = [ranges[s] for s in table.stages_of(own_index(axes.pp))]
    params = tree.map(lambda w: w.to(batches[0].device), weights())
    result = run(
        table,
        [stage(r) for r in mine],
        [params[r.start : r.stop] for r in mine],
        batches,
        axis=axes.pp,
        carries=carries(ranges, batches[0]),
    )
    return result, mine


def on_threads(
    ranks: int, kind: str, batches: list[Tensor], chunks: int = 1, cuts: Any = None
) -> Any:
    """Results in the order of ranks, and what travelled."""
    with record_collectives() as record:
        results = each_rank(
            lambda axes: step(axes, kind, batches, chunks, cuts), Mesh(pp=ranks), lambda _: ()
        )
    return results, record


def together(results: Any) -> tuple[Tensor, list[Any]]:
    """Loss and gradients of all layers, from the results of all ranks."""
    grads: dict[int, Any] = {}
    for result, mine in results:
        for numbers, some in zip(mine, result.grads, strict=True):
            grads |= dict(zip(numbers, some, strict=True))
    return sum(r.loss for r, _ in results), [grads[i] for i in range(LAYERS)]


def on_process(
    ranks: int, kind: str, chunks: int, device: str = "cpu"
) -> tuple[list[Tensor], dict[str, Any]]:
    """For spawned processes: loss and gradients of the rank's stages, in order."""
    axes, _ = axes_of_process(Mesh(pp=ranks))
    with record_collectives() as record:
        result, mine = step(axes, kind, [b.to(device) for b in micro_batches(4)], chunks)
    counts = {"counts": dict(record.counts), "nbytes": dict(record.nbytes), "live": result.num_live}
    return [result.loss, *tree.leaves(result.grads)], {
        **counts,
        "layers": [[r.start, r.stop] for r in mine],
    }
