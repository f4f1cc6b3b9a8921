"""Training in real processes (gloo) in float32, against one device."""

import dataclasses

import pytest
import torch

from k31fn import tree
from k31fn.parallel import Mesh
from k31fn.testing import spawn_ranks
from k31fn.testing.trees import assert_close_trees
from tests.trainer import meshes

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def two_ranks():
    with spawn_ranks(2) as ranks:
        yield ranks


def compare(made, count, ranks, record_property):
    """float32 sums in another order: a relative 1e-5 after a step, 1e-4 after ten; routes that flipped are reported."""
    answers = ranks.run(meshes.on_process_with_loads, made, count, timeout=110)
    expected, loads, state = meshes.with_loads(Mesh().axes(), dataclasses.replace(made, mesh=Mesh()), count)
    flips = sum(int((a[1] - loads).abs().sum()) // 2 for a, _ in answers if a[1].numel())
    record_property("routes_flipped", flips)
    print(f"routes that flipped in {count} steps on {made.mesh}: {flips}")
    for tensors, _ in answers:
        assert torch.equal(tensors[0], answers[0][0][0])
        torch.testing.assert_close(tensors[0][0, 0], expected[0, 0], rtol=1e-5, atol=0)
        torch.testing.assert_close(tensors[0][:, 0], expected[:, 0], rtol=1e-4, atol=0, msg=lambda m: f"{m}; {flips=}")
    return answers[0][0][2:], state, flips


def test_a_step_on_two_tensor_parallel_ranks(text, two_ranks, record_property):
    made = meshes.recipe(text, mesh=Mesh(tp=2))
    leaves, state, _ = compare(made, 2, two_ranks, record_property)
    assert_close_trees(leaves, tree.leaves(state.params), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "mesh", [Mesh(), Mesh(fsdp=2), Mesh(tp=2), Mesh(cp=2), Mesh(fsdp=2, ep=2), Mesh(pp=2)], ids=str
)
def test_ten_steps(text, mesh, two_ranks, record_property):
    made = meshes.recipe(text, mesh=mesh, micro_batches=mesh.pp)
    if mesh == Mesh():
        with spawn_ranks(1) as one:
            compare(made, 10, one, record_property)
    else:
        compare(made, 10, two_ranks, record_property)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mesh", [Mesh(fsdp=2, tp=2, ep=2), Mesh(pp=2, cp=2)], ids=str)
def test_four_ranks(text, mesh, record_property):
    made = meshes.recipe(text, mesh=mesh)
    with spawn_ranks(4) as ranks:
        compare(dataclasses.replace(made, micro_batches=mesh.pp), 10, ranks, record_property)
