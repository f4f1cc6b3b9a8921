"""Services that a recipe names: checked before the run begins, given its metrics, and not part of
what a run is.
"""

import dataclasses
import sys
import types

import pytest

from k31fn import trainer
from tests.trainer import runs

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def config(text, tmp_path):
    made = dataclasses.replace(runs.recipe(text), steps=2, heldout_bytes=50)
    return runs.write_config(tmp_path / "small.py", made)


def test_a_missing_package_ends_the_call_before_anything_is_written(
    config, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "trackio", None)
    assert trainer.main([config, "--runs", str(tmp_path / "runs"), "--trackers", "trackio"]) == 2
    assert "pip install trackio, or leave 'trackio' out of trackers" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_run_gives_its_metrics_and_goes_on_without_the_service(config, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer.run.plot, "save_loss_plot", lambda folder: None)
    begun, logged = [], []
    package = types.ModuleType("wandb")
    package.init = lambda **options: begun.append(options) or package
    package.log = lambda numbers, step: logged.append((step, numbers))
    package.finish = lambda: logged.append("end")
    monkeypatch.setitem(sys.modules, "wandb", package)
    arguments = [config, "--runs", str(tmp_path / "runs")]
    assert trainer.main([*arguments, "--trackers", "wandb"]) == 0
    run = runs.only_run(tmp_path / "runs")
    assert (begun[0]["project"], begun[0]["name"], begun[0]["config"]["steps"]) == (
        "small",
        run.name,
        2,
    )
    assert logged[-1] == "end"
    losses = [
        (step, numbers["train/loss"]) for step, numbers in logged[:-1] if "train/loss" in numbers
    ]
    assert losses == [(r["step"], r["train/loss"]) for r in runs.records(run) if "train/loss" in r]
    assert trainer.main([*arguments, "--resume", str(run)]) == 0  # all steps are done
    assert len(begun) == 1
