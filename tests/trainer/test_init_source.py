"""Starting from the parameters of another run."""

import dataclasses
import re

import pytest
import torch

from k31fn import lora, trainer, tree
from k31fn.checkpoint import Checkpointer, checkpointer
from k31fn.parallel import Mesh, each_rank
from k31fn.trainer import folder
from k31fn.trainer.init_source import _find_source, check_start, start_from
from k31fn.trainer.ranks.agreement import Ranks
from tests import small
from tests.checkpoint.direct import Direct
from tests.trainer import meshes, runs

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("unchecked", "direct")


def save_run(root, recipe, steps=(3, 5)):
    """A run folder; the parameters at each of its steps are the initial ones plus the step."""
    run = folder.new(root, recipe)
    with Checkpointer(run / "checkpoints", keep=9) as checkpoints:
        for step in steps:
            checkpoints.save(step, shifted(trainer.init_state(trainer.lay_out(recipe), CPU), step))
    return run


def shifted(state, by):
    return dataclasses.replace(
        state,
        params=tree.map(lambda x: x + by, state.params),
        balance=tree.map(lambda x: x + by, state.balance),
    )


@pytest.fixture(scope="module")
def recipe(text):
    return meshes.recipe(text, seed=7)


@pytest.fixture(scope="module")
def source(recipe, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer, "WriterSession", Direct)
        return save_run(tmp_path_factory.mktemp("runs"), recipe)


def begin(path, recipe, axes=None):
    ranks = Ranks(axes)
    layout = trainer.lay_out(recipe, ranks.axes)
    return start_from(path, layout, trainer.init_state(layout, CPU), ranks, CPU)


@pytest.mark.parametrize(
    ("part", "step"), [("", 5), pytest.param("checkpoints/3", 3, marks=pytest.mark.slow)]
)
def test_the_parameters_and_biases_of_a_checkpoint(recipe, source, part, step):
    mine = dataclasses.replace(
        recipe, seed=1, optimizer=dataclasses.replace(recipe.optimizer, kind="adamw")
    )
    state, there = (
        begin(source / part, mine),
        shifted(trainer.init_state(trainer.lay_out(recipe), CPU), step),
    )
    for name in ("params", "balance"):
        pairs = zip(
            tree.leaves(getattr(state, name)), tree.leaves(getattr(there, name)), strict=True
        )
        assert all(torch.equal(a, b) for a, b in pairs)
    fresh = trainer.init_state(trainer.lay_out(mine), CPU)
    rest = [(getattr(state, n), getattr(fresh, n)) for n in ("step", "opt_state", "key")]
    assert all(
        torch.equal(a, b)
        for x, y in rest
        for a, b in zip(tree.leaves(x), tree.leaves(y), strict=True)
    )


@pytest.mark.parametrize(
    "mesh", [Mesh(fsdp=2), pytest.param(Mesh(pp=2), marks=pytest.mark.slow)], ids=str
)
def test_on_a_mesh_each_rank_has_its_part(recipe, source, mesh):
    made = dataclasses.replace(recipe, seed=1, mesh=mesh, micro_batches=2)

    def go(axes):
        return meshes.whole_state(axes, made, begin(source, made, axes))

    whole = each_rank(go, mesh, lambda _: ())[0]
    there = shifted(trainer.init_state(trainer.lay_out(recipe), CPU), 5)
    for name in ("params", "balance"):
        pairs = zip(
            tree.leaves(getattr(whole, name)), tree.leaves(getattr(there, name)), strict=True
        )
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.slow
def test_gated_mla_becomes_gated_dsa(recipe, tmp_path):
    """The trunk is the source's, the indexers are drawn."""
    full = recipe.model.sublayers["full_attention"]
    mla = dataclasses.replace(recipe, model=small.replace(recipe.model, full_attention=full.attn))
    run = save_run(tmp_path, mla, steps=(2,))
    state, drawn = begin(run, recipe), trainer.init_state(trainer.lay_out(recipe), CPU)
    there = dict(tree.flatten_with_paths(trainer.init_state(trainer.lay_out(mla), CPU).params))
    for (path, a), b in zip(
        tree.flatten_with_paths(state.params), tree.leaves(drawn.params), strict=True
    ):
        expected = b if ".indexer." in path else there[path.replace("attn.attn.", "attn.")] + 2
        assert torch.equal(a, expected), path


def test_what_is_refused(recipe, source, tmp_path):
    moe = dataclasses.replace(recipe.model.sublayers["moe"], expert_size=8)
    with pytest.raises(
        ValueError, match=r"is of another model: params.layers.1.ffn.experts.\w+ has shape"
    ):
        begin(source, dataclasses.replace(recipe, model=small.replace(recipe.model, moe=moe)))
    with pytest.raises(ValueError, match=r"balance.bias has shape \[1, 8\], here \[2, 8\]"):
        begin(
            source,
            dataclasses.replace(recipe, model=small.replace(recipe.model, num_layers=3)),
        )
    with pytest.raises(ValueError, match=r"complete checkpoints of .*: \[3, 5\]"):
        _find_source(source / "checkpoints" / "4")
    with pytest.raises(
        ValueError, match=r"init='.*': .* is neither a run folder nor a folder of runs"
    ):
        _find_source(tmp_path)
    assert _find_source(source.parent).step == 5


def test_what_a_run_starts_from_is_checked_before_it_has_a_folder(recipe, source, tmp_path, capsys):
    """A base and a source that are there pass; each wrong one is refused by its field, and nothing
    is written.
    """
    adapted = lora.Config(base=str(source / "checkpoints" / "3"), rank=2)
    check_start(dataclasses.replace(recipe, init=str(source)))
    check_start(dataclasses.replace(recipe, lora=adapted))
    of_adapters = folder.new(tmp_path, dataclasses.replace(recipe, lora=adapted))
    with Checkpointer(of_adapters / "checkpoints") as checkpoints:
        checkpoints.save(1, {"x": torch.zeros(1)})
    other = small.replace(recipe.model, num_layers=3)
    for changes, wrong in (
        ({"init": str(tmp_path / "none")}, r"init='.*none': .* is neither a run folder"),
        ({"init": str(of_adapters)}, "init='.*' is a run of adapters, .* merge it first"),
        ({"init": str(source), "model": other}, "init='.*' is of another model"),
        (
            {"lora": dataclasses.replace(adapted, base=str(tmp_path / "none"))},
            "lora.base='.*none' is no folder",
        ),
        (
            {"lora": dataclasses.replace(adapted, base=str(of_adapters))},
            "lora.base='.*' is a run of adapters itself",
        ),
        (
            {"lora": dataclasses.replace(adapted, pattern="zzz")},
            "lora.pattern='zzz' matches no matrix",
        ),
        ({"lora": adapted, "model": other}, "lora.base='.*' is a run of another model"),
    ):
        config = runs.write_config(tmp_path / "wrong.py", dataclasses.replace(recipe, **changes))
        assert trainer.main([config, "--runs", str(tmp_path / "runs")]) == 2
        assert re.search(wrong, capsys.readouterr().err), wrong
    assert not (tmp_path / "runs").exists()
