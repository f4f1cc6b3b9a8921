"""The whole model with images on meshes against one device: loss, its parts and all gradients."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from k31fn import model, tree
from k31fn.layers import projector, vision
from k31fn.parallel import (
    AxisRules,
    Mesh,
    P,
    check_invariance,
    partition,
    record_collectives,
    shard_map,
)
from k31fn.parallel.collective_record import CollectiveRecord
from k31fn.testing import assert_close_trees
from tests.parallel import cases_model as cases

NAME = "k31 vision"
CFG = cases.CONFIGS[NAME]
MESHES = [Mesh(dp=2), Mesh(fsdp=2), Mesh(tp=2), Mesh(cp=2)]
COMBINED = [Mesh(cp=2, tp=2), Mesh(fsdp=2, tp=2, ep=2), Mesh(dp=2, fsdp=2), Mesh(fsdp=4)]


@functools.cache
def arguments() -> tuple[Any, model.Batch]:
    return cases.shaken(model.specs(CFG)), cases.batch(CFG)


@functools.cache
def one_device() -> cases.Step:
    return cases.step(Mesh().axes(), *arguments(), name=NAME)


def check(mesh: Mesh, backend: str = "threads", *, remat: model.Remat = "none") -> CollectiveRecord:
    specs = partition(model.specs(CFG), AxisRules(), mesh)
    run = functools.partial(cases.step, name=NAME, remat=remat)
    given = specs, cases.batch_specs(arguments()[1])
    mapped = shard_map(run, mesh, given, cases.Step(P(), P(), specs), backend=backend)
    with check_invariance(), record_collectives() as record:
        got = mapped(*arguments())
    assert_close_trees(got, one_device(), rtol=1e-10, atol=1e-12)
    return record


def test_the_images_matter():
    grads = dict(tree.flatten_with_paths(one_device().grads))
    paths = [path for path in grads if path.startswith(("vision.", "projector."))]
    assert len(paths) == 2 * 8 + 3 + 3
    assert all(bool(grads[path].any()) for path in paths)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_loss_and_all_gradients_equal_one_device(mesh: Mesh):
    check(mesh)


@pytest.mark.parametrize(
    "mesh", [Mesh(fsdp=2), *(pytest.param(m, marks=pytest.mark.slow) for m in MESHES)], ids=str
)
def test_recomputed(mesh: Mesh):
    check(mesh, remat="layer")


@pytest.mark.parametrize(
    "mesh", [Mesh(cp=2), *(pytest.param(m, marks=pytest.mark.slow) for m in COMBINED)], ids=str
)
def test_in_the_simulated_mesh(mesh: Mesh):
    check(mesh, "simulated")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", COMBINED, ids=str)
def test_on_four_ranks(mesh: Mesh):
    check(mesh, remat="layer")


def test_a_rank_without_images_issues_the_same_collectives():
    """The second half of the rows is text.

    Recomputed layers, the tower's among them, are gathered twice.
    """
    found = {}
    for remat in ("none", "layer"):
        found[remat] = check(Mesh(fsdp=2), remat=remat)
        first, second = (
            [(e.what, e.kind, e.axes) for e in rank.events] for rank in found[remat].ranks
        )
        assert first == second
    more = found["layer"].counts["all_gather"] - found["none"].counts["all_gather"]
    layers = CFG.num_layers + cases.TOWER.num_layers
    assert more >= layers


@pytest.mark.parametrize("module", [vision, projector], ids=["tower", "projector"])
def test_a_missing_pvary_is_found(module: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "pvary", lambda x, axes: x)
    with pytest.raises(ValueError, match="varies over"):
        check(Mesh(tp=2))


def test_features_that_stay_on_their_rank_are_found(monkeypatch: pytest.MonkeyPatch):
    """An image's placeholders may be on another rank than its patches."""
    monkeypatch.setattr(
        projector, "all_gather", lambda x, axes, dim: x.repeat_interleave(2, dim) if axes else x
    )
    with pytest.raises((ValueError, AssertionError)):
        check(Mesh(cp=2))
