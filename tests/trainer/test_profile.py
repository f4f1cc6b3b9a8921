"""Traces: scopes by name, each step once, and no trace of them otherwise."""

import dataclasses
import json

import pytest
import torch
from torch.profiler import profile

from k31fn import config, scopes, trainer
from k31fn.autodiff import remat, value_and_grad
from k31fn.parallel import Mesh
from k31fn.trainer.profile import Profile, parse_steps
from tests.trainer import meshes, runs

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("unchecked")


def spans(file):
    """From when to when each scope of a trace was open, by name."""
    found = {}
    for event in json.loads(file.read_text())["traceEvents"]:
        if event.get("cat") == "user_annotation":
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return found


@pytest.mark.parametrize("again", ["none", pytest.param("layer", marks=pytest.mark.slow)])
def test_a_trace_of_two_steps(text, tmp_path, again):
    made, lines = dataclasses.replace(runs.recipe(text), remat=again, length=12), []
    dataset, step = trainer.load_corpus(made).dataset, trainer.make_step(trainer.lay_out(made))
    state, recorder = (
        trainer.init_state(trainer.lay_out(made), CPU),
        Profile(range(1, 3), tmp_path, 0, CPU, lines.append),
    )
    for number in range(4):
        with recorder.step(number):
            state, _ = step(state, trainer.make_batches(made, dataset.batch_at(number), CPU), 0.01)
        recorder.after(number)
    (file,) = (tmp_path / "trace").iterdir()
    assert file.name == "steps-1-2.rank0.json"
    assert lines[-1] == f"trace: {file}"
    found = spans(file)
    assert {name for name in found if name.startswith("step")} == {"step 1", "step 2"}
    assert [len(found[name]) for name in ("step 1", "step 2", "gradient", "optimiser")] == [
        1,
        1,
        2,
        2,
    ]
    for kind in ("KDA, dense", "DSA, MoE"):
        assert len(found[f"backward {kind}"]) == 2
        assert len(found[f"forward {kind}"]) == (4 if again == "layer" else 2)
        for start, stop in (*found[f"forward {kind}"], *found[f"backward {kind}"]):
            assert any(a <= start and stop <= b for a, b in found["gradient"])
        assert any(line.startswith(f"backward {kind}") for line in lines)
        for part in kind.split(", "):  # each sublayer inside of its layer
            for way in ("forward", "backward"):
                assert len(found[f"{way} {part}"]) == len(found[f"{way} {kind}"])
                for start, stop in found[f"{way} {part}"]:
                    assert any(a <= start and stop <= b for a, b in found[f"{way} {kind}"])


@pytest.mark.slow
def test_the_option(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trainer.run.plot, "save_loss_plot", lambda folder: None)
    path = runs.write_config(tmp_path / "small.py", dataclasses.replace(runs.recipe(text), steps=3))
    assert trainer.main([path, "--runs", str(tmp_path / "runs"), "--profile", "1:2"]) == 0
    (file,) = (runs.only_run(tmp_path / "runs") / "trace").iterdir()
    assert {"step 1", "data"} <= spans(file).keys()
    assert f"trace: {file}" in capsys.readouterr().out
    assert trainer.main([path, "--runs", str(tmp_path / "runs"), "--profile", "2:1"]) == 2


def test_what_is_not_steps():
    assert parse_steps("10:12") == range(10, 12)
    assert not parse_steps("")
    for text in ("10", "12:10", "3:3", "a:b", "1:-2"):
        with pytest.raises(ValueError, match="must be FIRST:END"):
            parse_steps(text)


def test_a_run_that_ends_early_keeps_what_it_has(tmp_path):
    lines = []
    recorder = Profile(range(1, 9), tmp_path, 3, CPU, lines.append)
    for number in (0, 1, 2):
        with recorder.step(number):
            torch.ones(2) + number
        recorder.after(number)
    assert not (tmp_path / "trace").exists()
    recorder.close()
    recorder.close()
    assert [p.name for p in (tmp_path / "trace").iterdir()] == ["steps-1-2.rank3.json"]


def layer(w, x):
    return torch.tanh(x @ w), x.sum()


@pytest.mark.parametrize("wrap", [lambda f: f, remat], ids=["none", "remat"])
def test_derivatives_are_those_of_the_function(wrap):
    """Also of second order, and under vmap."""
    w, x = torch.rand(3, 3, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64)

    def loss(w, x):
        y, aux = wrap(scopes.of_layer("L", layer))(w, x)
        return (y**2).sum() + aux

    def everything():
        return [
            *value_and_grad(loss, argnums=(0, 1))(w, x)[1],
            torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x[:, None]),
            torch.func.jacrev(torch.func.grad(loss))(w, x),
        ]

    plain = everything()
    with profile(acc_events=True) as recorded, scopes.recording() as names:
        named = everything()
    assert names == {"forward L", "backward L"}
    assert names <= {event.key for event in recorded.key_averages()}
    assert all(torch.equal(a, b) for a, b in zip(plain, named, strict=True))


def test_without_a_recording_there_is_nothing():
    assert scopes.of_layer("L", layer) is layer
    with profile(acc_events=True) as recorded, scopes.scope("S"):
        torch.ones(2) + 1
    assert "S" not in {event.key for event in recorded.key_averages()}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_pipeline_trains_the_same(text, schedule):
    """Split backwards as well."""
    made = meshes.recipe(text, compute="float64", mesh=Mesh(pp=2), micro_batches=2)
    made = dataclasses.replace(made, pipeline=config.Pipeline(schedule=schedule))
    plain, _, _ = meshes.on_threads(made, 1)
    with scopes.recording() as names:
        named, _, _ = meshes.on_threads(made, 1)
    assert {"forward KDA, dense", "backward DSA, MoE", "collective psum"} <= names
    assert all(torch.equal(a, b) for a, b in zip(plain, named, strict=True))
