"""JSON is read strictly and within bounds, and an error says where."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from k31fn import metrics, strict_json
from k31fn.checkpoint import step_folders
from k31fn.config import load_recipe
from k31fn.data import open_store, open_tokenizer
from k31fn.hf_format import files
from k31fn.hf_format.config import config_from_hf

DEEP = "[" * 100_000 + "]" * 100_000


def test_what_is_json_comes_back():
    value = {"a": [1, -2.5, 1e300, True, None, "ü\n"], "b": {"c": [[], {}]}, "": "x"}
    assert strict_json.parse(json.dumps(value).encode(), "x") == value
    assert strict_json.parse('"\\ud800"', "x") == "\ud800"  # whose text it is must say more
    # with the mark that programs on Windows put in front
    assert strict_json.parse(json.dumps(value).encode("utf-8-sig"), "x") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": {"b": 1, "c": [{"d": 1, "e": 0, "d": 2}]}}', "x:7: a.c[0].d is given twice"),
        ('{"a": [0, NaN]}', "x:7: a[1] is NaN, which JSON has not"),
        ("-Infinity", "x:7: the value is -Infinity, which JSON has not"),
        ('{"lr": 1e999}', "x:7: lr is 1e999, too large for a number"),
        ("[" + "1" * 5000 + "]", "x:7 is not JSON in UTF-8: Exceeds the limit"),
        ("[1,", "x:7 is not JSON: Expecting value at column 4"),
        ("[1,\n 2 3]", "x:7 is not JSON: Expecting ',' delimiter at line 2, column 4"),
        ("", "x:7 is not JSON: Expecting value at column 1"),
        (DEEP, "x:7: objects and lists are nested more than 100 deep"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "x:7: objects and lists are nested more than 100"),
    ],
)
def test_what_is_none_is_named(text: str, message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        strict_json.parse(text, "x:7")


def test_not_utf_8():
    with pytest.raises(ValueError, match=r"^x is not JSON in UTF-8: .*0xff in position 1"):
        strict_json.parse(b'"\xff"', "x")


def test_the_depth_is_exact():
    """Also where a field of text has many brackets, which are none."""
    for depth, right in ((strict_json.DEPTH, True), (strict_json.DEPTH + 1, False)):
        text = '{"a": "' + "[" * 300 + '", "b": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"
        if right:
            assert strict_json.parse(text, "x")["a"] == "[" * 300
        else:
            with pytest.raises(ValueError, match="more than 100 deep"):
                strict_json.parse(text, "x")
    wide = "[" + ",".join(["[[]]"] * 1000) + "]"
    assert len(strict_json.parse(wide, "x")) == 1000


def test_not_finite_where_it_may_stand():
    found = strict_json.parse("[NaN, Infinity, -Infinity]", "x", not_finite=True)
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf]
    # A number that is too large was not meant to be infinite.
    with pytest.raises(ValueError, match="too large"):
        strict_json.parse("[1e999]", "x", not_finite=True)


def test_an_object_of_a_file(tmp_path: Path):
    file = tmp_path / "a.json"
    file.write_text('{"a": 1}')
    assert strict_json.load_object(file, most=8) == {"a": 1}
    with pytest.raises(ValueError, match=r"a\.json': it has more than 7 bytes"):
        strict_json.load_object(file, most=7)
    file.write_text("[]")
    with pytest.raises(ValueError, match=r"a\.json must hold a JSON object, it holds a list"):
        strict_json.load_object(file)


def test_every_door_refuses_deep_json_with_its_file(tmp_path: Path):
    """A config of ours and of others, a tokenizer's, a store's index, a manifest, metrics."""
    deep = '{"version": 1, "text_config": ' + DEEP + "}"
    doors = {
        "config.json": lambda: load_recipe(tmp_path / "config.json"),
        "hf/config.json": lambda: config_from_hf(tmp_path / "hf"),
        "hf/model.safetensors.index.json": lambda: _refuse(files.survey(tmp_path / "hf")[1]),
        "t/tokenizer_config.json": lambda: open_tokenizer(tmp_path / "t"),
        "s/index.json": lambda: open_store(tmp_path / "s"),
    }
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_text("{}")
    for name, door in doors.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(deep)
        with pytest.raises(ValueError, match=rf"{re.escape(name)}.* nested more than 100 deep"):
            door()
    (tmp_path / "30").mkdir()
    (tmp_path / "30" / "manifest.json").write_text(deep)
    with pytest.raises(step_folders.DamagedError, match="nested more than 100 deep"):
        step_folders.read_manifest(tmp_path, 30)
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n{"step": 1, "x": ' + DEEP + "}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a metrics record: .* 100 deep"):
        metrics.read(file)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError("; ".join(problems))
