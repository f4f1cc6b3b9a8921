"""The picture of time against length takes the rows of one shape, in order of tokens."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import against_length


def row(shape: str, name: str, both: float | None) -> dict[str, object]:
    return {"shape": shape, "name": name, "both": both, "both_floor": 1.0, "peak_bytes": 2**30}


ROWS = [
    row("T8 H2 a", "ours", 2.0),
    row("T4 H2 a", "ours", 1.0),
    row("T8 H2 b", "ours", 9.0),  # another kind of input
    row("T16 H2 a", "peer", None),  # did not run
]


def test_rows_by_length():
    series = against_length.by_length(ROWS)
    assert list(series) == ["ours"]
    assert [(n, r["both"]) for n, r in series["ours"]] == [(4, 1.0), (8, 2.0)]


def test_picture_and_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    results = tmp_path / "r.json"
    results.write_text(json.dumps({"op": "x", "hardware": "h", "versions": {}, "rows": ROWS}))
    picture = tmp_path / "p.png"
    monkeypatch.setattr(sys, "argv", ["against_length", str(results), str(picture)])
    assert against_length.main() == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.glob("*.tmp.png")) == []
    results.write_text(json.dumps({"op": "x", "hardware": "h", "versions": {}, "rows": ROWS[:1]}))
    with pytest.raises(SystemExit):
        against_length.main()
    assert "at two lengths or more" in capsys.readouterr().err
