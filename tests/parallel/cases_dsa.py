"""Gated MLA and Gated DSA on one rank of a mesh: what the tests run on every backend, and spawned
processes import.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor

from k31fn import random, tree
from k31fn.layers import dsa, indexer, mla
from k31fn.layers.kind import Aux, Output
from k31fn.parallel import AxisRules, Mesh, MeshAxes, P, Sharding, partition, psum, pvary
from k31fn.segments import from_lengths
from tests.layers.attention_configs import drawn

# N + V = 2 R: both forms of the attention take equally many multiplications per pair of query and
# key, so the work of ranks, which absorb, can be compared with one device's, which does not
MLA = mla.Config(
    8,
    4,
    q_lora_rank=6,
    kv_lora_rank=4,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=4,
    init_std=0.4,
)
WIDE = dataclasses.replace(MLA, kv_lora_rank=20)  # absorbing does not pay for 4 queries
INDEXER = indexer.Config(8, 6, num_heads=3, head_dim=4, init_std=0.4)
DSA = dsa.Config(MLA, INDEXER, topk=3)
WARMUP = dsa.Config(MLA, INDEXER, topk=3, stage="dense_warmup")
B, T = 2, 16
PACKED = [[3, 7, 4], [1, 12]]  # documents cross slices of 4 and 8 tokens; rows end in padding


class Case(NamedTuple):
    """A layer with its config, and the function of one rank that applies it."""

    layer: Any
    cfg: Any
    fn: Any


def gated_mla(axes: MeshAxes, weights: Any, x: Tensor, segments: Any = None) -> Any:
    return apply(mla, MLA, axes, weights, x, segments)


def wide_mla(axes: MeshAxes, weights: Any, x: Tensor, segments: Any = None) -> Any:
    return apply(mla, WIDE, axes, weights, x, segments)


def gated_dsa(axes: MeshAxes, weights: Any, x: Tensor, segments: Any = None) -> Any:
    return apply(dsa, DSA, axes, weights, x, segments)


def warmup(axes: MeshAxes, weights: Any, x: Tensor, segments: Any = None) -> Any:
    return apply(dsa, WARMUP, axes, weights, x, segments)


CASES = {
    "mla": Case(mla, MLA, gated_mla),
    "expanded mla": Case(mla, WIDE, wide_mla),
    "dsa": Case(dsa, DSA, gated_dsa),
    "warmup": Case(dsa, WARMUP, warmup),
}


def apply(
    layer: Any,
    cfg: Any,
    axes: MeshAxes,
    weights: Any,
    x: Tensor,
    segments: Any,
    *,
    transform: Any = lambda f: f,
) -> Any:
    """The layer on the rank's tokens; the KL summed over all ranks. ``transform``: of the layer,
    such as remat.
    """

    def run(weights: Any, x: Tensor) -> Any:
        return layer.apply(weights, x, cfg, segments=segments, sh=Sharding.on(axes))

    out = transform(run)(tree.map(lambda w: pvary(w, axes.data), weights), x)
    if layer is mla:
        return out.y
    return out._replace(aux=out.aux._replace(kl=psum(out.aux.kl, axes.data + axes.tp)))


def arguments(name: str, rows: list[list[int]] | None = None) -> tuple[Any, ...]:
    """Weights and tokens; with ``rows`` their packing."""
    layer, cfg, _ = CASES[name]
    x = random.normal(random.key(4), (B, T, cfg.hidden_size)).double()
    return drawn(layer.specs(cfg), seed=3), x, *(() if rows is None else (from_lengths(rows, T),))


def specs(name: str, mesh: Mesh, *, packed: bool) -> tuple[tuple[Any, ...], Any]:
    """``(in_specs, out_specs)`` of a case."""
    layer, cfg, _ = CASES[name]
    weights = partition(layer.specs(cfg), AxisRules(spread=()), mesh)
    rows = ("dp", "fsdp")
    tokens: Any = P(rows, ("cp", "tp"))
    kl: Any = P()
    out = tokens if layer is mla else Output(tokens, Aux(kl))
    return (weights, tokens, P(rows, "cp"))[: 2 + packed], out
