"""Configs as data and as files: the round trip, and one clear error per kind of mistake."""

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch

from k31fn import config, model
from k31fn.layers import dsa, mla, plain_residual
from tests import small

CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True)
class Cosine:
    steps: int
    floor: float = 0.1


@dataclass(frozen=True)
class Constant:
    pass


@dataclass(frozen=True)
class Example:
    schedule: Cosine | Constant
    dtype: torch.dtype = torch.bfloat16
    mode: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = ()
    pair: tuple[str, float] = ("x", 1.0)
    nested: tuple[Cosine | Constant, ...] = ()
    limit: int | None = None
    warmup: int | float = 0
    extra: Cosine | None = None
    flag: bool = False


FULL = Example(
    schedule=Cosine(10),
    dtype=torch.float64,
    mode="b",
    sizes=(1, 2),
    pair=("y", 0.5),
    nested=(Constant(), Cosine(3, 0.0)),
    limit=7,
    warmup=0.5,
    extra=Cosine(1),
    flag=True,
)


@pytest.mark.parametrize("value", [FULL, Example(Constant())])
def test_round_trip_through_json(value):
    data = config.to_dict(value)
    again = config.from_dict(Example, json.loads(json.dumps(data)))
    assert again == value
    assert [type(getattr(again, f.name)) for f in dataclasses.fields(again)] == [
        type(getattr(value, f.name)) for f in dataclasses.fields(value)
    ]


def test_what_is_written():
    data = config.to_dict(FULL)
    assert data["schedule"] == {"kind": "Cosine", "steps": 10, "floor": 0.1}
    assert data["nested"] == [{"kind": "Constant"}, {"kind": "Cosine", "steps": 3, "floor": 0.0}]
    assert data["dtype"] == "float64"
    assert data["extra"] == {"steps": 1, "floor": 0.1}  # only one class is possible: no tag


def test_an_integer_serves_as_a_float():
    value = config.from_dict(Cosine, {"steps": 1, "floor": 1})
    assert type(value.floor) is float
    with pytest.raises(ValueError, match=r"floor=10+ \(int\) must be of a float's size"):
        config.from_dict(Cosine, {"steps": 1, "floor": 10**400})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"schedule": {"kind": "Cosine", "stepz": 1}},
            r"schedule\.stepz is not a field of \S*Cosine; nearest: steps",
        ),
        (
            {"schedule": {"kind": "Constant"}, "size": []},
            r"size is not a field of \S*Example; nearest: sizes",
        ),
        (
            {"schedule": {"kind": "Linear"}},
            r"schedule\.kind='Linear' must be one of \['Constant', 'Cosine'\]",
        ),
        ({"schedule": {"steps": 1}}, r"schedule\.kind=None must be one of"),
        ({"schedule": {"kind": "Cosine"}}, r"Cosine lacks schedule\.steps"),
        ({}, r"Example lacks schedule"),
        ({"schedule": 3}, r"schedule=3 \(int\) must be \S*Cosine or \S*Constant"),
        ({"schedule": {"kind": "Constant"}, "mode": "c"}, r"mode='c' must be one of \['a', 'b'\]"),
        (
            {"schedule": {"kind": "Constant"}, "dtype": "bf16"},
            r"dtype='bf16' \(str\) must be the name of a torch dtype",
        ),
        (
            {"schedule": {"kind": "Constant"}, "dtype": "load"},
            r"dtype='load' \(str\) must be the name of a torch dtype",
        ),
        ({"schedule": {"kind": "Constant"}, "flag": 1}, r"flag=1 \(int\) must be bool"),
        (
            {"schedule": {"kind": "Cosine", "steps": True}},
            r"schedule\.steps=True \(bool\) must be int",
        ),
        (
            {"schedule": {"kind": "Cosine", "steps": "4"}},
            r"schedule\.steps='4' \(str\) must be int",
        ),
        (
            {"schedule": {"kind": "Constant"}, "sizes": [1, 2.5]},
            r"sizes\[1\]=2\.5 \(float\) must be int",
        ),
        ({"schedule": {"kind": "Constant"}, "sizes": 4}, r"sizes=4 \(int\) must be a list"),
        (
            {"schedule": {"kind": "Constant"}, "pair": ["x"]},
            r"pair=\['x'\] must have 2 elements, it has 1",
        ),
        (
            {"schedule": {"kind": "Constant"}, "limit": "4"},
            r"limit='4' \(str\) must be int or null",
        ),
        ([], r"Example=\[\] \(list\) must be the fields of"),
    ],
)
def test_bad_data_is_one_clear_error(data, message):
    with pytest.raises(ValueError, match=message):
        config.from_dict(Example, data)


