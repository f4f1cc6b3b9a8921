"""Runs that train adapters of a base: from a run, from a checkpoint in K3's names, on a mesh, again
and merged.
"""

import dataclasses
import shutil

import pytest
import torch

from k31fn import config, hf, lora, model, sample, trainer, tree
from k31fn.hf.__main__ import main as hf_main
from k31fn.layers import latent_moe
from k31fn.parallel import Mesh
from k31fn.testing import assert_close_trees
from k31fn.trainer import folder
from k31fn.trainer.adapter_base import fingerprint
from k31fn.trainer.init_source import settled_base, with_base
from tests import small
from tests.trainer import meshes, runs

pytestmark = pytest.mark.usefixtures("unchecked")

CPU = torch.device("cpu")
ADAMW = config.Optimizer(kind="adamw", peak_lr=0.02, warmup_steps=0)


def recipe(text, **changes):
    """With experts that MXFP4 can hold, and sizes that two ranks divide."""
    base = meshes.recipe(text)
    moe = latent_moe.Config(
        16, latent_size=32, expert_size=64, shared_size=64, num_experts=4, top_k=2
    )
    return dataclasses.replace(base, model=small.replace(base.model, moe=moe), **changes)


@pytest.fixture(scope="module")
def base(text, tmp_path_factory):
    """A run of 2 steps, as a folder of runs."""
    folder = tmp_path_factory.mktemp("base")
    made = runs.write_config(folder / "base.py", recipe(text, steps=2))
    assert trainer.main([made, "--runs", str(folder / "runs")]) == 0
    return folder / "runs" / "small"


@pytest.fixture(scope="module")
def adapters(text, base, tmp_path_factory):
    """A run of 4 steps on it, checkpoints after 2 and 4."""
    folder = tmp_path_factory.mktemp("adapters")
    adapted = lora.Config(base=str(base), rank=2, alpha=4.0, held="mxfp4")
    made = recipe(text, steps=4, checkpoint_every=2, lora=adapted, optimizer=ADAMW)
    assert trainer.main([runs.write_config(folder / "a.py", made), "--runs", str(folder)]) == 0
    return runs.only_run(folder)


@pytest.mark.slow
def test_a_checkpoint_has_the_adapters_alone(adapters):
    held = runs.saved(adapters, 4)
    params = {name for name in held if name.startswith("params.")}
    assert params
    assert all(name.endswith((".a", ".b")) for name in params)
    moments = {name.split(".", 2)[2] for name in held if name.startswith("opt_state.mu.")}
    assert moments == {name.removeprefix("params.") for name in params}
    before = runs.saved(adapters, 2)
    assert all(held[name] != before[name] for name in params), "each was trained"
    assert held["balance.bias"] == before["balance.bias"], "the routers' biases are the base's"


def test_a_checkpoint_of_adapters_is_not_of_a_run_without():
    trainer.check_base(runs.recipe("text"), "")
    with pytest.raises(ValueError, match="the checkpoint is of adapters, and the run's config"):
        trainer.check_base(runs.recipe("text"), "0a1b")


