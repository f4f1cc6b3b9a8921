"""One rank alone on meta tensors: shapes, dtypes and records are those that real ranks have."""

from __future__ import annotations

import pytest
import torch

from k31fn.autodiff import vjp
from k31fn.parallel import (
    Mesh,
    all_gather,
    each_rank,
    psum,
    psum_scatter,
    pvary,
    ragged_all_to_all,
    record_collectives,
    start,
    wait,
)
from k31fn.parallel.backends.abstract import abstract_axes
from tests.parallel.cases import COLLECTIVES

MESH = Mesh(fsdp=2, cp=2, tp=2)


def forward_and_backward(axes, op, view, x):
    y, pull = vjp(lambda x: COLLECTIVES[op][2](x.square(), axes.view(*view)), x)
    return y, pull(torch.ones_like(y))[0]


@pytest.mark.parametrize("op", [op for op in COLLECTIVES if op not in ("pmax", "pvary")])
@pytest.mark.parametrize("view", [("tp",), ("fsdp", "tp"), ("fsdp", "cp", "tp")])
def test_shapes_and_records_are_those_of_threads(op, view):
    x = torch.ones(8, 16, 8, dtype=torch.float64)
    with record_collectives() as real:
        ranks = each_rank(forward_and_backward, MESH, lambda _: (op, view, x))
    with record_collectives() as alone:
        out = forward_and_backward(abstract_axes(MESH), op, view, x.to("meta"))
    assert all(t.is_meta for t in out)
    assert [(t.shape, t.dtype) for t in out] == [(t.shape, t.dtype) for t in ranks[0]]
    assert alone.events == real.events
    assert alone.counts


def test_a_layer_with_fsdp_tp_and_prefetch():
    def step(axes, w, x):
        pending = start(all_gather, w, axes.fsdp, dtype=torch.bfloat16, grad_dtype=torch.float32)
        h = pvary(x, axes.tp)
        return psum(h @ wait(pending).to(h.dtype), axes.tp).square().sum()

    def both(axes, w, x):
        return vjp(lambda w: step(axes, w, x), w)[1](torch.ones(()))

    w, x = torch.ones(4, 6), torch.ones(3, 8)
    with record_collectives() as real:
        each_rank(both, MESH, lambda _: (w, x))
    with record_collectives() as alone:
        (g,) = vjp(lambda w: step(abstract_axes(MESH), w, x.to("meta")), w.to("meta"))[1](
            torch.ones((), device="meta")
        )
    assert (g.shape, g.dtype) == (w.shape, w.dtype)
    assert alone.events == real.events
    assert alone.nbytes["all_gather"] == 4 * 6 * 2


def test_sizes_that_differ_by_rank():
    axes = abstract_axes(MESH, MESH.coordinate(5)).tp
    assert ragged_all_to_all(torch.empty(5, 3, device="meta"), axes, [2, 3], [4, 7]).shape == (
        11,
        3,
    )


def test_values_are_refused():
    with pytest.raises(
        ValueError, match="psum_scatter on an abstract mesh of a tensor on cpu: only meta tensors"
    ):
        psum_scatter(torch.ones(4), abstract_axes(MESH).tp)
