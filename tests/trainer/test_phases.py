"""Runs in phases: rows, learning rates, what is trained, and going on across a border."""

import dataclasses
import math
import shutil

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from k31fn import config, trainer, tree
from k31fn.config import Phase
from k31fn.parallel import Mesh, each_rank
from k31fn.trainer.gradient import make_gradient
from k31fn.trainer.phases import learning_rate, make_phase_step
from tests.trainer import meshes, runs

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("unchecked")

LENGTHS = (
    Phase(steps=3, length=12, batch_size=8),
    Phase(steps=2, length=24),
    Phase(length=12, batch_size=2),
)
INDEXER = (
    Phase(steps=2, trainable="indexer", attention="dense_warmup", peak_lr=0.03),
    Phase(peak_lr=0.01),
)


@pytest.fixture
def recipe(text):
    return runs.recipe(text)


def in_phases(recipe, phases, **changes):
    return dataclasses.replace(recipe, phases=phases, **changes)


def test_what_holds_at_a_step(recipe):
    made = in_phases(recipe, LENGTHS)
    assert [made.phase_of(i) for i in (0, 2, 3, 4, 5, 9, 10)] == [0, 0, 1, 1, 2, 2, 2]
    assert [(made.at(i).length, made.at(i).batch_size) for i in (0, 3, 9)] == [
        (12, 8),
        (24, 4),
        (12, 2),
    ]
    assert recipe.at(5) == recipe
    warm = in_phases(recipe, INDEXER).at(1)
    assert (warm.trainable, warm.model.sublayers["full_attention"].stage, warm.phases) == (
        "indexer",
        "dense_warmup",
        (),
    )
    assert config.from_dict(config.Recipe, config.to_dict(made)) == made
    assert (
        dataclasses.replace(made, steps=4).at(9).length == 24
    )  # phases beyond the end of the run are not made


def test_bad_phases(recipe):
    for phases, complaint in [
        ((Phase(), Phase()), r"phases\[0\].steps=0: only the last"),
        ((Phase(steps=3), Phase(steps=4)), "phases have 7 steps, steps=10"),
        (
            (Phase(batch_size=3, micro_batches=2),),
            r"phases\[0\]: micro_batches=2 does not divide batch_size=3",
        ),
        ((Phase(length=1),), r"phases\[0\]: length=1 must be at least 2"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            in_phases(recipe, phases)
    with pytest.raises(ValueError, match="a phase can only freeze more"):
        in_phases(recipe, (Phase(trainable="all"),), trainable="indexer")
    with pytest.raises(ValueError, match="without peak_lr"):
        Phase(warmup_steps=3)


def test_the_learning_rate_is_the_phases_or_that_of_the_run(recipe):
    made = in_phases(
        recipe, (Phase(steps=4, peak_lr=0.5, warmup_steps=2, final_fraction=0.0), Phase())
    )
    assert [learning_rate(made, i) for i in range(4)] == pytest.approx([0.25, 0.5, 0.25, 0])
    o = recipe.optimizer
    for i in range(4, 10):  # warm-up of 3 steps, so the cosine begins at step 2
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * (i - 2) / 7)) / 2
        assert learning_rate(made, i) == pytest.approx(o.peak_lr * cosine)
    assert learning_rate(in_phases(recipe, (Phase(peak_lr=0.3),)), 7) == 0.3


def test_rows_of_one_length_go_on(recipe):
    """They are those of one dataset of that length, and no row comes twice."""
    made = in_phases(recipe, LENGTHS)
    dataset, whole = trainer.load_corpus(made).dataset, trainer.load_corpus(recipe).dataset
    short, long = (dataclasses.replace(whole, length=n, batch_size=1) for n in (12, 24))
    expected = [short] * 24 + [long] * 8 + [short] * 10
    numbers = [*range(24), *range(8), *range(24, 34)]
    rows = [row for step in range(10) for row in dataset.batch_at(step).tokens]
    assert len(rows) == len(expected)
    for row, of, number in zip(rows, expected, numbers, strict=True):
        assert torch.equal(row, of.batch_at(number).tokens[0])
    ranks = [dataset.batch_at(6, rank=r, num_ranks=2).tokens for r in range(2)]
    assert torch.equal(torch.cat(ranks), dataset.batch_at(6).tokens)


