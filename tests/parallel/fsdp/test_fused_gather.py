"""Bundled gathers and scatters against those of each leaf."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn import params, random, tree
from k31fn.autodiff import vjp
from k31fn.parallel import AxisRules, Mesh, P, fsdp, partition, record_collectives, shard_map
from k31fn.parallel.fsdp import fused_gather
from k31fn.params import Normal, ParamSpec
from k31fn.testing import assert_close_trees

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def spec(
    *shape: int, axes: tuple[str, ...], dtype: torch.dtype = BF16, tags: tuple[str, ...] = ()
) -> ParamSpec:
    return ParamSpec(shape, axes, Normal(1.0), dtype, frozenset(tags))


SPECS = {
    "rows": spec(8, 6, axes=("", "")),
    "columns": spec(3, 8, axes=("", "")),
    "middle": spec(3, 8, 2, axes=("", "", "")),
    "island": spec(8, axes=("",), dtype=F32),
    "other island": spec(4, 2, axes=("", ""), dtype=F32),
    "heads": spec(6, 8, axes=("", "heads")),
    "more heads": spec(4, 8, axes=("", "heads")),
    "experts": spec(4, 8, 2, axes=("experts", "", ""), tags=("expert",)),
    "odd": spec(3, axes=("",)),
}
DTYPES: dict[str, Any] = {"f64": {}, "narrow": {"compute": BF16, "reduce": F32}}


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("backend", ["simulated", "threads"])
@pytest.mark.parametrize(
    "mesh",
    [Mesh(fsdp=2), Mesh(dp=2, fsdp=2), Mesh(fsdp=2, tp=2, ep=2), Mesh(fsdp=4, ep=2)],
    ids=str,
)
def test_equals_leaf_by_leaf(mesh, backend, kind):
    """Weights, as the cotangents that are sent back; by differentiation and by the hand-written
    transpose.
    """
    part = partition(SPECS, AxisRules(), mesh)
    weights = params.init(SPECS, random.key(0), dtype=F64 if kind == "f64" else F32)

    def run(axes: Any, w: Any) -> Any:
        places = fsdp.placements(SPECS, part, axes, **DTYPES[kind])
        whole, pull = vjp(lambda w: fsdp.gather(w, places), w)
        ahead, pull_ahead = vjp(
            lambda w: fused_gather.wait_gather(fused_gather.start_gather(w, places)), w
        )
        assert [t.dtype for t in tree.leaves(ahead)] == [t.dtype for t in tree.leaves(whole)]
        back = fused_gather.wait_scatter(fused_gather.start_scatter(ahead, places, w))
        return pull(whole)[0], pull_ahead(ahead)[0], back

    leaf, ahead, back = shard_map(run, mesh, (part,), (part, part, part), backend=backend)(weights)
    ranks = math.prod(getattr(mesh, view) for view in ("dp", "fsdp"))
    assert_close_trees(
        leaf["rows"], ranks * weights["rows"].to(leaf["rows"].dtype), rtol=1e-2, atol=0
    )  # bfloat16
    assert_close_trees(ahead, leaf, rtol=0, atol=0)
    assert_close_trees(back, leaf, rtol=0, atol=0)


def issued(f: Any, mesh: Mesh, **dtypes: Any) -> Any:
    """Operands of gathers, in bytes."""
    part = partition(SPECS, AxisRules(), mesh)

    def run(axes: Any, w: Any) -> Tensor:
        f(w, fsdp.placements(SPECS, part, axes, **dtypes))
        return torch.zeros(())

    with record_collectives() as record:
        shard_map(run, mesh, (part,), P(), backend="threads")(
            params.init(SPECS, random.key(0), dtype=F32)
        )
    return sorted(e.nbytes for e in record.events if e.what == "issue" and e.kind == "all_gather")


def test_small_leaves_of_a_kind_travel_together(monkeypatch):
    def ahead(w: Any, places: Any) -> Any:
        return fused_gather.wait_gather(fused_gather.start_gather(w, places))

    mesh = Mesh(fsdp=2, tp=2)
    bf16, islands, heads = [48 + 24 + 48 + 64, 8 + 8, 48 + 32]
    assert issued(ahead, mesh, compute=BF16) == sorted(
        [2 * bf16 // 2, 4 * islands // 2, 2 * heads // 4]
    )
    assert len(issued(fsdp.gather, mesh, compute=BF16)) == len(SPECS) - 1
    monkeypatch.setattr(
        fused_gather, "_SMALL", 4 * 24 - 1
    )  # rows, middle and experts are larger, so they go alone
    assert issued(ahead, mesh, compute=BF16) == sorted(
        [48, 48, 64, 24, 4 * islands // 2, 2 * heads // 4]
    )
