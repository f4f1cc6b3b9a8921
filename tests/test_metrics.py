"""metrics.jsonl: what is written is read, nothing half a record; and the terminal's line.

TensorBoard beside it.
"""

import importlib.util
import json
import math
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from k31fn import metrics, trackers

RECORD = {
    "step": 120,
    "train/loss": 1.8432,
    "train/indexer_kl": 0.0123,
    "grad_norm": 0.512,
    "lr": 0.0049,
    "tokens_per_second": 4213.4,
    "moe/load_max_over_mean": 1.32,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_what_is_appended_is_read(path: Path) -> None:
    records = [RECORD, {"step": 121, "note": "naïve\n text", "skipped": True, "train/loss": 1e-300}]
    for record in records:
        metrics.append(path, record)
    assert metrics.read(path) == records
    assert path.read_bytes().count(b"\n") == 2


def test_numbers_that_are_not_finite_are_strict_json_and_come_back(path: Path) -> None:
    metrics.append(path, {"step": 0, "a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (record,) = metrics.read(path)
    assert math.isnan(record["a"])
    assert (record["b"], record["c"]) == (math.inf, -math.inf)


def test_a_torn_last_line_is_left_out_and_a_torn_line_inside_is_an_error(path: Path) -> None:
    for step in range(3):
        metrics.append(path, {"step": step, "x": 0.5})
    whole = path.read_bytes()
    for length in range(
        len(whole) - 14, len(whole)
    ):  # every place within the last line, up to its end
        path.write_bytes(whole[:length])
        assert [r["step"] for r in metrics.read(path)] == [0, 1]
    path.write_bytes(whole[:5] + b"\n" + whole)
    with pytest.raises(ValueError, match=r"metrics\.jsonl:1: not a metrics record"):
        metrics.read(path)


@pytest.mark.parametrize("line", [b"[]", b"3", b'{"loss": 1}', b'{"step": "1"}', b"\xff"])
def test_a_line_that_is_no_record_is_named(path: Path, line: bytes) -> None:
    metrics.append(path, {"step": 0})
    with path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        metrics.read(path)


def test_rewind_removes_later_steps_and_a_torn_line(path: Path) -> None:
    metrics.rewind(path, 0)  # no file yet
    assert not path.exists()
    for step in (0, 1, 2, 3, 4):
        metrics.append(path, {"step": step})
    before = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"step": 5, "tr')
    metrics.rewind(path, 3)
    assert path.read_bytes() == before[: before.index(b'{"step": 3}')]
    metrics.append(path, {"step": 3})
    assert [r["step"] for r in metrics.read(path)] == [0, 1, 2, 3]
    assert [p.name for p in path.parent.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"train/loss": 1.0}, "step=None"),
        ({"step": -1}, "step=-1"),
        ({"step": 1.0}, "step=1.0"),
        ({"step": 1, "x": [1]}, r"x=\[1\] \(list\)"),
    ],
)
def test_bad_records_are_refused_and_nothing_is_written(
    path: Path, record: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.append(path, record)
    assert not path.exists()


def test_a_record_that_does_not_fit_on_the_disk_leaves_no_half_line(path: Path) -> None:
    metrics.append(path, {"step": 0})
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
    try:
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            metrics.append(path, {"step": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    metrics.append(path, {"step": 1})
    assert [r["step"] for r in metrics.read(path)] == [0, 1]


def test_a_missing_file_is_one_clear_error(path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics\.jsonl' is not a file"):
        metrics.read(path)


def test_step_line_reads_as_documented() -> None:
    assert metrics.step_line(RECORD, 1000) == (
        "step   120/1000  loss  1.8432  kl  0.0123  grad  0.5120  lr  0.0049      4,213 tok/s  "
        "load  1.3200"
    )
    assert metrics.step_line({"step": 3, "train/loss": 2.0}) == "step     3  loss  2.0000"


@pytest.mark.parametrize(
    "value", [0.0, 1.2e-5, 9.9995e-4, 1.0, 12.34567, 99.99999, 123.4567, 99999.96, 1e6, 3e38]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_lines_of_one_run_stand_in_columns(value: float, sign: int) -> None:
    width = len(metrics.step_line(RECORD, 1000))
    wider = (
        sign < 0 and "e" in metrics.step_line({"step": 0, "lr": -value})[11:]
    )  # the sign before an exponent
    for changed in (
        {"train/loss": sign * value},
        {"step": 9},
        {"train/loss": math.nan},
        {"tokens_per_second": 9.0},
    ):
        line = metrics.step_line(RECORD | changed, 1000)
        assert len(line) == width + (wider and changed.get("train/loss") == sign * value)
    shown = float(metrics.step_line({"step": 0, "train/loss": sign * value}).split()[-1])
    assert shown == pytest.approx(sign * value, rel=0.05)  # two digits at least


needs_tensorboard = pytest.mark.skipif(
    not importlib.util.find_spec("tensorboard"), reason="no tensorboard"
)


@needs_tensorboard
def test_tensorboard_events_hold_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = trackers.tensorboard(tmp_path, warn=pytest.fail)
    tracker.log(7, {"step": 7, "train/loss": 1.5, "note": "text", "skipped": True})
    tracker.log(8, {"step": 8, "train/loss": 1.25})
    tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(7, 1.5), (8, 1.25)]


@needs_tensorboard
def test_tensorboard_hides_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed_at, steps in ((None, range(6)), (3, range(3, 5))):
        tracker = trackers.tensorboard(tmp_path, warn=pytest.fail, resumed_at=resumed_at)
        for step in steps:
            tracker.log(step, {"x": float(resumed_at or 0)})
        tracker.close()
    events = EventAccumulator(str(tmp_path), purge_orphaned_data=True).Reload().Scalars("x")
    assert [(e.step, e.value) for e in events] == [(0, 0), (1, 0), (2, 0), (3, 3), (4, 3)]


def test_without_tensorboard_a_run_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # an import of it fails
    lines: list[str] = []
    tracker = trackers.tensorboard(tmp_path / "events", warn=lines.append)
    tracker.log(1, {"train/loss": 1.0})
    tracker.close()
    (line,) = lines
    assert "no TensorBoard events" in line
    assert "k31fn[train]" in line
    assert not (tmp_path / "events").exists()


class StandIn:
    """What the packages of both services have: ``init``, ``log`` and ``finish``."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self._fails = fails

    def _called(self, name: str, what: Any) -> str:
        if name == self._fails:
            raise RuntimeError("no network")
        self.calls.append((name, what))
        return "run"

    def init(self, **options: Any) -> str:
        return self._called("init", options)

    def log(self, numbers: dict[str, float], *, step: int) -> None:
        self._called("log", (step, numbers))

    def finish(self) -> None:
        self._called("finish", ())


def open_service(
    name: Any, package: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warn: Any
) -> Any:
    monkeypatch.setitem(sys.modules, name, package)
    return trackers.service(
        name, project="tiny", run="t0", config={"steps": 3}, directory=tmp_path, warn=warn
    )


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_the_finite_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = StandIn()
    tracker = open_service(name, package, monkeypatch, tmp_path, pytest.fail)
    both = trackers.Several([tracker, trackers.NoTracker()])
    both.log(7, {"step": 7, "train/loss": 1.5, "x": float("nan"), "text": "y", "skipped": 0})
    both.close()
    options = {"project": "tiny", "name": "t0", "config": {"steps": 3}, "resume": "allow"}
    more = {"id": "tiny-t0", "dir": str(tmp_path)} if name == "wandb" else {}
    assert package.calls == [
        ("init", options | more),
        ("log", (7, {"train/loss": 1.5, "skipped": 0})),
        ("finish", ()),
    ]


def test_a_service_that_fails_is_told_once_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    package = StandIn(fails="log")
    tracker = open_service("wandb", package, monkeypatch, tmp_path, lines.append)
    for step in range(3):
        tracker.log(step, {"step": step, "x": 1.0})
    tracker.close()
    assert lines == ["wandb gets no more metrics: RuntimeError: no network"]
    assert [name for name, _ in package.calls] == ["init"]
    with pytest.raises(OSError, match="wandb cannot begin a run: RuntimeError: no network"):
        open_service("wandb", StandIn(fails="init"), monkeypatch, tmp_path, pytest.fail)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ImportError,
        match=r"trackers=\['wandb'\].*pip install wandb, or leave 'wandb' out of trackers",
    ):
        trackers.check(["wandb"])
    trackers.check([])
