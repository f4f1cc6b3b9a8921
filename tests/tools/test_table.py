"""The table of benchmarks is what the JSON files give, or the check fails."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import table

ROW = {
    "shape": "T8",
    "name": "fused, graph",
    "forward": 2.0,
    "both": 5.0,
    "forward_floor": 1.0,
    "both_floor": 3.0,
    "peak_bytes": 3 * 2**20,
    "note": "",
}
FOUND = {
    "op": "Mix",
    "hardware": "a device",
    "versions": {"torch": "2"},
    "rows": [
        ROW,
        ROW | {"name": "eager", "forward": None, "both": None},
        ROW | {"name": "fla, graph"},
    ],
}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["table", *map(str, arguments)])
    return table.main()


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "mix.json").write_text(json.dumps(FOUND))
    (tmp_path / "other.json").write_text("{}")  # of another kind of benchmark
    page = tmp_path / "results.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    return page, tmp_path


def test_written_and_checked(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    page, results = places
    assert run(monkeypatch, page, "--results", results, "--check") == 1
    assert "the table is not that of" in capsys.readouterr().out
    assert "old" in page.read_text()
    assert run(monkeypatch, page, "--results", results) == 0
    assert run(monkeypatch, page, "--results", results, "--check") == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    line = next(row for row in text.splitlines() if row.startswith("| Mix"))
    cells = [c.strip() for c in line.strip("|").split("|")]
    # forward 2 ms of a floor of 1; backward 3 of 2; both 5 of 3; an eager peer that did not run
    shares = ["2.000 ms, 50%", "3.000 ms, 67%", "5.000 ms, 60%"]
    assert cells == ["Mix, T8", *shares, "3 MiB", "-", "-", "-", "2.00 / 5.00"]
    assert "a device (torch 2)" in text
    (results / "mix.json").write_text(json.dumps(FOUND | {"hardware": "another"}))
    assert run(monkeypatch, page, "--results", results, "--check") == 1


def test_a_step_has_one_pass(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    page, results = places
    once = ROW | {"forward": 2.0, "both": 2.0, "forward_floor": 1.0, "both_floor": 1.0}
    found = FOUND | {"rows": [once, once | {"name": "eager", "forward": 4.0, "both": 4.0}]}
    (results / "mix.json").write_text(json.dumps(found))
    assert run(monkeypatch, page, "--results", results) == 0
    line = next(row for row in page.read_text().splitlines() if row.startswith("| Mix"))
    cells = [c.strip() for c in line.strip("|").split("|")]
    assert cells[1:6] == ["2.000 ms, 50%", "-", "2.000 ms, 50%", "3 MiB", "4.00"]


def test_no_place(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, results = places
    page.write_text(table.BEGIN)
    with pytest.raises(SystemExit):
        run(monkeypatch, page, "--results", results)
    assert (
        "no place for the table; write a line <!-- benchmarks: begin -->" in capsys.readouterr().err
    )
    assert page.read_text() == table.BEGIN


def test_no_result_is_refused(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    page, results = places
    before = page.read_text()
    with pytest.raises(SystemExit):
        run(monkeypatch, page, "--results", results / "none")
    assert page.read_text() == before


def test_committed_results_give_a_table() -> None:
    found = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(table.RESULTS.glob("*.json"))
    ]
    some = [r for r in found if "rows" in r and "op" in r]
    assert {r["op"] for r in some} >= {"AttnRes", "mHC round"}
    assert table.render(some).count("|---") == 9
