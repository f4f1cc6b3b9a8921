"""Each field that a side of a pair can be given is honoured, or refused before anything is
written.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from k31fn import data, lora, tree
from k31fn.config import Optimizer, Phase, Pipeline, Recipe
from k31fn.pair.__main__ import main
from k31fn.pair.runs import Runs
from k31fn.pair.sides import OWN, SHARED, Side, check_alike, parse_side, precise
from k31fn.pair.start import start
from k31fn.parallel import Mesh
from k31fn.trainer import (
    TrainState,
    init_state,
    lay_out,
    load_corpus,
    make_batches,
    make_step,
    rows_at,
)
from k31fn.trainer.phases import learning_rate
from tests import small
from tests.pair.test_pair import pair
from tests.trainer import runs

CPU = torch.device("cpu")

OF_ONE_SIDE: dict[str, Any] = {  # another value of each field that a side cannot have for itself
    "data": data.Config(path="elsewhere"),
    "seed": 3,
    "batch_size": 8,
    "length": 48,
    "heldout_bytes": 300,
    "init": "nowhere",
    "trainable": "indexer",
    "lora": lora.Config(),
    "steps": 400,
    "phases": (Phase(steps=2), Phase()),
    "name": "other",
    "mesh": Mesh(dp=2),
    "pipeline": Pipeline("interleaved", 2),
    "trackers": ("wandb",),
    "eval_every": 5,
    "eval_bytes": 300,
    "checkpoint_every": 5,
    "keep": 3,
    "keep_every": 3,
    "keep_best": 3,
}
OPTIMIZER: dict[str, Any] = {
    "kind": "adamw",
    "peak_lr": 0.05,
    "warmup_steps": 2,
    "final_fraction": 0.5,
    "weight_decay": 0.5,
    "beta1": 0.5,
    "beta2": 0.5,
    "eps": 1e-2,
    "max_norm": 0.03,
    "schedule": "cosine",
    "decay_fraction": 0.25,
    "norm": "inf",
    "ns_dtype": "bfloat16",
    "state_dtype": "bfloat16",
    "offload": True,
    "qk_clip": 1e-3,
    "spike": 8.0,
}
OTHERS: dict[str, dict[str, Any]] = {
    "micro_batches": {"micro_batches": 2},
    "compute": {"compute": "float64"},
    "products": {"products": "fp8_rows"},
    "master": {"master": "bfloat16"},
    "remat": {"remat": "layer"},
}
WITHOUT_A_NUMBER = {"offload", "remat"}  # where something is kept, not what


@pytest.fixture(scope="module")
def dataset(text: Path) -> Any:
    return load_corpus(recipe(text)).dataset


def recipe(text: Path | str, **changes: Any) -> Recipe:
    """Four steps in which every field of the optimiser counts."""
    optimizer = Optimizer(
        peak_lr=0.02, warmup_steps=1, schedule="wsd", decay_fraction=0.5, max_norm=0.1
    )
    wide = dataclasses.replace(
        small.config().sublayers["dense"], intermediate_size=32
    )  # FP8 products have multiples of 16
    cfg = small.config(vocab_size=257, num_layers=2, full_attention_layers=(1,), dense=wide)
    return runs.recipe(text, steps=4, batch_size=2, optimizer=optimizer, model=cfg, **changes)


def side(name: str, made: Recipe) -> Side:
    return Side(name, made, {}, name)


def test_every_field_is_honoured_or_refused() -> None:
    names = {f.name for f in dataclasses.fields(Recipe)}
    assert names == OWN | SHARED.keys(), (
        "say in k31fn.pair.sides whether a side has the field for itself"
    )
    assert not OWN & SHARED.keys()
    assert OF_ONE_SIDE.keys() == SHARED.keys()
    assert OPTIMIZER.keys() == {f.name for f in dataclasses.fields(Optimizer)}
    assert OTHERS.keys() | {"model", "optimizer"} == OWN


@pytest.mark.parametrize("field", SHARED)
@pytest.mark.parametrize("name", ["a", "b"])
def test_what_both_share_is_refused_for_one(name: str, field: str) -> None:
    base = runs.recipe("text")
    other = side(name, dataclasses.replace(base, **{field: OF_ONE_SIDE[field]}))
    same = side("ab".replace(name, ""), base)
    with pytest.raises(ValueError, match=rf"^--{name}:? (a pair runs one phase.*)?{field}"):
        check_alike(*((other, same) if name == "a" else (same, other)), base)
    check_alike(side("a", base), side("b", base), base)


def alone(made: Recipe, dataset: Any) -> TrainState:
    """The state that training the recipe ends with."""
    state, step = init_state(lay_out(made), CPU), make_step(lay_out(made))
    for number in range(made.steps):
        batches = make_batches(made, rows_at(dataset, number), CPU)
        state, _ = step(state, batches, learning_rate(made, number))
    return state


def beside(a: Recipe, b: Recipe, dataset: Any) -> tuple[TrainState, TrainState]:
    """What the two end with in a pair."""
    sides = side("a", a), side("b", b)
    check_alike(*sides, a)
    done, states = start(*sides, CPU, None)
    both = Runs(*sides, states, done, CPU, every=100)
    del both.runs["noise"]
    for _ in both.steps(dataset):
        pass
    return both.runs["a"].state, both.runs["b"].state


def equal(x: TrainState, y: TrainState) -> bool:
    """Whether two states have the same tensors, bit by bit."""
    if tree.paths(x) != tree.paths(y):
        return False
    pairs = zip(tree.leaves(x), tree.leaves(y), strict=True)
    return all(p.dtype == q.dtype and torch.equal(p, q) for p, q in pairs)


# two fields of the optimiser and two others; the rest takes a minute
_QUICK = {"kind", "qk_clip", "master", "micro_batches"}


@pytest.mark.parametrize(
    "field",
    [
        pytest.param(field, marks=() if field in _QUICK else pytest.mark.slow)
        for field in [*OPTIMIZER, *OTHERS]
    ],
)
def test_a_side_trains_as_it_would_alone(field: str, text: Path, dataset: Any) -> None:
    """Side b with the field of its own ends where that recipe ends, which is elsewhere than
    side a.
    """
    a = recipe(text, compute="bfloat16" if field in ("master", "products") else "float32")
    own = OTHERS.get(field) or {
        "optimizer": dataclasses.replace(a.optimizer, **{field: OPTIMIZER[field]})
    }
    b = dataclasses.replace(a, **own)
    of_a, of_b = beside(a, b, dataset)
    assert equal(of_b, alone(b, dataset))
    assert equal(of_a, of_b) is (field in WITHOUT_A_NUMBER)


def test_side_a_may_have_a_field_for_itself_too(text: Path, dataset: Any) -> None:
    b, changes = recipe(text), {"kind": "adamw", "spike": 8.0, "peak_lr": 0.05}
    a = dataclasses.replace(b, optimizer=dataclasses.replace(b.optimizer, **changes))
    for found, made in zip(beside(a, b, dataset), (a, b), strict=True):
        assert equal(found, alone(made, dataset))


@pytest.mark.parametrize("change", ["kind", "state_dtype", "spike"])
def test_a_checkpoint_has_the_state_of_both_or_is_refused(change: str) -> None:
    a = runs.recipe("text")
    b = dataclasses.replace(
        a, optimizer=dataclasses.replace(a.optimizer, **{change: OPTIMIZER[change]})
    )
    with pytest.raises(
        ValueError, match=rf"start='run'.*optimizer\.{change}={OPTIMIZER[change]!r}\) is another"
    ):
        start(side("a", a), side("b", b), CPU, Path("run"))
    lr = dataclasses.replace(a, optimizer=dataclasses.replace(a.optimizer, peak_lr=1e-3))
    with pytest.raises(
        ValueError, match="run is neither a run folder"
    ):  # the next thing that is looked at
        start(side("a", a), side("b", lr), CPU, Path("run"))


def test_the_exact_side_is_wider_whatever_side_a_rounds() -> None:
    rounded = runs.recipe("text", compute="bfloat16", master="bfloat16", products="fp8_rows")
    exact = precise(side("a", rounded)).recipe
    assert (exact.compute, exact.products) == ("float32", "exact")
    assert exact.precision.param == torch.float32


def test_true_and_false_are_values_of_a_field() -> None:
    wide = dataclasses.replace(
        small.config().sublayers["moe"], latent_size=32, expert_size=32
    )  # MXFP4 has groups of 32
    base = runs.recipe("text", model=small.config(moe=wide))
    for word, qat in (
        ("model.moe.qat=true", True),
        ("--model.moe.qat=true", True),
        ("model.moe.qat=false", False),
    ):
        assert parse_side("b", [word], base).recipe.model.sublayers["moe"].qat is qat
    on = parse_side("b", ["model.moe.qat=true", "optimizer.offload=true"], base).recipe
    assert on.optimizer.offload
    assert not parse_side("b", ["model.moe.qat=false"], on).recipe.model.sublayers["moe"].qat


def test_sides_with_optimisers_of_their_own_are_told_apart(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "optimizer.kind=adamw",
        "optimizer.spike=8",
        "optimizer.peak-lr=0.5",
        "model.moe.qat=false",
    ]
    status, report = pair(text, tmp_path, "--a", "optimizer.max-norm=2", "--b", *words)
    assert status == 1
    (reason,) = report["differs"]  # their gradients at equal parameters agree
    assert reason.startswith("training losses are")
    assert reason in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--b", "steps=400"],
            "--b steps=400: both sides take the same steps; set it for both, with --steps",
        ),
        (
            ["--b", "init=/nonexistent"],
            "--b init='/nonexistent': both sides train the same parameters",
        ),
        (["--a", "seed=3", "--b", "seed=3"], "--a seed=3: both sides train on the same rows"),
        (
            ["--b", "data.heldout-fraction=0.2"],
            "--b data.heldout_fraction=0.2: both sides train on the same rows",
        ),
        (["--b", "eval-every=7"], "--b eval_every=7: a pair makes no use of it; leave it out"),
        (
            ["--b", "model.kda.init-std=0.5"],
            "--b model (kda.init_std=0.5): the sides have other initial values",
        ),
        (["--b", "model.moe.qat=1"], "--b model.moe.qat='1' must be true or false"),
        (
            ["--b", "kernels=reference", "kernels=triton"],
            "--b kernels is given twice, as 'reference' and as 'triton'",
        ),
        (
            ["--a", "micro_batches=1", "micro-batches=2"],
            "--a micro-batches is given twice, as '1' and as '2'",
        ),
        (
            ["--b", "remat=layer", "--b=micro-batches=2"],
            "--b is given twice, and the last would replace the first",
        ),
    ],
)
def test_a_wrong_side_is_refused(
    words: list[str], message: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = runs.write_config(tmp_path / "c.py", runs.recipe(text, steps=6))
    assert main([config, "--device", "cpu", "--out", str(tmp_path / "pairs"), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "pairs").exists()


def test_an_unknown_field_is_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"^--a kernel='reference': kernel is no .*: kernels"):
        parse_side("a", ["kernel=reference"], runs.recipe("text"))


def test_an_unknown_field_of_a_part_leads_to_a_help_that_exists():
    with pytest.raises(ValueError, match=r"python -m k31fn.pair CONFIG --help"):
        parse_side("a", ["optimizer.lr=1"], runs.recipe("text"))
