"""Going on exactly: 5 steps, a new start and 5 more are 10, bit for bit, or up to rounding on
another mesh.
"""

import dataclasses
import json
import signal

import pytest
import torch

from k31fn import data, trainer, tree
from k31fn.checkpoint import Checkpointer
from k31fn.config import Optimizer
from k31fn.parallel import Mesh, each_rank
from k31fn.testing import assert_close_trees
from k31fn.trainer import run
from k31fn.trainer.console import View
from k31fn.trainer.ranks.agreement import Ranks
from k31fn.trainer.ranks.stop import Stop
from tests.trainer import launched, meshes, runs

pytestmark = pytest.mark.usefixtures("unchecked")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_plot(monkeypatch):
    monkeypatch.setattr(run.plot, "save_loss_plot", lambda folder: None)


@pytest.fixture(scope="module")
def recipe(text):
    """A checkpoint after each step, all kept; no evaluation."""
    return meshes.recipe(text, compute="float64", steps=10, eval_every=100, checkpoint_every=5)


class StopAfter(Stop):
    """As if a signal came to this rank after so many steps; -1: never."""

    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def agree(self, ranks, error):
        self._number = signal.SIGTERM if self.left == 0 else self._number
        self.left -= 1
        super().agree(ranks, error)


def trained(recipe, folder, stop_after=-1):
    """A run on its mesh, in threads, in the folder; from its newest checkpoint if there is one."""
    folder.mkdir(exist_ok=True)
    corpus = trainer.load_corpus(recipe)

    def go(axes, coordinate):
        stop = StopAfter(stop_after if coordinate == last else -1)
        return trainer.train(
            recipe, corpus, folder, device=CPU, view=View.silent(), stop=stop, ranks=Ranks(axes)
        )

    *_, last = recipe.mesh.coordinates()
    return each_rank(go, recipe.mesh, lambda c: (c,))[0]


def losses(folder):
    return {r["step"]: r["train/loss"] for r in runs.records(folder) if "train/loss" in r}


WSD = {
    "schedule": "wsd",
    "state_dtype": "bfloat16",
    "qk_clip": 0.5,
    "spike": 9.0,
    "norm": "inf",
    "offload": True,
}
OPTIMIZERS = {
    "muon": Optimizer(kind="muon", peak_lr=0.02, warmup_steps=3),
    "adamw": Optimizer(kind="adamw", peak_lr=0.01, warmup_steps=3),
    "everything": Optimizer(peak_lr=0.02, warmup_steps=3, **WSD),
}


