"""Runs from end to end through the command line's ``main``: ends of every kind, and going on bit
for bit.
"""

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from k31fn import data, model, trainer
from k31fn.checkpoint import CheckpointError
from k31fn.trainer import run
from k31fn.trainer.ranks import stop
from tests.trainer import runs

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="session")
def config(text, tmp_path_factory):
    """A config file; a run of it makes 10 steps, of two micro-batches each."""
    recipe = runs.recipe(text, micro_batches=2)
    return runs.write_config(tmp_path_factory.mktemp("config") / "small.py", recipe)


@pytest.fixture(scope="module")
def straight(config, tmp_path_factory):
    """A run of 10 steps that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight")
    assert trainer.main([config, "--runs", str(folder)]) == 0
    return runs.only_run(folder)


@pytest.fixture
def no_plot(monkeypatch):
    monkeypatch.setattr(run.plot, "save_loss_plot", lambda folder: None)


def during_step(monkeypatch, step, action):
    """Calls ``action`` when the rows of a step are read."""
    read = data.Dataset.batch_at

    def batch_at(self, number, **share):
        if number == step:
            action()
        return read(self, number, **share)

    monkeypatch.setattr(data.Dataset, "batch_at", batch_at)


def during_evaluation(monkeypatch, done, action):
    score = run.heldout_loss

    def scored(recipe, state, *args, **kwargs):
        if int(state.step) == done:
            action()
        return score(recipe, state, *args, **kwargs)

    monkeypatch.setattr(run, "heldout_loss", scored)


def same_run(a, b):
    assert runs.saved(a, 10) == runs.saved(b, 10)
    assert runs.records(a) == runs.records(b)
    return True


def test_what_a_run_leaves(straight):
    assert {p.name for p in straight.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "loss.png",
        "checkpoints",
        "events",
    }
    records = runs.records(straight)
    steps = [r for r in records if "train/loss" in r]
    assert [r["step"] for r in steps] == list(range(10))
    names = {
        "step",
        "train/loss",
        "train/indexer_kl",
        "grad_norm",
        "lr",
        "moe/load_max_over_mean",
        "skipped",
    }
    assert all(names <= set(r) and "moe/load/1" in r and "grad_norm/indexer" in r for r in steps)
    assert [r["step"] for r in records if "heldout/loss" in r] == [3, 7, 9]
    assert records[-1].keys() == {"step", "heldout/ngram4_loss"}
    assert steps[-1]["train/loss"] < steps[0]["train/loss"] - 1
    assert [s for s in (3, 6, 9, 10) if runs.saved(straight, s)] == [3, 6, 9, 10]
    assert any(p.name.startswith("events.out.tfevents") for p in (straight / "events").iterdir())


def test_the_balance_is_saved(straight):
    """Case D24: the biases of the step, not the initial zeros."""
    zeros = runs.saved_digest(torch.zeros(1, 5))
    after3, after6 = (runs.saved(straight, s, "balance")["balance.bias"] for s in (3, 6))
    assert len({zeros, after3, after6}) == 3


@pytest.mark.usefixtures("no_plot")
@pytest.mark.slow
def test_ended_by_signals_it_goes_on_by_the_printed_command(
    config, straight, tmp_path, monkeypatch, capsys
):
    """In a step, in one after which a checkpoint is due, and in evaluations, which are then made
    again.
    """
    arguments = [config, "--runs", str(tmp_path)]
    done = 0
    for number, when, at, then in [
        (signal.SIGTERM, during_step, 4, 5),
        (signal.SIGINT, during_step, 5, 6),
        (signal.SIGINT, during_evaluation, 8, 8),
        (signal.SIGTERM, during_evaluation, 10, 10),
    ]:
        with monkeypatch.context() as patch:
            when(patch, at, lambda number=number: os.kill(os.getpid(), number))
            handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
            assert trainer.main(arguments) == 0
            assert handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
        lines = capsys.readouterr().out.splitlines()
        assert (f"goes on after step {done - 1}" in lines) == (done > 0)
        assert lines[-2] == f"stopped by {number.name} after {then} steps, saved; to go on:"
        python, script, *arguments = shlex.split(lines[-1])
        assert os.path.samefile(python, sys.executable)
        assert (script, arguments) == ("train.py", [str(runs.only_run(tmp_path) / "config.json")])
        assert [
            r["step"] for r in runs.records(runs.only_run(tmp_path)) if "train/loss" in r
        ] == list(range(then))
        done = then
    assert trainer.main(arguments) == 0
    assert "all steps are done" in capsys.readouterr().out
    assert same_run(runs.only_run(tmp_path), straight)


@pytest.mark.slow
@pytest.mark.usefixtures("no_plot")
def test_killed_between_checkpoints(config, straight, tmp_path):
    """What was after the last checkpoint is done again, and its records are written once."""
    command = [sys.executable, "train.py", config, "--runs", str(tmp_path)]
    with subprocess.Popen(
        command, cwd=runs.REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("step     7/10"):
                process.kill()
                break
    folder = runs.only_run(tmp_path)
    assert not (folder / "checkpoints" / "10").exists()
    assert trainer.main([config, "--runs", str(tmp_path), "--resume", "auto"]) == 0
    assert same_run(folder, straight)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_any_moment(config, straight, tmp_path):
    """Training process and writer together, again and again, until the run is through."""
    command = [
        sys.executable,
        "train.py",
        config,
        "--runs",
        str(tmp_path),
        "--resume",
        "auto",
        "--checkpoint-every",
        "1",
    ]
    newest = kills = 0
    for attempt in range(60):
        process = subprocess.Popen(command, cwd=runs.REPOSITORY, stdout=subprocess.PIPE, text=True)
        shown = 0
        for line in process.stdout:
            shown += line.startswith("step ")
            if shown > 2 + attempt % 3:
                for child in (
                    Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                ):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(child), signal.SIGKILL)
                process.kill()
                kills += 1
                break
        process.stdout.close()
        if process.wait() == 0:
            break
        steps = [
            int(p.name)
            for p in (runs.only_run(tmp_path) / "checkpoints").iterdir()
            if p.name.isdecimal()
        ]
        assert max(steps, default=0) >= newest
        newest = max(steps, default=0)
    assert kills > 2
    assert runs.saved(runs.only_run(tmp_path), 10) == runs.saved(straight, 10)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside(straight, tmp_path, capsys):
    """The one before it is gone on from, and the run ends as it did."""
    copy = shutil.copytree(straight, tmp_path / "copy")
    for file in (copy / "checkpoints" / "10").rglob("*"):
        if file.is_file() and file.stat().st_size > 10_000 and file.name != "manifest.json":
            contents = bytearray(file.read_bytes())
            contents[len(contents) // 2] ^= 1
            file.write_bytes(contents)
    assert trainer.main([str(copy / "config.json")]) == 0
    out = capsys.readouterr().out
    assert "set aside as 10.damaged" in out
    assert "goes on after step 8" in out
    assert same_run(copy, straight)


@pytest.mark.usefixtures("no_plot")
def test_a_run_without_an_intact_checkpoint_does_not_begin_anew(straight, tmp_path, capsys):
    """Nothing that it wrote down is lost, however often it is started."""
    copy = shutil.copytree(straight, tmp_path / "copy")
    for step in (copy / "checkpoints").glob("[0-9]*"):
        (step / "manifest.json").write_text("{")
    before = (copy / "metrics.jsonl").read_bytes()
    for _ in range(2):
        assert trainer.main([str(copy / "config.json")]) == 1
        assert "has no step that is intact, only 10.damaged, " in capsys.readouterr().err
        assert (copy / "metrics.jsonl").read_bytes() == before


@pytest.mark.usefixtures("no_plot")
def test_a_run_that_did_not_begin_leaves_no_folder(straight, tmp_path, config, monkeypatch, capsys):
    def broken(*_: Any) -> Any:
        raise CheckpointError("its weights cannot be read")

    monkeypatch.setattr("k31fn.trainer.run.start_from", broken)
    assert trainer.main([config, "--init", str(straight), "--runs", str(tmp_path / "runs")]) == 1
    assert "its weights cannot be read" in capsys.readouterr().err
    assert not list((tmp_path / "runs").glob("*/*"))


@pytest.mark.usefixtures("no_plot")
def test_a_complete_run_says_so_and_is_left_alone(straight, capsys):
    before = (straight / "metrics.jsonl").read_bytes()
    checkpoints = sorted(os.listdir(straight / "checkpoints"))
    assert trainer.main([str(straight / "config.json")]) == 0
    out = capsys.readouterr().out
    assert "all steps are done" in out
    recorded = [r["heldout/loss"] for r in runs.records(straight) if "heldout/loss" in r][-1]
    assert f"held-out loss {recorded:.4f} nats per byte" in out
    assert (straight / "metrics.jsonl").read_bytes() == before
    assert sorted(os.listdir(straight / "checkpoints")) == checkpoints


@pytest.mark.usefixtures("no_plot")
def test_a_second_ctrl_c_breaks_off_a_step(config, tmp_path, monkeypatch, capsys):
    """The state that the step was writing into is not saved."""
    with monkeypatch.context() as patch:
        calls, loss = [], model.loss
        patch.setattr(stop, "_SAME_S", -1.0)  # no burst: two that a person sent

        def interrupted(*args, **kwargs):
            calls.append(0)
            if len(calls) == 9:  # the fifth step's first micro-batch
                signal.raise_signal(
                    signal.SIGINT
                )  # on this thread: two from outside may arrive as one
                signal.raise_signal(signal.SIGINT)
            return loss(*args, **kwargs)

        patch.setattr(model, "loss", interrupted)
        before = signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # which the second one meets
        try:
            assert trainer.main([config, "--runs", str(tmp_path)]) == 130
        finally:
            signal.signal(signal.SIGINT, before)
    captured = capsys.readouterr()
    assert captured.err == "train.py: interrupted\n"
    assert sorted(os.listdir(runs.only_run(tmp_path) / "checkpoints")) == [".lock", "3"]


@pytest.mark.usefixtures("no_plot")
def test_steps_that_are_not_finite(config, tmp_path, monkeypatch, capsys):
    """Two in a row are skipped; three stop the run, with the last good state saved, and it can go
    on.
    """
    with monkeypatch.context() as patch:
        loss, calls = model.loss, itertools.count()

        def sometimes_infinite(*args, **kwargs):
            total, parts = loss(*args, **kwargs)
            step, micro = divmod(next(calls), 2)
            bad = micro == 1 and step in (1, 2, 4, 5, 6, 7, 8, 9)
            return (total * float("inf") if bad else total), parts

        patch.setattr(model, "loss", sometimes_infinite)
        assert trainer.main([config, "--runs", str(tmp_path), "--checkpoint-every", "1"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("train.py: 3 steps in a row up to step 6 were not finite")
    assert (
        "step 2 skipped (2 so far): a gradient or the loss was not finite; nothing was changed"
        in captured.out
    )
    folder = runs.only_run(tmp_path)
    assert [r["skipped"] for r in runs.records(folder) if "skipped" in r] == [0, 1, 1, 0, 1, 1, 1]
    for part in ("params", "balance", "opt_state"):
        at = [runs.saved(folder, step, part) for step in range(1, 8)]
        assert at[0] == at[1] == at[2] != at[3] == at[4] == at[5] == at[6]
    assert trainer.main([str(folder / "config.json")]) == 0
    assert "goes on after step 6" in capsys.readouterr().out
    assert runs.saved(folder, 10, "params") != at[6]


@pytest.mark.usefixtures("no_plot", "direct")
def test_a_burst_of_signals_ends_it_as_one_does(config, straight, tmp_path, monkeypatch, capsys):
    """A scheduler repeats SIGTERM within a step; all of it comes before the step's end."""

    def burst():
        for _ in range(5):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)

    with monkeypatch.context() as patch:
        during_step(patch, 4, burst)
        assert trainer.main([config, "--runs", str(tmp_path)]) == 0
    assert "stopped by SIGTERM after 5 steps, saved; to go on:" in capsys.readouterr().out
    assert trainer.main([str(runs.only_run(tmp_path) / "config.json")]) == 0
    assert same_run(runs.only_run(tmp_path), straight)


@pytest.mark.usefixtures("no_plot", "direct")
def test_an_error_of_a_user_s_own_layer_keeps_its_traceback_and_ours_is_one_line(
    config, tmp_path, monkeypatch, capsys
):
    with monkeypatch.context() as patch:

        def own_layer():
            raise ValueError("rows of 3 and 4")

        during_step(patch, 1, own_layer)
        assert trainer.main([config, "--runs", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    assert "in own_layer\n" in err
    assert err.endswith("ValueError: rows of 3 and 4\ntrain.py: rows of 3 and 4\n")
    assert trainer.main([config, "--runs", str(tmp_path), "--batch-size", "3"]) == 2
    assert capsys.readouterr().err.startswith("train.py: micro_batches=2 does not divide")
