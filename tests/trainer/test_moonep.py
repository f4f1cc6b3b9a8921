"""Training with MoonEP: plain EP's curve, the mean number of rows, and the end of a run whose plan
does not fit.
"""

import dataclasses

import pytest
import torch

from k31fn import config, trainer, tree
from k31fn.config.mesh_checks import check_mesh, check_placement
from k31fn.layers import latent_moe, routed
from k31fn.parallel import Mesh, each_rank
from k31fn.testing import assert_close_trees
from k31fn.trainer.log import PlanError
from k31fn.trainer.part_metrics import MetricLabels
from tests import small
from tests.trainer import meshes, runs
from tests.trainer.test_log import log, numbers, shown, written  # noqa: F401

pytestmark = pytest.mark.usefixtures("unchecked")

ADAMW = config.Optimizer(kind="adamw", peak_lr=0.01, warmup_steps=0)
MESH = Mesh(fsdp=2, ep=2)


@pytest.fixture(scope="module")
def recipe(text):
    return meshes.recipe(text, compute="float64", optimizer=ADAMW)


def with_experts(recipe, mesh=MESH, **changes):
    moe = dataclasses.replace(recipe.model.sublayers["moe"], **changes)
    return dataclasses.replace(recipe, mesh=mesh, model=small.replace(recipe.model, moe=moe))


@pytest.fixture
def skewed(monkeypatch):
    """All tokens choose the first experts, of the first rank; returns the rows that each layer of a
    rank computes.
    """
    rows = []
    apply, compute = latent_moe.router.apply, routed.compute

    def route(params, x, cfg, *, bias, **how):
        first = torch.arange(cfg.num_experts) < cfg.top_k
        return apply(params, x, cfg, bias=bias + 9.0 * first, **how)

    def count(params, fetching, moving, weights, assignment, axis, **how):
        rows.append(int(assignment.exchange.sizes.sum()))
        return compute(params, fetching, moving, weights, assignment, axis, **how)

    monkeypatch.setattr(latent_moe.router, "apply", route)
    monkeypatch.setattr(routed, "compute", count)
    return rows


def test_a_skewed_router_has_plain_eps_curve_and_equal_rows(recipe, skewed):
    made = {}
    computed = {}
    for placement in ("plain", "moonep"):
        skewed.clear()
        changed = with_experts(recipe, placement=placement, balanced=False)
        numbers, _, state = meshes.on_threads(changed, 2)
        made[placement] = (numbers[0][:, 0], state.params)  # losses
        most = numbers[0][:, trainer.Metrics._fields.index("replicas")]
        assert most.tolist() == [float(placement == "moonep")] * 2
        computed[placement] = set(skewed)
    assert_close_trees(made["moonep"], made["plain"], rtol=1e-9, atol=1e-10)
    # 2 rows of 24 tokens, 2 experts each
    tokens = recipe.batch_size // 2 * recipe.length
    mean = tokens * recipe.model.sublayers["moe"].top_k
    assert computed == {"plain": {0, 2 * mean}, "moonep": {mean}}


def test_a_plan_that_does_not_fit_changes_nothing_and_says_where(recipe, skewed, monkeypatch):
    """Slots for a part of the experts that a rank needs; its number is in no config, which would be
    refused.
    """
    monkeypatch.setattr(latent_moe.Config, "num_slots", lambda cfg, ranks: 1)
    moe = {"placement": "moonep", "num_experts": 16, "top_k": 8}
    changed = with_experts(recipe, balanced=False, **moe)

    def go(axes):
        layout = trainer.lay_out(changed, axes)
        first = trainer.init_state(layout, meshes.CPU)
        metrics, state = meshes.steps(axes, changed, 1)
        scalars = metrics[0][: len(trainer.Metrics._fields) - 1]
        return trainer.Metrics(*scalars), first, state

    for metrics, first, state in each_rank(go, MESH, lambda _: ()):
        assert metrics.skipped == 1
        assert metrics.non_finite == 0
        assert int(metrics.violation) == 1 + 2 * 1 + 1  # layer 1, rank 1, which lacks slots
        same = tree.map(torch.equal, first.params, state.params)
        assert all(tree.leaves(same))


def test_the_log_ends_the_run(log, tmp_path, shown):  # noqa: F811
    labels = MetricLabels(ranks=4)
    bad = numbers(3.0, skipped=1.0, violation=1.0 + 4 * 5 + 2)
    log.push(7, bad, 0.1, 100, labels)
    with pytest.raises(PlanError, match=r"step 7 changed nothing: .* of layer 5 breaks .* rank 2"):
        log.flush()
    assert "step 7 skipped (1 so far): MoonEP's plan of layer 5" in shown.getvalue()
    assert written(tmp_path)[0]["skipped"] == 1


def test_what_is_refused_before_work(recipe, tmp_path, capsys):
    sizes = {"batch_size": 4, "micro_batches": 1, "length": 24}

    def check(mesh, **changes):
        cfg = with_experts(recipe, mesh=Mesh(), **changes).model
        check_mesh(mesh, cfg, **sizes)
        check_placement(mesh, cfg)

    check(MESH, placement="moonep")
    with pytest.raises(ValueError, match=r"mesh.ep=1 with model.moe.placement='moonep': one rank"):
        check(Mesh(fsdp=2), placement="moonep")
    with pytest.raises(ValueError, match=r"mesh.ep=2 does not divide .*moe.num_experts=7"):
        check(MESH, placement="moonep", num_experts=7)
    # 8 experts of the first rank have all rows: 4 of them fill the second one
    check(MESH, placement="moonep", num_experts=16, top_k=8, slots=4)
    with pytest.raises(ValueError, match=r"moe.slots=3 on mesh.ep=2: a rank needs 4 when all"):
        check(MESH, placement="moonep", num_experts=16, top_k=8, slots=3)

    # A recipe with MoonEP and no mesh is one: the command line gives the mesh.
    file = runs.write_config(
        tmp_path / "moonep.py", with_experts(recipe, Mesh(), placement="moonep")
    )
    assert trainer.main([file, "--steps", "1"]) == 2
    assert "mesh.ep=1 with model.moe.placement='moonep'" in capsys.readouterr().err
