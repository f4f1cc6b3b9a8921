"""Command-line overrides: typed, checked as a whole, and of the config's own classes."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from k31fn import config
from k31fn.layers import attn_res, dsa, mhc
from tests import small

CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True)
class Cosine:
    """A schedule.

    Attributes:
        steps: how many, see :func:`torch.cos` and ``steps``.
        floor: of the peak.
    """

    steps: int = 10
    floor: float = 0.1


@dataclass(frozen=True)
class Constant:
    pass


@dataclass(frozen=True)
class Example:
    width: int
    heads: int = 4
    mode: Literal["a", "b"] = "a"
    schedule: Cosine | Constant = field(default_factory=Cosine)
    sizes: tuple[int, ...] = (1, 2)
    limit: int | None = None
    flag: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}")


@dataclass(frozen=True)
class Both:
    example: Example = field(metadata={"flat": True})
    inner: Cosine = field(default_factory=Cosine)


def override(value, *args):
    return config.override(value, args, prog="x")


def test_without_arguments_it_is_the_same():
    value = Example(8)
    assert override(value) is value


def test_another_class_by_its_name():
    """With its defaults, and fields of its own."""
    assert override(Example(8), "--schedule", "Constant").schedule == Constant()
    assert override(Example(8), "--schedule=Cosine", "--schedule.steps", "3").schedule == Cosine(
        steps=3
    )
    assert override(Both(Example(8)), "--schedule", "Constant", "--inner.steps", "3") == Both(
        Example(8, schedule=Constant()), Cosine(3)
    )
    tiny = config.load_recipe(CONFIGS / "tiny.py")
    got = override(
        tiny, "--model.residual", "mhc", "--model.residual.num-streams", "2", "--steps", "3"
    )
    model = dataclasses.replace(tiny.model, residual=mhc.Config(num_streams=2))
    assert got == dataclasses.replace(tiny, model=model, steps=3)
    assert override(got, "--model.residual", "attn_res").model.residual == attn_res.Config()
    assert override(
        got, "--model.residual", "mhc", "--model.residual.iterations", "7"
    ).model.residual == mhc.Config(num_streams=2, iterations=7)


def test_a_class_that_is_none_or_has_no_defaults_is_refused():
    with pytest.raises(ValueError, match="--schedule: 'Linear' must be one of Constant, Cosine"):
        override(Example(8), "--schedule", "Linear")
    with pytest.raises(ValueError, match=r"--model.full-attention mla: .*required.*write a config"):
        override(config.load_recipe(CONFIGS / "tiny.py"), "--model.full-attention", "mla")


@pytest.mark.parametrize(
    ("args", "changes"),
    [
        (["--width", "12"], {"width": 12}),
        (["--width=12", "--heads", "3"], {"width": 12, "heads": 3}),
        (["--mode", "b"], {"mode": "b"}),
        (["--schedule.floor", "1e-3"], {"schedule": Cosine(floor=1e-3)}),
        (["--sizes", "3", "4", "5"], {"sizes": (3, 4, 5)}),
        (["--limit", "3"], {"limit": 3}),
        (["--limit", "None"], {"limit": None}),
        (["--flag"], {"flag": True}),
    ],
)
def test_a_field(args, changes):
    assert override(Example(8), *args) == dataclasses.replace(Example(8), **changes)


def test_checks_wait_for_the_whole():
    assert override(Example(8), "--heads", "3", "--width", "9") == Example(9, 3)
    with pytest.raises(ValueError, match="width=8 must be a multiple of heads=3"):
        override(Example(8), "--heads", "3")


def test_flat_fields_have_no_prefix():
    value = override(
        Both(Example(8)), "--width", "16", "--schedule.steps", "3", "--inner.steps", "4"
    )
    assert value == Both(Example(16, schedule=Cosine(3)), Cosine(4))


def test_the_class_of_a_union_stays():
    recipe = config.load_recipe(CONFIGS / "tiny.py")
    value = override(recipe, "--model.full-attention.topk", "7", "--model.residual.block-size", "4")
    assert isinstance(value.model.sublayers["full_attention"], dsa.Config)
    full = dataclasses.replace(recipe.model.sublayers["full_attention"], topk=7)
    residual = dataclasses.replace(recipe.model.residual, block_size=4)
    assert value == dataclasses.replace(
        recipe, model=small.replace(recipe.model, full_attention=full, residual=residual)
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--widht", "3"], "Unrecognized options: --widht, 3; Perhaps you meant: --width INT"),
        (["--floor", "3"], "--schedule.floor FLOAT"),
        (["--width", "wide"], "--width: invalid literal for int"),
        (["--mode", "c"], "invalid choice"),
        (["--width"], "Missing value"),
        (["extra"], "extra"),
    ],
)
def test_a_mistake_is_a_line_that_names_the_nearest(capsys, args, message):
    with pytest.raises(ValueError, match=r"--help$") as error:
        override(Example(8), *args)
    assert message in str(error.value)
    assert not set("\n│─╭╰|+") & set(str(error.value))
    assert "---" not in str(error.value)
    assert capsys.readouterr() == ("", "")


def test_help_is_plain_text_with_values(capsys):
    with pytest.raises(SystemExit) as end:
        config.override(Example(8), ["--help"], prog="train.py x.py", description="What it does.")
    assert end.value.code == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "usage: train.py x.py" in out
    assert "What it does." in out
    assert "--schedule.steps INT how many, see torch.cos and steps. (default: 10)" in out


def test_every_field_of_the_recipe_is_explained(capsys):
    recipe = config.load_recipe(CONFIGS / "tiny.py")
    with pytest.raises(SystemExit):
        override(recipe, "--help")
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    absent = {"lora", "phases"}  # parts that this recipe does not have
    for name in (
        f.name
        for f in dataclasses.fields(recipe)
        if not dataclasses.is_dataclass(getattr(recipe, f.name))
    ):
        if name in absent:
            continue
        option = f"--{name.replace('_', '-')} "
        explained = out.split(option)[1].split("(default:")[0].split(maxsplit=1)
        assert len(explained) == 2, option


def test_an_absent_part_stays_absent(capsys):
    """The tower of a model of text: no option, and no subcommand, for it."""
    recipe = config.load_recipe(CONFIGS / "tiny.py")
    assert override(recipe, "--steps", "3").model.vision == ()
    with pytest.raises(SystemExit):
        override(recipe, "--help")
    assert "vision" not in capsys.readouterr().out.lower()
    seeing = config.load_recipe(CONFIGS / "tiny_vision.py")
    assert override(seeing, "--model.vision.table-size", "3", "5").model.vision.table_size == (3, 5)
    with pytest.raises(ValueError, match=r"projector\.input_size=256 must be 128"):
        override(seeing, "--model.vision.block.hidden-size", "32")
