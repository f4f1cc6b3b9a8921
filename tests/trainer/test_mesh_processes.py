"""Training in real processes (gloo) in float32, against one device."""

import dataclasses

import pytest
import torch

from k31fn import lora, trainer, tree
from k31fn.checkpoint import Checkpointer
from k31fn.parallel import Mesh
from k31fn.testing import spawn_ranks
from k31fn.testing.trees import assert_close_trees
from k31fn.trainer import folder
from tests.trainer import meshes, test_adapters

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def two_ranks():
    with spawn_ranks(2) as ranks:
        yield ranks


def compare(made, count, ranks, record_property):
    """float32 sums in another order: a relative 1e-5 after a step, 1e-4 after ten; routes that
    flipped are reported.
    """
    answers = ranks.run(meshes.on_process_with_loads, made, count, timeout=110)
    expected, loads, state = meshes.with_loads(
        Mesh().axes(), dataclasses.replace(made, mesh=Mesh()), count
    )
    flips = sum(int((a[1] - loads).abs().sum()) // 2 for a, _ in answers if a[1].numel())
    record_property("routes_flipped", flips)
    print(f"routes that flipped in {count} steps on {made.mesh}: {flips}")
    for tensors, _ in answers:
        assert torch.equal(tensors[0], answers[0][0][0])
        torch.testing.assert_close(tensors[0][0, 0], expected[0, 0], rtol=1e-5, atol=0)
        torch.testing.assert_close(
            tensors[0][:, 0], expected[:, 0], rtol=1e-4, atol=0, msg=lambda m: f"{m}; {flips=}"
        )
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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mesh", "held"),
    [
        (Mesh(fsdp=2), "fp8"),
        (Mesh(tp=2), "mxfp4"),
        (Mesh(fsdp=2, ep=2), "mxfp4"),
        (Mesh(tp=2, ep=2), "fp8"),
    ],
    ids=str,
)
def test_adapters_of_a_run(text, tmp_path, mesh, held, two_ranks):
    """In float64: losses and adapters of four steps as on one device, and of the base the same
    bytes as before.
    """
    base = test_adapters.recipe(text, compute="float64")
    with Checkpointer(folder.new(tmp_path, base) / "checkpoints") as checkpoints:
        checkpoints.save(1, trainer.init_state(trainer.lay_out(base), meshes.CPU))
    adapted = lora.Config(base=str(tmp_path / base.name), rank=2, held=held)
    one = test_adapters.recipe(
        text, lora=adapted, compute="float64", optimizer=test_adapters.ADAMW, remat="layer"
    )
    answers = two_ranks.run(meshes.on_process, dataclasses.replace(one, mesh=mesh), 4, timeout=200)
    before = dict(
        tree.flatten_with_paths(trainer.init_state(trainer.lay_out(one), meshes.CPU).params)
    )
    expected, state = meshes.on_one_device(one, 4)
    specs = dict(tree.flatten_with_paths(trainer.trained_specs(one)))
    for tensors, _ in answers:
        torch.testing.assert_close(tensors[0], expected, rtol=1e-9, atol=1e-11)
        rows = zip(tree.flatten_with_paths(state.params), tensors[1:], strict=True)
        for (path, alone), ours in rows:
            if "frozen" in specs[path].tags:
                assert torch.equal(ours, before[path]), path
                assert torch.equal(alone, before[path]), path
            else:
                torch.testing.assert_close(ours, alone, rtol=1e-8, atol=1e-10, msg=path)
                assert not torch.equal(ours, before[path]), path
    assert any(path.endswith("base.codes") and before[path].dtype == torch.uint8 for path in specs)
