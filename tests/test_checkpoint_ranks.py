"""The whole state on rank 0, and back to the ranks of another mesh, bit by bit."""

import pytest
import torch

from k31fn import tree
from k31fn.checkpoint.ranks import Held, collect, distribute
from k31fn.parallel import Mesh, P, each_rank, tile

CPU = torch.device("cpu")


def state():
    """Every kind of leaf: a scalar, an odd dtype, a negative zero and a NaN, one of a stage, one that is empty."""
    w = torch.arange(96, dtype=torch.float32).reshape(8, 12)
    w[0, 0], w[3, 3] = -0.0, float("nan")
    return {
        "step": torch.tensor(7),
        "w": w,
        "narrow": (torch.arange(16) / 3).to(torch.bfloat16).reshape(4, 4),
        "last": torch.arange(6.0).reshape(2, 3),
        "none": torch.zeros(0, 5),
    }


HELD = {
    "w": Held(P(("tp", "fsdp"), "cp")),
    "narrow": Held(P(None, "fsdp")),
    "last": Held(P("tp"), stages=(1,)),
}


def held_on(mesh):
    """Without pipeline stages, all ranks hold what a stage would."""
    return HELD if mesh.pp > 1 else {k: Held(h.spec) for k, h in HELD.items()}


def local(mesh, coordinate, full):
    held, mine = held_on(mesh), {}
    for path, x in full.items():
        h = held.get(path, Held())
        if not h.stages or coordinate["pp"] in h.stages:
            mine[path] = x[tile(h.spec, x.shape, mesh, coordinate)]
    return mine


def bits(x):
    return tree.map(lambda t: t.contiguous().flatten().view(torch.uint8).tolist(), x)


MESHES = [
    Mesh(),
    Mesh(fsdp=2),
    Mesh(pp=2, tp=2),
    Mesh(dp=2, fsdp=2, tp=2),
    Mesh(pp=2, fsdp=2, cp=2),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_collect(mesh):
    full = state()
    whole = tree.map(lambda x: x.to("meta"), full)

    def run(axes, coordinate):
        return collect(local(mesh, coordinate, full), whole, held_on(mesh), mesh, axes)

    first, *others = each_rank(run, mesh, lambda c: (c,))
    assert bits(first) == bits(full)
    assert all(other == () for other in others)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_distribute(mesh):
    full = state()
    whole = tree.map(lambda x: x.to("meta"), full)

    def run(axes, coordinate):
        expected = local(mesh, coordinate, full)
        mine = tree.map(lambda x: x.to("meta"), expected)
        first = not any(coordinate.values())
        got = distribute(full if first else (), mine, whole, held_on(mesh), mesh, axes, device=CPU)
        return bits(got) == bits(expected) and tree.paths(got) == tree.paths(expected)

    assert all(each_rank(run, mesh, lambda c: (c,)))