@pytest.mark.slow
@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_case_d29_on_the_same_mesh_bit_for_bit(recipe, tmp_path, optimizer):
    """Inside an epoch; step, data, optimiser, biases and key all go on: each tensor of the state
    and each loss.
    """
    made = dataclasses.replace(recipe, optimizer=optimizer, mesh=Mesh(fsdp=2), checkpoint_every=3)
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    trained(made, straight)
    outcome = trained(made, cut, stop_after=5)
    assert (outcome.step, outcome.complete) == (5, False)
    assert trained(made, cut).complete
    assert len(losses(straight)) == 10
    assert losses(cut) == losses(straight)
    assert runs.saved(cut, 10) == runs.saved(straight, 10)
    assert runs.saved(cut, 9)["key"] == runs.saved(cut, 10)["key"]
    assert runs.saved(cut, 9)["params.head"] != runs.saved(cut, 10)["params.head"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize(
    "chain",
    [
        [Mesh(fsdp=2), Mesh(pp=2), Mesh()],
        [Mesh(), Mesh(tp=2), Mesh(fsdp=2, ep=2)],
        [Mesh(fsdp=4), Mesh(fsdp=2, tp=2), Mesh(pp=2, cp=2)],
    ],
    ids=str,
)
def test_on_other_chainup_to_rounding(recipe, tmp_path, chain):
    """Each mesh goes on where the one before stopped; in float64 the run of one device to 1e-9."""
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    trained(recipe, straight)
    for mesh, stop_after in zip(chain, (4, 3, -1), strict=True):
        made = dataclasses.replace(recipe, mesh=mesh, micro_batches=mesh.pp)
        outcome = trained(made, cut, stop_after=stop_after)
    assert outcome.complete
    assert losses(cut) == pytest.approx(losses(straight), rel=1e-9)
    with (
        Checkpointer(straight / "checkpoints", read_only=True) as a,
        Checkpointer(cut / "checkpoints", read_only=True) as b,
    ):
        states = [c.restore(10, trainer.abstract_state(trainer.lay_out(recipe))) for c in (a, b)]
    assert_close_trees(*states, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("direct")
def test_a_run_that_restores_other_data_or_no_optimiser_is_seen(recipe, tmp_path, monkeypatch):
    """What the tests above compare does depend on them."""
    straight = tmp_path / "straight"
    trained(recipe, straight)
    restore = Checkpointer.restore

    def without_moments(self, *args, **how):
        state = restore(self, *args, **how)
        return dataclasses.replace(state, opt_state=tree.map(torch.zeros_like, state.opt_state))

    def at_the_start(self, step, **share):
        return batch_at(self, step % 5, **share)

    batch_at = data.Dataset.batch_at
    for name, (owner, method, broken) in {
        "moments": (Checkpointer, "restore", without_moments),
        "data": (data.Dataset, "batch_at", at_the_start),
    }.items():
        trained(recipe, tmp_path / name, stop_after=5)
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, broken)
            trained(recipe, tmp_path / name)
        assert losses(tmp_path / name)[9] != pytest.approx(losses(straight)[9], rel=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("direct")
def test_what_stays_of_a_run_whose_heldout_loss_grows(recipe, tmp_path, monkeypatch):
    """The newest, multiples of 4, and the best, which is the first."""
    monkeypatch.setattr(run, "heldout_loss", lambda recipe, state, *args, **how: float(state.step))
    made = dataclasses.replace(
        recipe, checkpoint_every=2, eval_every=2, keep=1, keep_every=4, keep_best=1
    )
    trained(made, tmp_path)
    with Checkpointer(tmp_path / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [2, 4, 8, 10]


def test_max_minutes(recipe, tmp_path, monkeypatch, capsys):
    """Ended like a run that got a signal, with the command that goes on, from a time that counts
    from the call.
    """
    config, clock, read = (
        runs.write_config(tmp_path / "small.py", recipe),
        [0.0],
        data.Dataset.batch_at,
    )

    def batch_at(self, number, **share):
        clock[0] += 100
        return read(self, number, **share)

    monkeypatch.setattr(data.Dataset, "batch_at", batch_at)
    monkeypatch.setattr("k31fn.trainer.ranks.stop.time.monotonic", lambda: clock[0])
    assert (
        trainer.main(
            [config, "--runs", str(tmp_path / "runs"), "--max-minutes", "5", "--device", "cpu"]
        )
        == 0
    )
    *_, said, command = capsys.readouterr().out.splitlines()
    folder = runs.only_run(tmp_path / "runs")
    assert said == "stopped by --max-minutes after 4 steps, saved; to go on:"
    assert command.endswith(f"train.py {folder / 'config.json'}")
    assert (folder / "checkpoints" / "4").exists()
    assert trainer.main([config, "--max-minutes", "0"]) == 2
    assert "max_minutes=0.0 must be more than 0" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("harm", ["save-before:1:6", "save-after:1:6", "save-after:0:6"])
def test_a_rank_that_is_killed_in_a_save_is_named_and_nothing_is_lost(recipe, tmp_path, harm):
    """Before its part is copied the save is lost, afterwards the writers finish it; the others
    report and end.
    """
    made = dataclasses.replace(recipe, mesh=Mesh(fsdp=2), checkpoint_every=3, steps=500)
    config = launched.write_config(tmp_path / "small.py", made)
    kind, rank, _ = harm.split(":")
    with launched.processes(
        2, config, "--runs", str(tmp_path / "runs"), "--timeout", "60", harm=harm
    ) as ranks:
        found = launched.ends(ranks, 100)
    other = 1 - int(rank)
    assert [found[int(rank)][0], found[other][0]] == [-signal.SIGKILL, 1]
    (line,) = [line for line in found[other][2].splitlines() if line.startswith("train.py:")]
    if other == 0:  # the rank that is left holds the store
        assert line.startswith("train.py: rank 1 at {'fsdp': 1} died: it says nothing any more")
    else:
        assert line.startswith(
            "train.py: rank 1 at {'fsdp': 1}: the store of the process group is gone: rank 0 at "
        )
    folder = runs.only_run(tmp_path / "runs")
    assert line.endswith(str(folder / "failure"))
    assert json.loads((folder / "failure" / f"rank-{other}.json").read_text())["rank"] == other
    with Checkpointer(folder / "checkpoints") as checkpoints:  # waits for the writers
        newest = checkpoints.latest(on_damage=pytest.fail)
        assert newest in ((3,) if kind == "save-before" else (3, 6))
        assert not list(checkpoints.directory.glob("*.damaged"))
    assert (
        trainer.main(
            [
                config,
                "--runs",
                str(tmp_path / "runs"),
                "--resume",
                "auto",
                "--mesh.fsdp",
                "1",
                "--max-minutes",
                "0.02",
                "--device",
                "cpu",
            ]
        )
        == 0
    )
