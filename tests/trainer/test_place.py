"""A run's folder that is renamed or removed while the run goes on."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from k31fn import trainer
from k31fn.checkpoint import Checkpointer
from k31fn.trainer import folder, run
from k31fn.trainer.place import Place
from tests.trainer import runs
from tests.trainer.test_run import during_step

pytestmark = pytest.mark.usefixtures("unchecked")
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="a folder is followed on Linux")


@pytest.fixture
def no_plot(monkeypatch):
    monkeypatch.setattr(run.plot, "save_loss_plot", lambda folder: None)


def test_a_folder_that_stays_has_not_moved(text, tmp_path):
    where = folder.new(tmp_path, runs.recipe(text))
    place = Place(where)
    assert place.moved() == ""
    place.close()
    place.close()


@ON_LINUX
def test_a_renamed_folder_is_followed(text, tmp_path):
    where = folder.new(tmp_path, runs.recipe(text))
    place = Place(where)
    where.rename(tmp_path / "kept")
    where.mkdir()  # another one of its name
    assert place.moved() == str(tmp_path / "kept")
    place.close()


def test_a_removed_folder_is_made_anew_with_its_config(text, tmp_path):
    where = folder.new(tmp_path, runs.recipe(text))
    written = (where / "config.json").read_text()
    place = Place(where)
    shutil.rmtree(tmp_path / "small")
    assert place.moved() == str(where)
    assert (where / "config.json").read_text() == written
    place.close()


def test_a_removed_config_is_written_again(text, tmp_path):
    """As a removal leaves it that met a file being written: the folder without its files."""
    where = folder.new(tmp_path, runs.recipe(text))
    written = (where / "config.json").read_text()
    place = Place(where)
    (where / "config.json").unlink()
    assert place.moved() == ""
    assert (where / "config.json").read_text() == written
    place.close()


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("when", ["made", "first state"])
def test_a_run_that_is_renamed_as_it_begins_makes_no_second_folder(
    text, tmp_path, monkeypatch, capsys, when
):
    new, init_state = folder.new, run.init_state

    def rename():
        runs.only_run(tmp_path / "runs").rename(tmp_path / "kept")

    def made(*args):
        where = new(*args)
        if when == "made":
            rename()
        return where

    def first_state(*args):
        rename()
        return init_state(*args)

    monkeypatch.setattr(folder, "new", made)
    if when == "first state":
        monkeypatch.setattr(run, "init_state", first_state)
    config = runs.write_config(tmp_path / "small.py", runs.recipe(text))
    assert trainer.main([config, "--runs", str(tmp_path / "runs"), "--device", "cpu"]) == 1
    line = {"made": "is not there any more", "first state": "No such file or directory"}[when]
    assert line in capsys.readouterr().err
    assert not list((tmp_path / "runs" / "small").iterdir())
    assert (tmp_path / "kept" / "config.json").is_file()


def change(where: list[Path], tmp_path: Path, what: str):
    def action():
        where.append(runs.only_run(tmp_path / "runs"))
        if what == "renamed":
            where[0].rename(tmp_path / "kept")
        else:
            shutil.rmtree(where[0])

    return action


@pytest.mark.slow
@ON_LINUX
@pytest.mark.usefixtures("no_plot", "direct")
@pytest.mark.parametrize("what", ["renamed", "removed"])
def test_the_newest_state_is_where_the_run_says_and_goes_on(
    text, tmp_path, monkeypatch, capsys, what
):
    """In step 4, after a checkpoint of 3: stopped, saved, and the run that goes on is the same."""
    config = runs.write_config(tmp_path / "small.py", runs.recipe(text))
    assert trainer.main([config, "--runs", str(tmp_path / "straight"), "--device", "cpu"]) == 0
    straight = runs.only_run(tmp_path / "straight")
    where: list[Path] = []
    with monkeypatch.context() as patch:
        during_step(patch, 4, change(where, tmp_path, what))
        assert trainer.main([config, "--runs", str(tmp_path / "runs"), "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    now = tmp_path / "kept" if what == "renamed" else where[0]
    steps = [line for line in out.splitlines() if line.endswith(f"steps goes to {now}")]
    assert len(steps) == 1
    assert f"{where[0]} is not there any more" in out
    assert "metrics.jsonl" in err
    with Checkpointer(now / "checkpoints", read_only=True) as checkpoints:
        newest = checkpoints.latest(on_damage=pytest.fail)
    assert newest in (5, 6)
    assert what == "removed" or not where[0].exists()  # no ghost of it
    assert trainer.main([str(now / "config.json"), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert runs.saved(now, 10) == runs.saved(straight, 10)
    assert "steps in the checkpoint" in said  # of those whose records had no place to go


@pytest.mark.usefixtures("no_plot", "direct")
def test_records_without_checkpoints_and_checkpoints_without_records_are_told(
    text, tmp_path, capsys
):
    config = runs.write_config(tmp_path / "small.py", runs.recipe(text, steps=6))
    assert trainer.main([config, "--runs", str(tmp_path / "runs"), "--device", "cpu"]) == 0
    where = runs.only_run(tmp_path / "runs")
    records = runs.records(where)
    again = [str(where / "config.json"), "--device", "cpu"]
    for emptied in (False, True):
        if emptied:
            (where / "metrics.jsonl").write_text("")
        else:
            (where / "metrics.jsonl").unlink()
        capsys.readouterr()
        assert trainer.main(again) == 0
        lacks = f"{where / 'metrics.jsonl'} lacks 6 of the 6 steps in the checkpoint"
        assert lacks in capsys.readouterr().out
    (where / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    shutil.rmtree(where / "checkpoints")
    assert trainer.main(again) == 0
    out = capsys.readouterr().out
    assert f"{where / 'metrics.jsonl'} has 6 steps, and there is no checkpoint of them" in out
    assert runs.records(where) == records  # the same run once more


def test_the_run_that_began_last_is_the_newest_in_any_zone(text, tmp_path, monkeypatch):
    """Begun in Tokyo, then in London, nine hours behind; then by a clock set back."""
    import time

    recipe = runs.recipe(text)
    made = []
    for zone in ("Asia/Tokyo", "UTC", "America/Los_Angeles"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        made.append(folder.new(tmp_path, recipe))
        assert folder.newest(tmp_path, recipe) == made[-1]
    monkeypatch.undo()
    time.tzset()
    ahead = tmp_path / "small" / "29991231-235959-4"  # by a clock that was ahead
    os.rename(made[0], ahead)
    for name in ("29991231-235959-5", "29991231-235959-6"):
        assert folder.new(tmp_path, recipe).name == name
    named = tmp_path / "small" / "3000-01-01"  # by hand
    os.rename(ahead, named)
    new = folder.new(tmp_path, recipe)
    assert folder.newest(tmp_path, recipe) == new
