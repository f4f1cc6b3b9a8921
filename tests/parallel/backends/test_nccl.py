"""Training on as many GPUs as this machine has, two of them at least: through NCCL come the numbers
of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from k31fn import config, model, tree
from k31fn.parallel import AxisRules, Mesh, partition
from k31fn.parallel.partition import tile
from k31fn.testing import Ranks, spawn_ranks
from tests.parallel import cases_nccl as cases
from tests.trainer import meshes, runs

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(600)]

DEVICE = "cuda"
COUNT = torch.cuda.device_count()
MESHES = [
    Mesh(dp=2),
    Mesh(fsdp=2),
    Mesh(tp=2),
    Mesh(cp=2),
    Mesh(fsdp=2, ep=2),
    Mesh(tp=2, ep=2),
    Mesh(cp=2, ep=2),
    Mesh(pp=2),
    Mesh(fsdp=2, tp=2),
    Mesh(cp=2, fsdp=2),
    Mesh(fsdp=4, ep=2),
    Mesh(pp=2, fsdp=2),
    Mesh(pp=2, tp=2, ep=2),
    Mesh(pp=2, fsdp=2, tp=2),
    Mesh(fsdp=2, cp=2, tp=2),
]


def named(mesh: Mesh) -> str:
    return "-".join(f"{k}{v}" for k, v in dataclasses.asdict(mesh).items() if v > 1)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def world() -> Iterator[Callable[[int], Ranks]]:
    """So many processes with a GPU each, started when first asked for."""
    if COUNT < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {COUNT}")
    with contextlib.ExitStack() as stack:
        started: dict[int, Ranks] = {}

        def get(size: int) -> Ranks:
            if size > COUNT:
                pytest.skip(f"needs {size} GPUs, this machine has {COUNT}")
            if size not in started:
                started[size] = stack.enter_context(spawn_ranks(size, device=DEVICE))
            return started[size]

        yield get


def check(
    made: config.Recipe, ranks: Ranks, tolerance: float, impl: str = "ragged"
) -> list[dict[str, int]]:
    """Every rank's loss and gradients against those of one GPU, to a part of the largest entry; how
    often impls ran.
    """
    one = cases.gradients(
        Mesh().axes(), dataclasses.replace(made, mesh=Mesh()), torch.device(DEVICE)
    )
    split = dict(
        tree.flatten_with_paths(partition(model.specs(made.model), AxisRules(), made.mesh))
    )
    answers = ranks.run(cases.on_rank, made, DEVICE, impl, timeout=300)
    assert {path for _, told in answers for path in told["paths"]} == set(one)
    for coordinate, (found, told) in zip(made.mesh.coordinates(), answers, strict=True):
        for path, part in zip(told["paths"], found, strict=True):
            whole = one[path].cpu()
            own = (
                whole[tile(split[path], whole.shape, made.mesh, coordinate)]
                if path in split
                else whole
            )
            assert (part - own).abs().max() <= tolerance * whole.abs().max(), (path, coordinate)
    return [told["ran"] for _, told in answers]


@pytest.mark.parametrize("mesh", MESHES, ids=named)
def test_loss_and_all_gradients(mesh: Mesh, text: Path, world: Callable[[int], Ranks]):
    """In float64, with the layers' weights gathered ahead and their gradients scattered behind."""
    ranks = world(mesh.world_size)
    made = meshes.recipe(text, mesh=mesh, compute="float64", remat="layer", micro_batches=mesh.pp)
    check(made, ranks, 1e-10)


@pytest.mark.parametrize("mesh", MESHES, ids=named)
def test_fp32(mesh: Mesh, text: Path, world: Callable[[int], Ranks]):
    ranks = world(mesh.world_size)
    check(meshes.recipe(text, mesh=mesh, micro_batches=mesh.pp), ranks, 1e-5)


@pytest.mark.parametrize("mesh", MESHES, ids=named)
def test_three_steps(mesh: Mesh, text: Path, world: Callable[[int], Ranks]):
    """Metrics, equal on all ranks, and the parameters that Muon and AdamW make."""
    ranks = world(mesh.world_size)
    made = meshes.recipe(text, mesh=mesh, compute="float64")
    metrics, state = meshes.on_one_device(made, 3, torch.device(DEVICE))
    answers = ranks.run(meshes.on_process, made, 3, DEVICE, timeout=300)
    (first, *weights), *others = [found for found, _ in answers]
    torch.testing.assert_close(first, metrics.cpu(), rtol=1e-9, atol=1e-11)
    assert all(torch.equal(other, first) for other, *_ in others)
    for got, want in zip(weights, tree.leaves(state.params), strict=True):
        torch.testing.assert_close(got, want.cpu(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mesh", [Mesh(fsdp=2, ep=2), Mesh(tp=2)], ids=named)
def test_an_implementation_that_was_asked_for_runs_in_the_backward_too(
    mesh: Mesh, text: Path, world: Callable[[int], Ranks]
):
    """A layer that is run again in the backward, on a thread of the autograd engine, takes it there
    too.
    """
    ranks = world(2)
    runs_of = {
        remat: check(
            meshes.recipe(text, mesh=mesh, compute="float64", remat=remat), ranks, 1e-10, "buckets"
        )
        for remat in ("none", "layer")
    }
    for once, again in zip(runs_of["none"], runs_of["layer"], strict=True):
        assert set(once) == set(again) == {"buckets"}
        assert (
            again["buckets"] >= once["buckets"] + 3
        )  # the three products of the layer with experts