def test_all_unknown_fields_are_named_at_once():
    with pytest.raises(ValueError, match=r"a is not a field of .*; b is not a field of"):
        config.from_dict(Constant, {"a": 1, "b": 2})


@pytest.mark.parametrize("name", ["tiny", "k3", "k31_pro", "k31_pro_reduced_npu"])
def test_model_configs_round_trip(name):
    cfg = config.load(CONFIGS / f"{name}.py")
    data = json.loads(json.dumps(config.to_dict(cfg)))
    assert config.from_dict(model.Config, data) == cfg


def test_model_config_kinds():
    cfg = config.load(CONFIGS / "k31_pro.py")
    assert config.to_dict(cfg)["sublayers"]["full_attention"]["kind"] == "dsa"
    assert isinstance(cfg.sublayers["full_attention"], dsa.Config)
    k3 = small.replace(
        cfg, full_attention=cfg.sublayers["full_attention"].attn, residual=plain_residual.Config()
    )
    data = config.to_dict(k3)
    assert (data["sublayers"]["full_attention"]["kind"], data["residual"]) == (
        "mla",
        {"kind": "plain_residual"},
    )
    assert isinstance(config.from_dict(model.Config, data).sublayers["full_attention"], mla.Config)


def test_unknown_model_field():
    data = config.to_dict(config.load(CONFIGS / "tiny.py"))
    data["sublayers"]["moe"]["num_expert"] = 8
    with pytest.raises(
        ValueError,
        match=r"moe\.num_expert is not a field of latent_moe\.Config; nearest: num_experts",
    ):
        config.from_dict(model.Config, data)


def test_a_value_that_the_class_refuses():
    data = config.to_dict(config.load(CONFIGS / "tiny.py"))
    data["sublayers"]["moe"]["top_k"] = data["sublayers"]["moe"]["num_experts"]
    with pytest.raises(ValueError, match="top_k"):
        config.from_dict(model.Config, data)


class TestLoad:
    def test_missing_file_lists_the_others(self):
        with pytest.raises(
            ValueError, match=r"k31\.py' does not exist; in its directory: .*k31_pro\.py"
        ):
            config.load(CONFIGS / "k31.py")

    def test_missing_directory(self, tmp_path):
        with pytest.raises(ValueError, match="does not exist; in its directory: none"):
            config.load(tmp_path / "nowhere" / "a.py")

    def test_other_file_types_are_not_run(self, tmp_path):
        file = tmp_path / "a.txt"
        file.write_text("raise RuntimeError")
        with pytest.raises(ValueError, match="must be a Python file"):
            config.load(file)

    def test_no_model(self, tmp_path):
        file = tmp_path / "a.py"
        file.write_text("model = 3\n")
        with pytest.raises(ValueError, match=r"defines no model\(\)"):
            config.load(file)

    def test_model_of_another_type(self, tmp_path):
        file = tmp_path / "a.py"
        file.write_text("def model():\n    return {}\n")
        with pytest.raises(
            ValueError, match=r"model\(\) returned builtins\.dict, not k31fn\.model\.Config"
        ):
            config.load(file)

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            (b"def model(:", r"a\.py' is not Python: invalid syntax \(a\.py, line 1\)"),
            (b"x = '\xff'", r"a\.py' is not Python: .*utf-8"),
            (b"x = 1\0", r"a\.py' is not Python: .*null bytes"),
            (b"def model(size): ...", r"model\(\) must need no argument: missing .*'size'"),
        ],
    )
    def test_what_is_no_config_is_one_line(self, tmp_path, source, message):
        file = tmp_path / "a.py"
        file.write_bytes(source)
        with pytest.raises(ValueError, match=message) as error:
            config.load(file)
        assert "\n" not in str(error.value)

    def test_a_config_of_hugging_face_is_named(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "kimi_k3"}')
        with pytest.raises(
            ValueError, match=r"not of a run; python -m k31fn\.hf import \S+ CONFIG"
        ):
            config.load(tmp_path / "config.json")

    def test_no_regular_file(self, tmp_path):
        os.mkfifo(tmp_path / "a.py")
        with pytest.raises(ValueError, match="it is a named pipe, not a regular file"):
            config.load(tmp_path / "a.py")

    def test_an_error_of_the_file_comes_through(self, tmp_path):
        file = tmp_path / "a.py"
        file.write_text("def model():\n    return 1 / 0\n")
        with pytest.raises(ZeroDivisionError):
            config.load(file)


