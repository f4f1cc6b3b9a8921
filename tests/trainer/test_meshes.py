"""Training on a mesh gives the numbers of one device, whatever is split."""

import dataclasses

import pytest
import torch

from k31fn.parallel import Mesh
from k31fn.testing import assert_close_trees
from tests.trainer import meshes

pytestmark = pytest.mark.usefixtures("unchecked")

MESHES = [
    Mesh(fsdp=2),
    Mesh(tp=2),
    Mesh(cp=2),
    Mesh(fsdp=2, ep=2),
    Mesh(pp=2),
]
COMBINED = [
    Mesh(dp=2, fsdp=2),
    Mesh(pp=2, tp=2, ep=2),
    *(
        pytest.param(m, marks=pytest.mark.slow)
        for m in (
            Mesh(fsdp=2, tp=2),
            Mesh(cp=2, fsdp=2),
            Mesh(fsdp=4, ep=2),
            Mesh(tp=2, ep=2),
            Mesh(pp=2, fsdp=2),
            Mesh(dp=2, cp=2, tp=2, ep=4),
        )
    ),
]


def named(mesh):
    return "-".join(f"{k}{v}" for k, v in dataclasses.asdict(mesh).items() if v > 1)


@pytest.fixture(scope="module")
def recipe(text):
    return meshes.recipe(text, compute="float64")


@pytest.fixture(scope="module")
def ten_steps(recipe):
    return meshes.on_one_device(recipe, 10)


def check(recipe, mesh, count, expected, **changes):
    made = dataclasses.replace(recipe, mesh=mesh, **changes)
    metrics, states, whole = meshes.on_threads(made, count)
    for other in metrics:
        assert torch.equal(other, metrics[0])
    torch.testing.assert_close(metrics[0], expected[0], rtol=1e-9, atol=1e-11)
    assert_close_trees(whole, expected[1], rtol=1e-9, atol=1e-11)
    pairs = list(meshes.replicas(made, states))
    assert pairs
    assert [path for path, a, b in pairs if not torch.equal(a, b)] == []


@pytest.mark.parametrize("mesh", MESHES, ids=named)
def test_ten_steps(recipe, ten_steps, mesh):
    """Losses, norms and loads, and after them parameters, optimiser state and biases; equal bits on
    replicas.
    """
    check(recipe, mesh, 10, ten_steps)


@pytest.mark.parametrize("mesh", COMBINED, ids=named)
def test_two_steps(recipe, mesh):
    check(recipe, mesh, 2, meshes.on_one_device(recipe, 2))
