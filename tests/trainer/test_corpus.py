"""Prepared data of a run: what is said of it, and what ends the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k31fn import data, trainer
from k31fn.data.prepare import Config, prepare
from tests.trainer import runs


@pytest.fixture
def out(tmp_path: Path) -> Path:
    rows = [{"text": f"document {i} " * (1 + i % 5)} for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(Config(str(tmp_path / "a.jsonl"), heldout_fraction=0.2), tmp_path / "out")
    return tmp_path / "out"


def prepared(out: Path) -> data.Prepared:
    return data.Prepared((str(out / "train"),), (str(out / "heldout"),))


def test_stores_without_checksums_are_said_to_be_unchecked(out: Path):
    recipe = runs.recipe("unused", data=prepared(out))
    assert trainer.load_corpus(recipe).notes == ()
    index = json.loads((out / "train" / "index.json").read_text())
    for entry in index["shards"]:
        del entry["checksums"]
    (out / "train" / "index.json").write_text(json.dumps(index))
    (note,) = trainer.load_corpus(recipe).notes
    assert note == (
        f"{out / 'train'}: 1 shards of an earlier version, without checksums, are unchecked; "
        "prepare it again to have them"
    )


@pytest.mark.usefixtures("unchecked")
def test_a_flipped_bit_ends_a_run_with_a_line(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Before the first step, since all tokens of this store are one block."""
    file = out / "shard-000000" / "train" / "tokens.npy"
    damaged = bytearray(file.read_bytes())
    damaged[-40] ^= 1
    file.write_bytes(damaged)
    config = runs.write_config(tmp_path / "small.py", runs.recipe("unused", data=prepared(out)))
    assert trainer.main([config, "--runs", str(tmp_path / "runs"), "--device", "cpu"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"train.py: {file} is damaged, bytes 0 to ")
    assert not list((tmp_path / "runs").glob("*/*/metrics.jsonl"))
