"""What a kind of layer from outside of the library must hold, each refused in one line."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn import config, model, params, random, tree
from k31fn.layers import block, kinds, mlp, plain_residual
from k31fn.layers.kind import Flops, Kind, Output, Sublayer, TokenMixer
from k31fn.layers.kind_checks import check_kind
from k31fn.model.parts import find_part, parts
from k31fn.params import Normal, ParamSpec
from k31fn.trainer import folder
from tests import small

D = 8


@dataclass(frozen=True)
class Config:
    """A mixer's."""

    hidden_size: int = D


@tree.dataclass
class Params:
    """A mixer's, of no other module."""

    w: Any


def specs(cfg: Config) -> Params:
    size = cfg.hidden_size
    return Params(ParamSpec((size, size), ("", ""), Normal(0.1), tags=frozenset({"matrix"})))


def apply(p: Params, x: Tensor, cfg: Config, **options: Any) -> Output:
    return Output(x @ p.w)


KIND = TokenMixer(
    name="mine", config=Config, specs=specs, apply=apply, flops=lambda cfg, length: Flops()
)


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of the process as it was, after each test."""
    monkeypatch.setattr(kinds, "_BY_NAME", dict(kinds._BY_NAME))
    monkeypatch.setattr(kinds, "_BY_CONFIG", dict(kinds._BY_CONFIG))


def refused(**changes: Any) -> str:
    """What ``register`` says of the kind with these fields."""
    kind = dataclasses.replace(KIND)
    for name, value in changes.items():
        object.__setattr__(kind, name, value)  # the constructor's types are checked in tests alone
    with pytest.raises(ValueError, match="kind") as error:
        kinds.register(kind)
    said = str(error.value)
    assert "\n" not in said
    return said


def model_of(cfg: Any) -> model.Config:
    return model.Config(
        vocab_size=16,
        hidden_size=D,
        sublayers=model.Sublayers(mine=cfg, dense=mlp.Config(D, 8)),
        layers=(("mine", "dense"),),
        residual=plain_residual.Config(),
    )


def test_the_kinds_of_the_library_pass():
    for kind in kinds.names(Kind).values():
        check_kind(kind)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda y: y, "kind 'mine': apply returned a Tensor, which must be an Output"),
        (lambda y: (y, ()), "kind 'mine': apply returned a tuple, which must be an Output"),
        (lambda y: Output(y, ()), r"returned Output\.aux=\(\), which must be an Aux"),
        (lambda y: Output(None), r"Output\.y of type NoneType, which must be a tensor"),
        (
            lambda y: Output(y[..., :3]),
            r"Output\.y of shape \[1, 2, 3\], which must be .* \[1, 2, 8\]",
        ),
    ],
)
@pytest.mark.parametrize("role", ["mixer", "ffn"])
def test_what_apply_returns(result: Any, said: str, role: str):
    """Of both roles, instead of an error where the residual is added."""
    mixer, ffn = KIND, mlp.KIND
    if role == "mixer":
        mixer = dataclasses.replace(KIND, apply=lambda p, x, cfg, **_: result(x))
    else:
        said = said.replace("'mine'", "'mlp'")
        ffn = dataclasses.replace(mlp.KIND, apply=lambda p, x, cfg, **_: result(x))
    kinds.register(mixer)
    kinds._BY_CONFIG[mlp.Config] = ffn
    cfg = block.Config(Config(), mlp.Config(D, 8), plain_residual.Config())
    weights = params.init(block.specs(cfg), random.key(0), dtype=torch.float32)
    state = plain_residual.start(torch.ones(1, 2, D), cfg.residual)
    with pytest.raises(ValueError, match=said):
        block.apply(weights, state, cfg)


def test_a_kind_of_the_library_stays():
    with pytest.raises(ValueError, match="kind 'mlp' is the library's, which no recipe may change"):
        kinds.register(dataclasses.replace(mlp.KIND, apply=apply))
    assert kinds.kind_of(mlp.Config(D, 8)) is mlp.KIND


def test_parameters_that_no_pattern_fits_are_counted_under_the_title():
    kinds.register(dataclasses.replace(KIND, label="Mine", parts=(("gate", "gates"),)))
    cfg = model_of(Config())
    assert parts(cfg)[:3] == ("embedding", "gates", "Mine")
    assert find_part(cfg)("layers.0.attn.w") == "Mine"
    assert "KDA" in parts(small.config())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (mlp, r"not 'k31fn\.layers\.mlp'; pass the KIND"),
        (Config, "not 'Config'; pass the KIND"),
        (Config(), "not a Config; pass the KIND"),
        (Kind(name="mine", config=Config, specs=specs), "not a Kind; pass the KIND"),
        (Sublayer(name="mine", config=Config, specs=specs, apply=apply), "not a Sublayer"),
    ],
)
def test_what_is_no_kind_of_a_role(given: Any, said: str):
    with pytest.raises(ValueError, match=f"register takes a TokenMixer, .*{said}"):
        check_kind(given)  # register's type is checked in tests alone


def test_a_kind_of_a_subclass_is_called_by_its_role():
    class Special(TokenMixer):
        """A user's class of kinds."""

    fields = {f.name: getattr(KIND, f.name) for f in dataclasses.fields(KIND)}
    kinds.register(Special(**fields))
    with pytest.raises(ValueError, match="mine is a token mixer, not a channel mixer; use one of"):
        kinds.channel_mixer_of(Config())


