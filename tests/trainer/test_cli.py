"""The command line: help that leads on, and one clear error for each mistake, before anything is
written.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from k31fn import trainer
from k31fn.config import Pipeline
from k31fn.parallel import Mesh
from k31fn.trainer import folder, run
from tests.trainer import runs

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def config(text, tmp_path):
    return runs.write_config(tmp_path / "configs" / "small.py", runs.recipe(text))


@pytest.fixture
def call(tmp_path, capsys):
    """Status and what was printed; checks that it is no traceback and that nothing was written."""

    def call(*args, status=2, writes=False):
        argv = [str(a) for a in args]
        try:
            got = trainer.main([*argv, "--runs", str(tmp_path / "runs")] if argv else [])
        except SystemExit as end:  # after --help
            got = end.code
        captured = capsys.readouterr()
        assert got == status, captured
        assert "Traceback" not in captured.err
        assert writes or not (tmp_path / "runs").exists()
        return captured.err if status else captured.out

    return call


class TestHelp:
    def test_without_a_config(self, call, capsys):
        assert call() == trainer.cli._USAGE
        assert trainer.main(["--help"]) == 0
        out = capsys.readouterr().out
        for words in (
            "configs/tiny.py --steps 300",
            "--resume auto",
            "config.json",
            "configs/tiny.py --help",
        ):
            assert words in out

    def test_with_a_config_it_lists_options_and_fields(self, call, config):
        out = call(config, "--help", status=0)
        for name in (
            "--resume",
            "--device",
            "--steps",
            "--optimizer.peak-lr",
            "--model.moe.num-experts",
            "--data.path",
        ):
            assert name in out
        assert "goes on with the newest run" in " ".join(out.replace("│", " ").split())
        assert "``" not in out

    def test_help_says_the_same_for_a_run(self, call, config, tmp_path, text):
        run = folder.new(tmp_path / "elsewhere", runs.recipe(text))
        assert "--optimizer.peak-lr" in call(run / "config.json", "--help", status=0)


class TestWrongCalls:
    def test_runs_of_nothing_and_of_home(self, call, config, tmp_path, monkeypatch, capsys):
        """A shell leaves ~ behind = as it is: not a folder of that name, but the home folder."""
        assert trainer.main([config, "--runs", ""]) == 2
        assert "runs='' names nothing; give a path" in capsys.readouterr().err
        monkeypatch.setenv("HOME", str(tmp_path / "file"))
        (tmp_path / "file").touch()
        assert trainer.main([config, "--runs=~/r"]) == 2
        assert f"run folder {tmp_path}/file/r/small cannot be made" in capsys.readouterr().err
        assert f"{tmp_path}/file/r is not a run folder" in call(config, "--resume=~/r")

    def test_the_config_comes_first(self, call, config):
        assert "the config comes first, then --steps" in call("--steps", 3, config)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("smal.py", r"does not exist; in its directory: small\.py; nearest: .*small\.py"),
            (
                "nowhere/tiny.py",
                r"does not exist; in its directory: none; nearest: configs/tiny\.py",
            ),
            ("", r"configs' is a folder; name a config in it|must be a Python file"),
            ("config.json", r"config file '.*config.json' does not exist"),
        ],
    )
    def test_unknown_config(self, call, config, monkeypatch, name, message):
        monkeypatch.chdir(runs.REPOSITORY)
        assert re.search(message, call(Path(config).parent / name))

    def test_a_bare_name(self, call, monkeypatch):
        monkeypatch.chdir(runs.REPOSITORY)
        assert "nearest: configs/tiny.py" in call("tiny")

    def test_a_config_without_a_recipe(self, call):
        assert "defines no train(); add" in call(runs.REPOSITORY / "configs" / "k3.py")

    def test_a_run_folder_instead_of_its_config(self, call, text, tmp_path):
        run = folder.new(tmp_path / "elsewhere", runs.recipe(text))
        assert f"is a run folder; its config is '{run}/config.json'" in call(run)

    @pytest.mark.parametrize(
        ("args", "nearest"),
        [
            (["--stepz", "3"], "--steps INT"),
            (["--lr", "3"], "--optimizer.peak-lr FLOAT"),
            (["--model.moe.num-expert", "8"], "--model.moe.num-experts INT"),
            (["--resum", "auto"], "--resume STR"),
        ],
    )
    def test_unknown_field(self, call, config, args, nearest):
        err = call(config, *args)
        assert "Unrecognized options" in err
        assert nearest in err

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--steps", "many"], "invalid literal for int"),
            (["--steps"], "Missing value for argument '--steps'"),
            (["--compute", "float16"], "invalid choice 'float16'"),
            (["--steps", "0"], "train.py: steps=0 must be at least 1"),
            (["--length", "1"], "train.py: length=1 must be at least 2"),
            (["--seed", "-1"], "train.py: seed=-1 must be in"),
            (["--name", "a/b"], "train.py: name='a/b' must be a folder name"),
            (
                ["--micro-batches", "3"],
                r"micro_batches=3 does not divide batch_size=4; use one of \[1, 2, 4\]",
            ),
            (["--optimizer.peak-lr", "nan"], "optimizer.peak_lr=nan must be positive"),
            (["--optimizer.beta2", "1"], r"optimizer.beta2=1.0 must be in \[0, 1\)"),
            (["--model.moe.top-k", "5"], r"top_k=5 must be in 1\.\.num_experts-1"),
            (
                ["--model.vocab-size", "256"],
                "model.vocab_size=256 is less than the tokenizer's 257",
            ),
            (["--device", "tpu"], "device='tpu' must be one of"),
            (["--device", "cpu:"], "device='cpu:' must be one of"),
            (["--threads", "-1"], "threads=-1 must be at least 0"),
            (["--resume", "/nowhere"], "/nowhere is not a run folder"),
            (
                ["--mesh.fsdp", "7", "--batch-size", "7"],
                "mesh.fsdp=7 splits 0.0% of the parameters: .* mesh.fsdp 4, 8",
            ),
            (["--heldout-bytes", "0"], "heldout_bytes=0 must be at least 1"),
        ],
    )
    def test_a_value_that_is_refused(self, call, config, args, message):
        assert re.search(message, call(config, *args))

    def test_fields_that_must_change_together_can(self, call, config, monkeypatch):
        """Checks wait for the whole."""
        seen = []
        monkeypatch.setattr(
            trainer.cli,
            "train",
            lambda recipe, *a, **k: seen.append(recipe) or run.Outcome(1, False, (), ()),
        )
        names = ("", "kda.", "full-attention.attn.", "full-attention.indexer.", "dense.", "moe.")
        widths = [x for n in names for x in (f"--model.{n}hidden-size", "32")]
        call(config, *widths, status=0, writes=True)
        assert seen[0].model.sublayers["moe"].hidden_size == 32


class TestCorpus:
    def test_empty(self, call, config, tmp_path):
        (tmp_path / "empty").mkdir()
        assert "is empty: no text in files with data.suffixes=" in call(
            config, "--data.path", tmp_path / "empty"
        )

    def test_missing(self, call, config):
        assert "data.path='/nowhere' does not exist" in call(config, "--data.path", "/nowhere")

    def test_not_text(self, call, config, tmp_path):
        (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": \xff}\n')
        assert "a.jsonl:2 is not JSON" in call(config, "--data.path", tmp_path / "a.jsonl")

    def test_a_pipe_and_a_path_of_nothing(self, call, config, tmp_path, monkeypatch):
        os.mkfifo(tmp_path / "pipe.txt")
        assert "pipe.txt': it is a named pipe, not a regular file" in call(
            config, "--data.path", tmp_path / "pipe.txt"
        )
        assert "data.path='' names nothing; give a path" in call(config, "--data.path", "")

    def test_unreadable(self, call, config, tmp_path):
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "x.txt").symlink_to(tmp_path / "gone")
        assert "cannot read" in call(config, "--data.path", tmp_path / "a")

    def test_a_single_document(self, call, config, tmp_path):
        (tmp_path / "one.txt").write_text("one")
        assert "none of the 1 documents is held out" in call(
            config, "--data.path", tmp_path / "one.txt"
        )


class TestRunFolders:
    def test_of_another_config(self, call, config, text, tmp_path):
        other = folder.new(tmp_path / "other", runs.recipe(text, steps=20, seed=1))
        err = call(config, "--resume", other)
        assert (
            "belongs to another config: steps is 20 there, 10 here; seed is 1 there, 0 here;" in err
        )
        assert list(other.iterdir()) == [other / "config.json"]

    def test_auto_of_another_config(self, call, config, text, tmp_path):
        folder.new(tmp_path / "runs", runs.recipe(text))
        assert "batch_size is 4 there, 8 here" in call(
            config, "--resume", "auto", "--batch-size", "8", writes=True
        )

    def test_a_run_with_changed_fields(self, call, text, tmp_path):
        run = folder.new(tmp_path / "other", runs.recipe(text))
        assert "steps is 10 there, 11 here" in call(run / "config.json", "--steps", "11")

    def test_the_config_of_a_run_goes_on_with_it_and_no_other(
        self, call, text, tmp_path, monkeypatch
    ):
        one, two = (folder.new(tmp_path / "other", runs.recipe(text)) for _ in range(2))
        seen = []
        monkeypatch.setattr(
            trainer.cli,
            "train",
            lambda r, c, where, **k: seen.append(where) or run.Outcome(1, False, (), ()),
        )
        for resume in ("", "auto", one):  # "auto" alone would mean the newest, which is the other
            call(one / "config.json", "--resume", resume, status=0)
        assert seen == [one] * 3
        assert f"resume='{two}': {one}/config.json goes on with its own run" in call(
            one / "config.json", "--resume", two
        )
        assert len(seen) == 3

    def test_a_place_where_none_can_be_made(self, config, tmp_path, capsys):
        (tmp_path / "file").touch()
        assert trainer.main([config, "--runs", str(tmp_path / "file")]) == 2
        assert capsys.readouterr().err == (
            f"train.py: run folder {tmp_path}/file/small cannot be made: Not a directory; give "
            "runs another place than "
            f"'{tmp_path}/file'\n"
        )

    def test_nothing_is_left_of_one_that_cannot_be_written(self, text, tmp_path, monkeypatch):
        def full(file, text):
            file.write_text("{")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(folder, "write", full)
        with pytest.raises(
            ValueError, match=r"small/\d+-\d+ cannot be made: No space left on device; "
        ):
            folder.new(tmp_path / "new" / "runs", runs.recipe(text))
        assert not list(tmp_path.iterdir())

    def test_another_mesh_is_the_same_run(self, text, tmp_path):
        recipe = dataclasses.replace(runs.recipe(text), batch_size=8)
        where = folder.new(tmp_path, dataclasses.replace(recipe, mesh=Mesh(fsdp=2)))
        other = dataclasses.replace(recipe, mesh=Mesh(dp=4), pipeline=Pipeline("zero_bubble"))
        assert folder.open_existing(where, other) == folder.newest(tmp_path, other) == where
        with pytest.raises(ValueError, match=r"another config: steps is 10 there, 11 here; "):
            folder.open_existing(where, dataclasses.replace(other, steps=11))

    def test_auto_without_a_run_starts_one(self, call, config, tmp_path, monkeypatch):
        seen = []
        monkeypatch.setattr(
            trainer.cli,
            "train",
            lambda r, c, where, **k: seen.append(where) or run.Outcome(1, False, (), ()),
        )
        call(config, "--resume", "auto", status=0, writes=True)
        call(config, "--resume", "auto", status=0, writes=True)
        assert seen[0] == seen[1] == runs.only_run(tmp_path / "runs")
        call(config, status=0, writes=True)
        assert seen[2] != seen[0]
        call(config, "--resume", "auto", status=0, writes=True)
        assert seen[3] == seen[2]

    def test_the_newest(self, text, tmp_path):
        """Eleven runs in one second, and one of an earlier day."""
        recipe = runs.recipe(text)
        made = [folder.new(tmp_path, recipe) for _ in range(11)]
        shutil.copytree(made[0], tmp_path / "small" / "20200101-000000-99")
        assert folder.newest(tmp_path, recipe) == made[-1]

    def test_a_config_that_is_not_one(self, call, text, tmp_path):
        where = folder.new(tmp_path / "other", runs.recipe(text))
        file = where / "config.json"
        written = json.loads(file.read_text())
        file.write_text("{")
        assert "is not JSON" in call(file)
        file.write_text(json.dumps({**written, "stepz": 3}))
        assert "stepz is not a field of recipe.Recipe; nearest: steps" in call(file)
        file.write_text(json.dumps({**written, "steps": -3}))
        assert "steps=-3 must be at least 1" in call(file)

    def test_config_json_round_trip_and_runs_no_code(self, config, text, tmp_path, monkeypatch):
        recipe = dataclasses.replace(
            runs.recipe(text), seed=2**63, compute="bfloat16", trainable="indexer"
        )
        where = folder.new(tmp_path, recipe)
        (where / "model.py").write_text("raise RuntimeError")
        monkeypatch.setattr("runpy.run_path", None)
        assert folder.recipe_of(where) == recipe
        assert folder.open_existing(where, recipe) == where


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "k31fn-test", str(where)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", str(where)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "file", "complete"),
    [
        (4096, "events", ""),  # room for config.json alone
        (8192, "metrics.jsonl", r"none"),
        # whichever writer meets it first
        (700_000, r"(checkpoints|events|metrics\.jsonl)", r"\[3(, 6)?\]"),
    ],
)
def test_a_full_disk(small_disk, tmp_path, capsys, monkeypatch, room, file, complete):
    monkeypatch.setattr(run.plot, "save_loss_plot", lambda folder: None)
    text = runs.write_text(tmp_path / "text")
    config = runs.write_config(tmp_path / "small.py", runs.recipe(text))
    filler = small_disk / "filler"
    filler.write_bytes(bytes(2**21 - room))
    assert trainer.main([config, "--runs", str(small_disk)]) == 1
    err = capsys.readouterr().err
    first, *others = err.splitlines()
    where = runs.only_run(small_disk)
    assert first.startswith("train.py: ")
    assert "No space left on device" in first
    assert re.search(f"{re.escape(str(where))}/{file}", first), first
    assert all(
        re.match(r"train.py: .*: step \d+ is not saved: No space left", line) for line in others
    ), others
    assert len(others) <= ("checkpoints" not in first)  # a save that fails again is not told again
    if complete:
        assert re.search(f"complete steps: {complete}", err)
    filler.unlink()
    (text / "more.txt").write_text("x = 3")
    assert trainer.main([str(where / "config.json")]) == 0  # with room again
    changed = f"the text of data.path={str(text)!r} has changed since the checkpoint"
    assert (changed in capsys.readouterr().out) == (complete.startswith("\\["))
    assert [r["step"] for r in runs.records(where) if "train/loss" in r] == list(range(10))