@pytest.mark.slow
def test_it_goes_on_bit_for_bit_and_not_on_another_base(adapters, base, tmp_path, capsys):
    again = tmp_path / "small" / "again"
    shutil.copytree(adapters, again)
    shutil.rmtree(again / "checkpoints" / "4")
    assert trainer.main([str(again / "config.json")]) == 0
    assert runs.saved(again, 4) == runs.saved(adapters, 4)
    shutil.rmtree(again / "checkpoints" / "4")
    file = next(
        p for p in (runs.only_run(base.parent) / "checkpoints" / "2").rglob("*") if p.is_file()
    )
    content = file.read_bytes()
    file.write_bytes(content + b" ")
    try:
        assert trainer.main([str(again / "config.json")]) == 1
        with pytest.raises(ValueError, match="has changed since the checkpoint"):
            sample.load(adapters, where=CPU)
    finally:
        file.write_bytes(content)
    assert (
        "has changed since the checkpoint, whose adapters are for another"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_the_base_is_the_checkpoint_of_the_first_start(adapters, base, tmp_path, capsys):
    """Written down; a newer run in the folder changes nothing, and that it is gone is said before
    anything starts.
    """
    pinned = runs.only_run(base.parent) / "checkpoints" / "2"
    made = folder.recipe_of(adapters)
    assert made.lora.base == str(pinned)
    again = shutil.copytree(adapters, tmp_path / "small" / "20260101-000000")
    shutil.rmtree(again / "checkpoints" / "4")
    of_folder = runs.write_config(tmp_path / "a.py", with_base(made, str(base)))
    newer = shutil.copytree(runs.only_run(base.parent), base / "29991231-000000")
    try:
        assert trainer.main([of_folder, "--runs", str(tmp_path), "--resume", "auto"]) == 0
    finally:
        shutil.rmtree(newer)
    assert runs.saved(again, 4) == runs.saved(adapters, 4)
    pinned.rename(pinned.with_name("away"))
    try:
        assert trainer.main([str(again / "config.json")]) == 2
    finally:
        pinned.with_name("away").rename(pinned)
    assert f"lora.base={str(pinned)!r} is gone" in capsys.readouterr().err


def test_the_run_of_a_checkpoint_in_the_given_folder(text, tmp_path):
    """It goes on with a config file that names the folder; not with one that names another."""
    made = recipe(
        text, lora=lora.Config(base=str(tmp_path / "runs" / "a" / "checkpoints" / "2"), rank=2)
    )
    run = folder.new(tmp_path, made)
    for base in (
        tmp_path / "runs",
        tmp_path / "runs" / "a",
        tmp_path / "runs" / "a" / "checkpoints" / "2",
    ):
        assert folder.open_existing(run, with_base(made, str(base))) == run
    for base in (tmp_path / "runs" / "b", tmp_path / "runs" / "a" / "checkpoints" / "3"):
        with pytest.raises(ValueError, match=r"lora.base is '.*2' there"):
            folder.open_existing(run, with_base(made, str(base)))
    with pytest.raises(ValueError, match=r"is gone, whose adapters .* trains; put it back"):
        settled_base(made, run)
    assert settled_base(recipe(text)) == ""


@pytest.mark.slow
def test_the_base_is_as_it_was(adapters, base):
    """The trained model without its adapters is the base, its experts rounded to MXFP4, bit for
    bit.
    """
    made, trained, _ = sample.load(adapters, where=CPU)
    _, dense, _ = sample.load(runs.only_run(base.parent), where=CPU)
    by_path = dict(tree.flatten_with_paths(dense))
    untrained = lora.init(
        trainer.trained_specs(made), torch.zeros(2, dtype=torch.int64), lambda p, t: by_path[p][t]
    )
    own = dict(tree.flatten_with_paths(trained))
    kept = [
        path
        for path, spec in tree.flatten_with_paths(trainer.trained_specs(made))
        if "frozen" in spec.tags
    ]
    for path, value in tree.flatten_with_paths(untrained):
        if path in kept:
            assert torch.equal(own[path], value.to(own[path].dtype)), path
    assert any(
        path.endswith("experts.w_up.base.codes") and own[path].dtype == torch.uint8 for path in kept
    )


@pytest.mark.slow
def test_merged_export_is_the_model_with_adapters(adapters, tmp_path):
    assert hf_main(["export", str(adapters), str(tmp_path / "merged"), "--dtype", "float32"]) == 0
    made, trained, balance = sample.load(adapters, where=CPU)
    dense, biases = hf.load(tmp_path / "merged", made.model, dtype=torch.float32)
    tokens = torch.arange(48).view(2, 24) % 250
    outs = [
        model.logits(p, model.apply(p, tokens, made.model, balance=b).hidden)
        for p, b in ((trained, balance), (dense, biases))
    ]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-3)
    own = dict(tree.flatten_with_paths(trained))
    without = tree.map_with_path(lambda path, x: 0 * x if path.endswith(".b") else x, trained)
    moved = model.logits(without, model.apply(without, tokens, made.model, balance=balance).hidden)
    assert float((outs[0] - moved).abs().max()) > 0.01, "adapters matter"
    assert own["layers.1.ffn.experts.w_up.b"].shape == (4, 2, 64)