def test_what_a_phase_freezes_keeps_its_bits(recipe):
    made = in_phases(recipe, INDEXER)
    dataset = trainer.load_corpus(made).dataset
    state = trainer.init_state(trainer.lay_out(made), CPU)
    before = tree.map(torch.clone, state)
    for i in range(2):
        state, _ = make_phase_step(trainer.lay_out(made, Mesh().axes()), i)(
            state, batches(made, dataset, i), 0.03
        )
    moved = changed(before, state)
    assert {p for p in moved if p.startswith("params")} == {
        p for p in tree.paths(state) if p.startswith("params") and ".indexer." in p
    }
    assert not any(p.startswith("balance") for p in moved)
    trunk_state = [p for p in moved if p.startswith("opt_state") and ".indexer." not in p]
    assert all(
        p.endswith("step") for p in trunk_state
    )  # the number of steps, for all leaves together
    state, _ = make_phase_step(trainer.lay_out(made, Mesh().axes()), 2)(
        state, batches(made, dataset, 2), 0.01
    )
    later = [p for p in changed(before, state) if p.startswith("params")]
    assert len(later) > 2 * len([p for p in moved if p.startswith("params")])


def batches(made, dataset, step):
    return trainer.make_batches(made.at(step), dataset.batch_at(step), CPU)


def changed(before, after):
    pairs = zip(tree.flatten_with_paths(before), tree.leaves(after), strict=True)
    return {path for (path, a), b in pairs if not torch.equal(a, b)}


def flops(made, rows):
    """Of a gradient."""
    gradient = make_gradient(trainer.lay_out(made, Mesh().axes()))
    state, own = (
        trainer.init_state(trainer.lay_out(made), CPU),
        trainer.make_batches(made, rows, CPU),
    )
    with FlopCounterMode(display=False) as counted:
        gradient(state, own)
    return counted.get_total_flops()


def test_a_frozen_trunk_has_no_backward(recipe):
    """A gradient of the indexer alone runs the layer again that has one, and not the other."""
    rows = trainer.load_corpus(recipe).dataset.batch_at(0)
    indexer = dataclasses.replace(recipe, trainable="indexer")
    once, again = (
        flops(dataclasses.replace(indexer, remat=remat), rows) for remat in ("none", "layer")
    )
    assert once < again < 1.2 * once  # a backward through both layers would make it 1.77


@pytest.mark.slow
def test_the_same_on_a_mesh(text):
    """Across both kinds of border, in float64."""
    phases = (dataclasses.replace(INDEXER[0], length=12), Phase(steps=1, batch_size=8), Phase())
    made = meshes.recipe(text, compute="float64", phases=phases, steps=4)

    def go(axes, made):
        state, dataset, numbers = (
            trainer.init_state(trainer.lay_out(made, axes), CPU),
            trainer.load_corpus(made).dataset,
            [],
        )
        for i in range(made.steps):
            own = trainer.make_batches(made.at(i), trainer.rows_at(dataset, i, axes), CPU, axes)
            state, metrics = make_phase_step(trainer.lay_out(made, axes), i)(
                state, own, learning_rate(made, i)
            )
            numbers.append(metrics.loss)
        return torch.stack(numbers)

    on_mesh = dataclasses.replace(made, mesh=Mesh(fsdp=2))
    ranks = each_rank(lambda axes: go(axes, on_mesh), on_mesh.mesh, lambda _: ())
    torch.testing.assert_close(ranks[0], go(Mesh().axes(), made), rtol=1e-9, atol=0)


@pytest.mark.parametrize("first", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_going_on_across_a_border_bit_for_bit(text, tmp_path, monkeypatch, first):
    """Ended at the border and inside the second phase."""
    made = runs.recipe(
        text, phases=(Phase(steps=2, length=12, trainable="indexer"), Phase()), steps=5
    )
    made = dataclasses.replace(made, checkpoint_every=first, eval_every=100)
    monkeypatch.setattr(trainer.run.plot, "save_loss_plot", lambda folder: None)
    path = runs.write_config(tmp_path / "small.py", made)
    assert trainer.main([path, "--runs", str(tmp_path / "a")]) == 0
    straight = runs.only_run(tmp_path / "a")
    again = shutil.copytree(straight, tmp_path / "b" / straight.name)
    for folder in (
        again / "checkpoints"
    ).iterdir():  # as if the run had been killed after its first checkpoint
        if folder.name.isdecimal() and int(folder.name) > first:
            shutil.rmtree(folder)
    assert trainer.main([str(again / "config.json")]) == 0
    assert runs.saved(straight, 5) == runs.saved(again, 5)
    assert runs.records(straight) == runs.records(again)