def test_fields_of_a_kind():
    assert "kind name=None must be an identifier" in refused(name=None)
    assert "kind 'mine': apply=None must be a function" in refused(apply=None)
    assert "kind 'mine': extend=3 must be a function" in refused(extend=3)
    assert "must be a frozen dataclass, the class itself" in refused(config=Config())
    for splits in ("tp", {"tp"}, frozenset({"fsdp"})):
        assert f"splits={splits!r} must be a frozenset of 'tp' and 'cp'" in refused(splits=splits)


def test_fields_of_a_config():
    @dataclass(frozen=True)
    class NoWidth:
        window: int = 3

    @dataclass(frozen=True)
    class Inside:
        names: list[str]

    @dataclass(frozen=True)
    class Table:
        hidden_size: int
        table: dict[str, int] | None = None

    @dataclass(frozen=True)
    class Nested:
        hidden_size: int
        inside: Inside

    assert "NoWidth has no hidden_size" in refused(config=NoWidth)
    assert re.search(r"Table\.table has the type dict\[str, int\] \| None", refused(config=Table))
    assert re.search(r"Nested\.inside has the type .*Inside", refused(config=Nested))


def test_one_config_class_and_one_label_have_one_kind():
    kinds.register(KIND)
    kinds.register(KIND)  # a recipe may be run twice
    assert "is that of kind 'mine', and one class has one kind" in refused(name="other")

    @dataclass(frozen=True)
    class Other(Config):
        """Of another kind."""

    said = refused(name="other", config=Other, label="kda")
    assert "label='kda' is that of kind 'kda' in tables and metrics" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"specs": lambda cfg: Params(3)}, "specs has w of type int, which must be a ParamSpec"),
        ({"specs": lambda cfg: Config()}, "specs has its result of type Config, which must be"),
        ({"reports": lambda cfg: frozenset({"loss"})}, "reports has 'loss', which must be of the"),
    ],
)
def test_claims_that_need_a_config(changes: Any, said: str):
    kinds.register(dataclasses.replace(KIND, **changes))
    with pytest.raises(ValueError, match=rf"sublayers\['mine'\]: kind 'mine': {said}"):
        model.Sublayers(mine=Config())


def test_names_of_sublayers():
    with pytest.raises(ValueError, match=r"sublayers\['a-b'\]: a name must be an identifier"):
        model.Sublayers(**{"a-b": mlp.Config(D, 8)})


def test_a_value_that_cannot_be_written_leaves_no_run_folder(tmp_path: Any):
    @dataclass(frozen=True)
    class Ring:
        hidden_size: int
        offsets: tuple[int, ...]

    kinds.register(dataclasses.replace(KIND, config=Ring))
    recipe = config.load_recipe("configs/tiny.py")
    offsets: Any = [1, 2]
    recipe = dataclasses.replace(recipe, model=model_of(Ring(D, offsets)))
    with pytest.raises(ValueError, match=r"Ring\.offsets=\[1, 2\] cannot be a list"):
        folder.new(tmp_path, recipe)
    assert not list(tmp_path.iterdir())
