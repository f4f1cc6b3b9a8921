"""On one GPU: ranks as threads that share it, the simulated mesh, and NCCL with a world of one."""

from __future__ import annotations

import functools
import os
import socket

import pytest
import torch
import torch.distributed as dist

from k31fn import tree
from k31fn.autodiff import value_and_grad
from k31fn.parallel import (
    Mesh,
    P,
    axes_of_process,
    check_invariance,
    record_collectives,
    shard_map,
    start_processes,
    stop_processes,
)
from k31fn.parallel.backends.processes import _ProcessChannel, exchange_json
from k31fn.testing import assert_close_trees
from tests.parallel import cases
from tests.parallel.test_overlap import arguments
from tests.parallel.test_shard_map import COUNTS, SPECS, layers

pytestmark = pytest.mark.cuda


def on_gpu(x):
    return tree.map(lambda t: t.cuda(), x)


def to_cpu(x):
    return tree.map(lambda t: t.cpu(), x)


@pytest.mark.parametrize("backend", ["simulated", "threads"])
@pytest.mark.parametrize("mesh", [Mesh(fsdp=2), Mesh(tp=2), Mesh(fsdp=2, tp=2)], ids=str)
@pytest.mark.parametrize("mode", COUNTS)
def test_the_composition_equals_the_cpu(mode: str, mesh: Mesh, backend):
    args = layers(), torch.randn(4, 6, 8, dtype=torch.float64)
    out_specs = (P(), (SPECS, P("fsdp")))

    def step(axes, weights, x):
        return value_and_grad(functools.partial(cases.composition, axes, mode=mode), (0, 1))(
            weights, x
        )

    results = []
    for a in (args, on_gpu(args)):
        with record_collectives() as record, check_invariance():
            results.append(
                to_cpu(shard_map(step, mesh, (SPECS, P("fsdp")), out_specs, backend=backend)(*a))
            )
        assert all(r.counts == record.counts for r in record.ranks)
    assert_close_trees(results[1], results[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("ranks", [2, 4])
def test_prefetched_gathers_in_threads_equal_the_cpu(ranks: int):
    def f(axes, weights, x):
        return value_and_grad(lambda w: cases.prefetched(axes, w, x).sum())(weights)[1]

    weights, x = arguments()
    args = weights, torch.cat([x, 2 * x])
    run = shard_map(f, Mesh(fsdp=ranks), (P("fsdp"), P("fsdp")), P("fsdp"), backend="threads")
    with record_collectives() as record:
        got = to_cpu(run(*on_gpu(args)))
    assert_close_trees(got, run(*args), rtol=1e-12, atol=1e-14)
    assert record.counts == {
        "all_gather": 3,
        "psum_scatter": 3,
    }  # the backward's, though it runs where the GPU's does


def test_nccl_with_a_world_of_one():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    torch.cuda.set_device(0)
    start_processes("cuda")
    try:
        axes, coordinate = axes_of_process(Mesh())
        assert (axes.atoms, coordinate) == ((), {})
        assert exchange_json({"a": 1}, axes.atoms, device="cuda") == [{"a": 1}]
        channel, x = _ProcessChannel(dist.group.WORLD, 1, 0, ""), torch.randn(4, 2, device="cuda")
        moves = {
            "psum": {},
            "pmax": {},
            "all_gather": {"dim": 1},
            "psum_scatter": {"dim": 1},
            "all_to_all": {"split": 0, "concat": 1},
            "ragged_all_to_all": {"send": (4,), "recv": (4,)},
            "ppermute": {"perm": ((0, 0),)},
        }
        for op, kw in moves.items():
            assert torch.equal(channel.start(op, x, kw)(), x), op
    finally:
        stop_processes()
