"""The command line: a checkpoint becomes a run, which trains on, and a run becomes a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from k31fn import balance, config, data, hf, metrics, model, params, random, sample, trainer, tree
from k31fn.checkpoint.checkpointer import Checkpointer
from k31fn.checkpoint.errors import CheckpointError
from k31fn.hf.__main__ import main
from k31fn.layers import projector, vision, vision_block
from tests import small
from tests.trainer import runs

CONFIGS = Path(__file__).parents[2] / "configs"
TOWER = vision.Config(vision_block.Config(16, 2, 8, 24), 2, table_size=(3, 5))
CFG = dataclasses.replace(
    config.load(CONFIGS / "tiny.py"),
    vision=TOWER,
    projector=projector.Config(TOWER.output_size, 128),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and biases, in bfloat16 with float32 islands."""
    folder = tmp_path_factory.mktemp("hf") / "given"
    bias = random.normal(random.key(2), (3, CFG.sublayers["moe"].num_experts))
    hf.export(
        params.init(model.specs(CFG), random.key(1)),
        balance.State(bias, model.moe_layers(CFG)),
        CFG,
        folder,
    )
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A recipe of a model of text, which an import replaces."""
    text = data.Config(path=str(runs.write_text(tmp_path / "text")))
    sizes = {"steps": 2, "batch_size": 2, "length": 32, "eval_bytes": 50, "heldout_bytes": 50}
    made = config.Recipe(name="given", model=config.load(CONFIGS / "tiny.py"), data=text, **sizes)
    return runs.write_config(tmp_path / "recipe.py", made)


def same_files(a: Path, b: Path) -> None:
    assert sorted(p.name for p in a.iterdir()) == sorted(p.name for p in b.iterdir())
    for file in a.iterdir():
        assert file.read_bytes() == (b / file.name).read_bytes(), file.name


@pytest.fixture
def run(checkpoint: Path, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The vocabulary of 264 rows is padded for the 257 tokens of bytes, or is of other tokens."""
    assert main(["import", str(checkpoint), recipe, "--runs", str(tmp_path / "runs")]) == 0
    printed = capsys.readouterr()
    assert "train on: python train.py" in printed.out
    assert printed.err == (
        f"k31fn.hf: model.vocab_size=264 of {checkpoint} is more than the 257 tokens of "
        "data.tokenizer='bytes': it is padded, or the checkpoint is of another tokenizer; then set "
        f"data.tokenizer in {recipe} to its own\n"
    )
    return runs.only_run(tmp_path / "runs", "given")