def before_layers_had_names(recipe):
    """The data of a recipe of configs/tiny.py as runs wrote it then."""
    data = json.loads(json.dumps(config.to_dict(recipe)))
    slots = data["model"].pop("sublayers")
    for name in ("kda", "dense", "moe"):
        del slots[name]["kind"]
    num_mtp = 1 if data["model"].pop("mtp") else 0
    del data["model"]["layers"]
    counts = {"num_layers": 4, "num_dense_layers": 1, "num_mtp_layers": num_mtp}
    data["model"] |= {**slots, **counts, "full_attention_layers": [3]}
    return data


class TestKinds:
    """Layers in a ``config.json``, by the names of their registered kinds."""

    def test_a_run_from_before_layers_had_names_still_loads(self, tmp_path):
        """It had a slot each for linear attention, full attention, dense and MoE layers."""
        recipe = config.load_recipe(CONFIGS / "tiny.py")
        cfg = small.replace(recipe.model, num_mtp_layers=1)
        recipe = dataclasses.replace(recipe, model=cfg)
        (tmp_path / "config.json").write_text(json.dumps(before_layers_had_names(recipe)))
        assert config.load_recipe(tmp_path / "config.json") == recipe

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("full_attention_layers", 3),
            ("full_attention_layers", None),
            ("full_attention_layers", [3, 9]),
            ("full_attention_layers", ["3"]),
            ("num_layers", "4"),
            ("num_dense_layers", None),
            ("num_mtp_layers", True),
            ("kda", 3),
        ],
    )
    def test_a_wrong_value_of_such_a_run_is_named(self, tmp_path, name, value):
        data = before_layers_had_names(config.load_recipe(CONFIGS / "tiny.py"))
        data["model"][name] = value
        file = tmp_path / "config.json"
        file.write_text(json.dumps(data))
        with pytest.raises(ValueError, match=re.escape(f"model.{name}={value!r} must be")) as error:
            config.load_recipe(file)
        assert "\n" not in str(error.value)

    def test_such_a_run_without_its_number_of_layers_is_refused(self, tmp_path):
        data = before_layers_had_names(config.load_recipe(CONFIGS / "tiny.py"))
        del data["model"]["num_layers"]
        (tmp_path / "config.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match=r"model\.num_layers is missing"):
            config.load_recipe(tmp_path / "config.json")

    def test_an_unknown_kind_is_refused_by_name(self):
        data = config.to_dict(config.load(CONFIGS / "tiny.py"))
        data["sublayers"]["kda"]["kind"] = "retention"
        with pytest.raises(
            ValueError,
            match=r"sublayers\.kda\.kind='retention' is no registered kind; .* kda, gdn, mla",
        ):
            config.from_dict(model.Config, data)
        data["sublayers"]["kda"]["kind"] = "attn_res"
        with pytest.raises(
            ValueError,
            match=r"kind='attn_res' is a residual scheme, not a token mixer or a channel mixer",
        ):
            config.from_dict(model.Config, data)
        data["sublayers"]["kda"]["kind"] = "latent_mo"
        with pytest.raises(ValueError, match=r"is no registered kind; nearest: latent_moe; "):
            config.from_dict(model.Config, data)
        data["sublayers"]["kda"]["kind"] = ["kda"]
        with pytest.raises(
            ValueError, match=r"kda\.kind=\['kda'\] \(list\) must be a name, one of"
        ):
            config.from_dict(model.Config, data)
        del data["sublayers"]["kda"]["kind"]
        with pytest.raises(
            ValueError, match=r"kda\.kind is missing; set it to one of kda, gdn, mla"
        ):
            config.from_dict(model.Config, data)

    def test_a_config_of_another_class_is_not_written(self):
        """It would be read back as what the field declares."""

        @dataclass(frozen=True)
        class Linear:
            steps: int = 1

        with pytest.raises(
            ValueError, match=r"Example\.schedule is a .*Linear, which is not among"
        ):
            config.to_dict(dataclasses.replace(FULL, schedule=Linear()))
        with pytest.raises(ValueError, match=r"Example\.extra is a .*Linear, which is not among"):
            config.to_dict(dataclasses.replace(FULL, extra=Linear()))

    def test_two_sublayers_of_one_kind(self):
        cfg = small.config()
        wide = dataclasses.replace(cfg.sublayers["kda"], head_dim=8)
        two = dataclasses.replace(
            cfg.with_sublayers(wide=wide), layers=(("kda", "moe"), ("wide", "dense"))
        )
        assert config.from_dict(model.Config, config.to_dict(two)) == two
        assert two.used() == ("kda", "dense", "moe", "wide")
        got = config.override(two, ["--wide.head-dim", "16"], prog="x")
        assert (got.sublayers["wide"].head_dim, got.sublayers["kda"].head_dim) == (16, 4)