@pytest.mark.slow
def test_a_checkpoint_as_the_base(adapters, text, tmp_path):
    """What a rank reads by tiles is what the whole file gives; experts are already MXFP4 in it."""
    assert hf_main(["export", str(adapters), str(tmp_path / "k3"), "--quantise"]) == 0
    made = recipe(text, lora=lora.Config(base=str(tmp_path / "k3"), rank=2, held="mxfp4"))
    state = trainer.init_state(trainer.lay_out(made), CPU)
    dense, biases = hf.load(tmp_path / "k3", made.model)
    expected = dict(tree.flatten_with_paths(dense))
    for path, value in tree.flatten_with_paths(lora.merge(state.params, torch.bfloat16)):
        assert torch.equal(value.float(), expected[path].float()), path
    assert torch.equal(state.balance.bias, biases.bias)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "held"),
    [
        (Mesh(fsdp=2, ep=2), "mxfp4"),
        (Mesh(tp=2), "fp8"),
        (Mesh(pp=2), "mxfp4"),
        (Mesh(fsdp=2), "fp8"),
        (Mesh(tp=2, ep=2), "mxfp4"),
    ],
    ids=str,
)
def test_three_steps_on_a_mesh(text, mesh, held):
    """Equal codes and adapters before, equal adapters and losses after; with all adapters moved."""
    made = recipe(
        text, lora=lora.Config(rank=2, held=held), compute="float64", optimizer=ADAMW, remat="layer"
    )
    expected = meshes.on_one_device(made, 3)
    metrics, states, whole = meshes.on_threads(dataclasses.replace(made, mesh=mesh), 3)
    torch.testing.assert_close(metrics[0], expected[0], rtol=1e-9, atol=1e-11)
    assert_close_trees(whole, expected[1], rtol=1e-8, atol=1e-10)
    pairs = list(meshes.replicas(dataclasses.replace(made, mesh=mesh), states))
    assert [path for path, a, b in pairs if not torch.equal(a, b)] == []
    assert all(
        bool(x.any()) for path, x in tree.flatten_with_paths(whole.params) if path.endswith(".b")
    )


def test_a_byte_in_the_middle_of_a_base_is_seen(text, tmp_path):
    """Of a small file all is read, of a large one (here of holes) its ends and pieces between."""
    adapted = recipe(text, lora=lora.Config(pattern="attn", rank=2, base=str(tmp_path)))
    for size, places in ((5_000_000, (2_500_000, 4_999_999)), (2**28, (0, 2**28 - 1))):
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(size)
        seen = {fingerprint(adapted)}
        for place in places:
            with (tmp_path / "model.safetensors").open("r+b") as file:
                file.seek(place)
                file.write(b"x")
            seen.add(fingerprint(adapted))
        assert len(seen) == 1 + len(places)


def test_what_a_recipe_refuses(text):
    with pytest.raises(ValueError, match=r"adapters are all that is trained; set trainable='all'"):
        recipe(text, lora=lora.Config(), trainable="indexer")
    with pytest.raises(ValueError, match=r"the model that is adapted is lora.base"):
        recipe(text, lora=lora.Config(), init="runs/x")
    with pytest.raises(ValueError, match=r"lora.base='nowhere' is no folder"):
        trainer.init_state(trainer.lay_out(recipe(text, lora=lora.Config(base="nowhere"))), CPU)
