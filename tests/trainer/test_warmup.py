"""What is compiled before the first step is what the steps of the run call."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from k31fn import config, data, metrics, model, random, segments, tree
from k31fn.config import Recipe
from k31fn.kernels.registry import watch_calls
from k31fn.kernels.warmup import Launch, OpCalls
from k31fn.parallel import MeshAxes
from k31fn.trainer import Metrics, TrainState, init_state, lay_out, main, make_batches, make_step
from k31fn.trainer.ranks.agreement import Ranks
from k31fn.trainer.warmup import _calls_of, _of_all, rehearse
from tests.trainer import runs

CPU = torch.device("cpu")


def really(recipe: Recipe) -> OpCalls:
    """The calls of a step that has values."""
    calls = OpCalls()
    with watch_calls(calls):
        make_step(lay_out(recipe))(
            init_state(lay_out(recipe), CPU), make_batches(recipe, rows_of(recipe), CPU), 1e-3
        )
    return calls


def rows_of(recipe: Recipe) -> data.Example:
    tokens = (
        random.bits(random.key(0), (recipe.batch_size, recipe.length)) % recipe.model.vocab_size
    )
    packing = segments.from_lengths([[9, 10]] * recipe.batch_size, recipe.length)
    return data.Example(tokens, segments.next_token_labels(tokens, packing), packing, ())


def kinds(calls: OpCalls) -> set[tuple[str, tuple[object, ...]]]:
    """Without strides: an operator whose results are made at once gives contiguous ones."""
    shapes = (
        (c.op.name, [x[0::3] if isinstance(x, tuple) else x for x in c.leaves]) for c in calls
    )
    return {(name, tuple(map(str, leaves))) for name, leaves in shapes}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"micro_batches": 2, "remat": "layer", "compute": "bfloat16"},
    ],
)
def test_the_calls_found_on_meta_tensors_are_those_of_a_step(
    changes: dict[str, object], unchecked: None
) -> None:
    recipe = runs.recipe("unused", **changes)
    assert kinds(_calls_of(recipe)) == kinds(really(recipe))
    other = dataclasses.replace(recipe, length=32)
    assert kinds(_calls_of(other)) != kinds(_calls_of(recipe))


@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [
        (
            {"kind": "muon", "spike": 6.0, "qk_clip": 100.0},
            {"compute": "bfloat16", "master": "bfloat16"},
        ),
        pytest.param(
            {"kind": "adamw", "state_dtype": "bfloat16", "norm": "inf"}, {}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_rehearsed_step_changes_no_bit(
    optimizer: dict[str, Any], changes: dict[str, Any], unchecked: None
) -> None:
    recipe = runs.recipe("unused", optimizer=config.Optimizer(peak_lr=0.02, **optimizer), **changes)
    rows, steps = rows_of(recipe), make_step(lay_out(recipe))
    state, _ = steps(init_state(lay_out(recipe), CPU), make_batches(recipe, rows, CPU), 1e-3)
    before, skipped = tree.map(torch.clone, state), []

    def step(
        state: TrainState, batches: Sequence[model.Batch], lr: float
    ) -> tuple[TrainState, Metrics]:
        new, numbers = steps(state, batches, lr)
        skipped.append(float(numbers.skipped))
        return new, numbers

    state, seconds = rehearse(recipe, step, state, rows, CPU, MeshAxes())
    same = tree.map(torch.equal, state, before)
    assert all(tree.leaves(same)), same
    assert skipped == [1.0]
    assert seconds > 0
    state, _ = step(state, make_batches(recipe, rows, CPU), 1e-3)
    assert not all(tree.leaves(tree.map(torch.equal, state, before)))


def test_ranks_tell_each_other_what_they_launch() -> None:
    own = [Launch("m", f, ("cuda", 90, 32), "{}") for f in "fgf"]
    assert _of_all(own, Ranks()) == own[:2]


def test_on_a_device_without_kernels_a_warm_up_says_so(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], unchecked: None
) -> None:
    config = runs.write_config(tmp_path / "c.py", runs.recipe(text, steps=1))
    assert main([config, "--warmup", "--device", "cpu", "--runs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "warm-up: no kernels to compile on cpu" in said
    assert "rehearsed a step in" in said
    assert main([config, "--warmup-processes", "-1"]) == 2
    assert "warmup_processes=-1 must be at least 0" in capsys.readouterr().err


@pytest.mark.slow
def test_the_first_step_is_timed_without_its_rehearsal(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    def slow(
        recipe: Recipe, step: object, state: TrainState, *_: object
    ) -> tuple[TrainState, float]:
        time.sleep(5.0)
        return state, 5.0

    monkeypatch.setattr("k31fn.trainer.run.rehearse", slow)
    recipe = runs.recipe(text, steps=1)
    config = runs.write_config(tmp_path / "c.py", recipe)
    assert main([config, "--warmup", "--device", "cpu", "--runs", str(tmp_path / "runs")]) == 0
    first, *_ = metrics.read(runs.only_run(tmp_path / "runs") / "metrics.jsonl")
    assert first["tokens_per_second"] > recipe.batch_size * recipe.length / 5.0


def test_kernels_are_chosen_by_name(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], unchecked: None
) -> None:
    config = runs.write_config(tmp_path / "c.py", runs.recipe(text, steps=1))
    assert main([config, "--kernels", "kda:recurence"]) == 2
    assert "op 'kda' has no implementation 'recurence'; it has reference" in capsys.readouterr().err
    assert (
        main(
            [
                config,
                "--kernels",
                "grouped_matmul:grouped_mm",
                "--device",
                "cpu",
                "--runs",
                str(tmp_path / "runs"),
            ]
        )
        == 2
    )
    assert (
        "grouped_matmul:grouped_mm runs on cuda, the run is on cpu; for it"
        in capsys.readouterr().err
    )
    assert main([config, "--profile", "0:2", "--runs", str(tmp_path / "runs")]) == 2
    assert "profile='0:2' ends after the run's 1 steps" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
