"""``train.py`` in several processes: one run, whatever mesh it goes on on, and one report of what
goes wrong.
"""

import dataclasses
import json
import re
import signal
import time

import pytest

from k31fn import trainer
from k31fn.checkpoint import Checkpointer
from k31fn.parallel import Mesh
from k31fn.testing import assert_close_trees
from k31fn.trainer.ranks.launch import Process
from tests.trainer import launched, meshes, runs

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def recipe(text):
    return meshes.recipe(text, mesh=Mesh(fsdp=2), compute="float64", steps=6)


@pytest.fixture(scope="module")
def config(recipe, tmp_path_factory):
    return launched.write_config(tmp_path_factory.mktemp("config") / "small.py", recipe)


@pytest.fixture
def no_plot(monkeypatch):
    monkeypatch.setattr(trainer.run.plot, "save_loss_plot", lambda folder: None)


def losses(folder):
    return [r["train/loss"] for r in runs.records(folder) if "train/loss" in r]


def final(folder, recipe):
    with Checkpointer(folder / "checkpoints", read_only=True) as checkpoints:
        return checkpoints.restore(6, trainer.abstract_state(trainer.lay_out(recipe)))


@pytest.mark.usefixtures("no_plot")
@pytest.mark.slow
def test_stopped_by_a_signal_to_one_rank_it_goes_on_on_another_mesh(
    config, recipe, tmp_path, capsys
):
    """Two processes under torchrun stop after the same step, saved; then one process; it ends as if
    on one device.
    """
    done = launched.torchrun(2, config, "--runs", str(tmp_path / "two"), harm="SIGTERM:1:3")
    assert done.returncode == 0, done.stderr
    folder = runs.only_run(tmp_path / "two")
    *lines, stopped, command = done.stdout.splitlines()
    assert stopped == "stopped by SIGTERM after 4 steps, saved; to go on:"
    assert command == f"torchrun --nproc_per_node=2 train.py {folder / 'config.json'}"
    assert sum(line.startswith("step ") for line in lines) == 4  # one rank speaks
    assert done.stderr == ""
    assert trainer.main([str(folder / "config.json"), "--mesh.fsdp", "1", "--device", "cpu"]) == 0
    assert "goes on after step 3" in capsys.readouterr().out
    assert (
        trainer.main(
            [config, "--runs", str(tmp_path / "one"), "--mesh.fsdp", "1", "--device", "cpu"]
        )
        == 0
    )
    straight = runs.only_run(tmp_path / "one")
    assert losses(folder) == pytest.approx(losses(straight), rel=1e-9)
    heldout = [
        [r["heldout/loss"] for r in runs.records(f) if "heldout/loss" in r]
        for f in (folder, straight)
    ]
    assert heldout[0] == pytest.approx(heldout[1], rel=1e-9)
    assert_close_trees(final(folder, recipe), final(straight, recipe), rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_the_others_end(config, tmp_path):
    with launched.processes(
        2, config, "--runs", str(tmp_path), "--timeout", "60", harm="SIGKILL:1:4"
    ) as ranks:
        (first, _, said), (second, *_) = launched.ends(
            ranks, 60
        )  # long before the timeout: the connection broke
    assert (first, second) == (1, -signal.SIGKILL)
    (line,) = [line for line in said.splitlines() if line.startswith("train.py:")]
    assert line.startswith(
        "train.py: rank 1 at {'fsdp': 1} died: it says nothing any more; the others wait in "
    )
    folder = runs.only_run(tmp_path)
    assert line.endswith(f"; what the ranks did: {folder / 'failure'}")
    whole_or_absent(folder, saved=3)
    check_record(folder / "failure", rank=0)


def check_record(folder, rank):
    """Stacks, memory, step times and the collectives, the last of which is not over."""
    record = json.loads((folder / f"rank-{rank}.json").read_text())
    assert record["rank"] == rank
    assert any("train" in line for line in record["stacks"]["MainThread"])
    assert record["memory_bytes"]["host"] > 1e7
    assert sum(record["step_seconds"]["counts"].values()) == 4
    collectives = record["collectives"]
    assert 100 < len(collectives) <= 256
    assert collectives[-1]["waited"] is None
    assert all(c["waited"] is not None for c in collectives[:-3])
    numbers = [c["number"] for c in collectives if c["axes"] == ["fsdp"]]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_while_another_is_stuck_is_named_before_torchrun_kills(
    config, tmp_path
):
    """As with a device's collectives, which do not break: SIGTERM comes to a rank that acts on no
    signal.
    """
    began = time.monotonic()
    done = launched.torchrun(2, config, "--runs", str(tmp_path), harm="SIGKILL:1:4,block:0:4")
    assert (
        time.monotonic() - began < 60
    )  # a start takes some 20 s on a busy machine, torchrun would wait for 30
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert line.startswith("train.py: rank 1 at {'fsdp': 1} died: it says nothing any more")
    assert (runs.only_run(tmp_path) / "failure" / "rank-0.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_signal_to_ranks_that_are_stuck_says_where_they_stand(config, tmp_path):
    with launched.processes(2, config, "--runs", str(tmp_path), harm="block:0:4") as ranks:
        folder = tmp_path / "small"
        deadline = time.monotonic() + 60
        while not folder.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(15)
        for rank in ranks:
            rank.terminate()
        time.sleep(22)
        for rank in ranks:
            rank.kill()
        said = [rank.communicate()[1] for rank in ranks]
    for number, text in enumerate(said):
        (line,) = [line for line in text.splitlines() if line.startswith("train.py: ")]
        assert line.startswith(f"train.py: rank {number} at {{'fsdp': {number}}}: SIGTERM came 1")
    assert ", waits in psum over ('fsdp',) on rank 1" in said[1]
    assert "waits in" not in said[0]


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_all_end(config, tmp_path):
    with launched.processes(
        2, config, "--runs", str(tmp_path), "--timeout", "15", harm="hang:1:4"
    ) as ranks:
        found = launched.ends(ranks, 90)
    assert [status for status, *_ in found] == [1, 1]
    said = "".join(err for *_, err in found)
    (line,) = [line for line in said.splitlines() if line.startswith("train.py:")]
    assert line.startswith("train.py: rank 1 at {'fsdp': 1} hangs: no collective for ")
    assert "small.py:" in line
    assert " in harm, from " in line
    whole_or_absent(runs.only_run(tmp_path), saved=3)


def whole_or_absent(folder, saved):
    with Checkpointer(
        folder / "checkpoints"
    ) as checkpoints:  # which waits for the writers of the run
        assert checkpoints.latest(on_damage=pytest.fail) == saved
    records = runs.records(folder)
    assert [r["step"] for r in records if "train/loss" in r] == list(range(len(losses(folder))))


@pytest.mark.slow
def test_a_rank_that_fails_says_where(config, tmp_path):
    with launched.processes(2, config, "--runs", str(tmp_path), harm="fail:1:4") as ranks:
        found = launched.ends(ranks, 60)
    assert [status for status, *_ in found] == [1, 1]
    assert "Traceback (most recent call last):" in found[1][2]
    lines = [line for line in found[1][2].splitlines() if line.startswith("train.py: ")]
    assert lines == ["train.py: rank 1 at {'fsdp': 1} failed: MemoryError: no memory left"]
    assert "train.py" not in found[0][2]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("harm", ["SIGKILL:0:4", "SIGSTOP:1:2", "hang:0:1", "SIGKILL:3:2"])
def test_under_torchrun_with_four_ranks(recipe, tmp_path, harm):
    """Whichever rank it is, also the one that writes, and one that not all others share a group
    with.
    """
    made = dataclasses.replace(recipe, mesh=Mesh(fsdp=2, tp=2))
    config = launched.write_config(tmp_path / "small.py", made)
    done = launched.torchrun(
        4, config, "--runs", str(tmp_path / "runs"), "--timeout", "6", harm=harm
    )
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    rank = int(harm.split(":")[1])
    assert len(lines) == 1, lines
    verb = "hangs" if harm.startswith("hang") else "died"
    assert lines[0].startswith(
        f"train.py: rank {rank} at {{'fsdp': {rank // 2}, 'tp': {rank % 2}}} {verb}"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_run_on_four_ranks_of_every_kind(recipe, tmp_path, config, capsys):
    """Stage, data and tensor parallel under torchrun, with a resume on the same mesh."""
    made = dataclasses.replace(recipe, mesh=Mesh(pp=2, tp=2, ep=2), micro_batches=2)
    path = launched.write_config(tmp_path / "small.py", made)
    for harm in ("SIGTERM:2:3", "none:0:0"):
        done = launched.torchrun(
            4, path, "--runs", str(tmp_path / "runs"), "--resume", "auto", harm=harm
        )
        assert done.returncode == 0, done.stderr
    assert (
        trainer.main(
            [config, "--runs", str(tmp_path / "one"), "--mesh.fsdp", "1", "--device", "cpu"]
        )
        == 0
    )
    folder, straight = runs.only_run(tmp_path / "runs"), runs.only_run(tmp_path / "one")
    assert losses(folder) == pytest.approx(losses(straight), rel=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_case_d29_stopped_and_gone_on_is_straight_on(config, tmp_path):
    """On the same mesh bit for bit."""
    folders = []
    for name, harms in (
        ("straight", ["none:0:0"]),
        ("cut", ["SIGTERM:0:1", "SIGINT:1:4", "none:0:0"]),
    ):
        for harm in harms:
            done = launched.torchrun(
                2, config, "--runs", str(tmp_path / name), "--resume", "auto", harm=harm
            )
            assert done.returncode == 0, done.stderr
        folders.append(runs.only_run(tmp_path / name))
    straight, cut = folders
    assert runs.saved(straight, 6) == runs.saved(cut, 6)
    assert runs.records(straight) == runs.records(cut)


class TestRefused:
    """Before any work, with what would do; every process alike, one speaks."""

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (
                ["--mesh.fsdp", "4"],
                "ranks, the world has 2; mesh.fsdp=2 would fit; or start as many: torchrun",
            ),
            (
                ["--mesh.fsdp", "1", "--mesh.tp", "3"],
                "mesh.tp=3 does not divide model.vocab_size=260",
            ),
            (
                ["--mesh.fsdp", "1", "--mesh.ep", "3"],
                "mesh.ep=3 does not divide fsdp x cp x tp = 1 x 1 x 1",
            ),
        ],
    )
    def test_by_every_process(self, config, tmp_path, monkeypatch, capsys, flags, message):
        for rank in ("1", "0"):
            for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")):
                monkeypatch.setenv(name, value)
            assert trainer.main([config, "--runs", str(tmp_path / "runs"), *flags]) == 2
            said = capsys.readouterr()
            assert said.out == ""
            assert (message in said.err) == (rank == "0")
            assert rank == "0" or not said.err
        assert not (tmp_path / "runs").exists()

    def test_more_ranks_than_processes(self, config, tmp_path, capsys):
        assert trainer.main([config, "--runs", str(tmp_path / "runs"), "--mesh.dp", "2"]) == 2
        assert "start as many: torchrun --nproc_per_node=4 train.py " in capsys.readouterr().err
        assert not (tmp_path / "runs").exists()


def test_the_command_that_starts_as_many():
    assert Process(3, 3, 8, 8).command() == "torchrun --nproc_per_node=8 train.py"
    assert Process(9, 1, 16, 8).command() == "torchrun --nnodes=2 --nproc_per_node=8 train.py"
    assert Process().command(4) == "torchrun --nproc_per_node=4 train.py"
    assert re.fullmatch(r"\S*python[\d.]* train.py", Process().command())