@pytest.mark.slow
def test_there_and_back(
    checkpoint: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Bit for bit: the run has the weights in float32."""
    made, weights, state = sample.load(run, where=torch.device("cpu"))
    assert made.model == CFG
    given, biases = hf.load(checkpoint, CFG, dtype=torch.float32)
    tree.map(
        lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0),
        (weights, state),
        (given, biases),
    )
    assert main(["export", str(run.parent), str(tmp_path / "back")]) == 0
    same_files(checkpoint, tmp_path / "back")
    assert main(["export", str(run / "checkpoints" / "0"), str(tmp_path / "that")]) == 0
    same_files(checkpoint, tmp_path / "that")
    assert main(["export", str(run / "checkpoints" / "7"), str(tmp_path / "none")]) == 2
    assert "step=7 is not complete in" in capsys.readouterr().err


def test_a_folder_in_use_is_refused_before_the_model_is_read(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sample, "load", lambda *_, **__: pytest.fail("the model was read"))
    assert main(["export", str(run), str(run)]) == 2
    assert capsys.readouterr().err == f"k31fn.hf: {run} is not empty; use another directory\n"
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert main(["export", str(run), str(tmp_path / "a" / "b")]) == 2
    assert f"/a/b: {tmp_path} cannot be written; use" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(sample, "load", lambda *_, **__: pytest.fail("the model was read"))
    made = json.loads((run / "config.json").read_text())
    made["model"]["sublayers"]["moe"]["shared_size"] += 1
    (run / "config.json").write_text(json.dumps(made))
    assert main(["export", str(run), str(tmp_path / "a")]) == 2
    assert "cannot say: moe.shared_size=193, read back as 192" in capsys.readouterr().err


@pytest.mark.slow
def test_quantised(run: Path, tmp_path: Path):
    """A run from an MXFP4 checkpoint is written as the same one."""
    assert main(["export", str(run), str(tmp_path / "one"), "--quantise"]) == 0
    assert hf.verify(tmp_path / "one").num_quantised == 3 * 3 * CFG.sublayers["moe"].num_experts
    made = str(run / "config.json")
    assert main(["import", str(tmp_path / "one"), made, "--runs", str(tmp_path / "again")]) == 0
    assert (
        main(["export", str(tmp_path / "again" / "given"), str(tmp_path / "two"), "--quantise"])
        == 0
    )
    same_files(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_a_run_trains_on_from_it(checkpoint: Path, run: Path, capsys: pytest.CaptureFixture[str]):
    """Its first step starts from these weights, not from the recipe's: the loss is theirs."""
    made = config.load_recipe(run / "config.json")
    corpus = trainer.load_corpus(made)
    weights, biases = hf.load(checkpoint, CFG, dtype=torch.float32)
    (batch,) = trainer.make_batches(made, trainer.rows_at(corpus.dataset, 0), torch.device("cpu"))
    _, parts = model.loss(weights, batch, CFG, balance=biases)
    assert trainer.main([str(run / "config.json"), "--device", "cpu", "--threads", "1"]) == 0
    first, *_ = (r for r in metrics.read(run / "metrics.jsonl") if "train/loss" in r)
    assert first["step"] == 0
    assert first["train/loss"] == pytest.approx(float(parts.lm / batch.num_labels), rel=1e-6)
    assert "has changed" not in capsys.readouterr().out


def test_a_checkpoint_whose_vocabulary_is_smaller_than_the_tokenizers(
    checkpoint: Path,
    recipe: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Before the weights are read, and before there is a run that could not be trained."""
    made = config.load_recipe(recipe)
    made = dataclasses.replace(
        made, data=dataclasses.replace(made.data, tokenizer="bytes+media+chat")
    )
    other = runs.write_config(
        tmp_path / "other.py", dataclasses.replace(made, model=small.config(vocab_size=265))
    )
    monkeypatch.setattr(hf, "load", lambda *_, **__: pytest.fail("the weights were read"))
    assert main(["import", str(checkpoint), other, "--runs", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == (
        "k31fn.hf: model.vocab_size=264 is less than the tokenizer's 265; the checkpoint is of "
        f"another tokenizer: set data.tokenizer in {other} to its own\n"
    )
    assert not (tmp_path / "runs").exists()


def test_an_import_that_is_not_saved_leaves_no_run(
    checkpoint: Path,
    recipe: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Training on it would begin with weights of its own, without a word."""

    def full(self: Checkpointer, step: int, state: object) -> None:
        (self.directory / f"{step}.partial").mkdir(parents=True)
        raise CheckpointError("step 0 is not saved: No space left on device")

    monkeypatch.setattr(Checkpointer, "save", full)
    assert main(["import", str(checkpoint), recipe, "--runs", str(tmp_path / "runs")]) == 1
    assert "k31fn.hf: step 0 is not saved: No space" in capsys.readouterr().err
    assert not list((tmp_path / "runs").glob("*/*"))


def test_what_is_wrong_is_said(
    checkpoint: Path, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config_file = json.loads((checkpoint / "config.json").read_text())
    config_file["text_config"]["num_hidden_layers"] = 5
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_text(json.dumps(config_file))
    (bad / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    for call in (
        ["import", str(bad), recipe, "--runs", str(tmp_path / "runs")],
        ["export", str(tmp_path / "nothing"), str(tmp_path / "out")],
        ["import", str(tmp_path / "nothing"), recipe],
        ["verify", str(tmp_path / "nothing")],
    ):
        assert main(call) == 2
        assert capsys.readouterr().err.startswith("k31fn.hf: ")
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "out").exists()
