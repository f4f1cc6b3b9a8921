"""The plots hold the runs' numbers, smoothing does not lag, and mistakes are one clear error
each.
"""

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from k31fn import metrics, plot

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="no matplotlib")


def make_run(folder: Path, losses: list[float], **more: float) -> Path:
    folder.mkdir(parents=True)
    for step, loss in enumerate(losses):
        record = {"step": step, "train/loss": loss, **more}
        if step % 10 == 9:
            record["heldout/loss"] = loss + 0.1
        metrics.append(folder / "metrics.jsonl", record)
    return folder


def test_save_loss_plot_writes_a_picture_and_nothing_else(tmp_path: Path) -> None:
    run = make_run(tmp_path / "tiny" / "t0", list(np.linspace(5.5, 1.5, 40)))
    assert plot.save_loss_plot(run) == run / "loss.png"
    data = (run / "loss.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert width >= 1200
    assert height >= 600
    assert sorted(p.name for p in run.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_figure_holds_the_numbers_of_each_run(tmp_path: Path) -> None:
    runs = {
        "tiny/t0": [{"step": i, "train/loss": 3.0 - i / 10} for i in range(10)]
        + [{"step": 9, "heldout/loss": 2.5}],
        "tiny/t1": [
            {"step": i, "train/loss": 2.0, "train/indexer_kl": 0.1, "moe/load_max_over_mean": 1.5}
            for i in (0, 1)
        ],
    }
    loss, kl, load = plot._draw(runs).axes
    labels = [t.get_text() for t in loss.get_legend().get_texts()]
    assert labels == ["tiny/t0 train", "tiny/t0 held out, last 2.500", "tiny/t1 train"]
    raw = [line for line in loss.get_lines() if line.get_alpha() is not None]
    np.testing.assert_array_equal(raw[0].get_xydata(), [(i, 3.0 - i / 10) for i in range(10)])
    colours = [line.get_color() for line in loss.get_lines()]
    assert colours == ["C0", "C0", "C0", "C1", "C1"]
    np.testing.assert_array_equal(kl.get_lines()[-1].get_xydata(), [(0, 0.1), (1, 0.1)])
    np.testing.assert_array_equal(load.get_lines()[-1].get_xydata(), [(0, 1.5), (1, 1.5)])
    assert len(plot._draw({"tiny/t0": runs["tiny/t0"]}).axes) == 1  # no empty panels


def test_smoothing_keeps_lines_straight_and_averages_noise() -> None:
    line = np.linspace(5.0, 1.0, 500)
    smooth = plot._smooth(line)
    np.testing.assert_allclose(
        smooth[:490], line[:490], rtol=0, atol=1e-12
    )  # a trailing mean would be 10 steps late
    noise = np.random.default_rng(0).normal(size=500)
    assert plot._smooth(noise)[20:480].std() < 0.35 * noise.std()  # 1/sqrt(21) = 0.22
    np.testing.assert_allclose(plot._smooth(noise)[250], noise[240:261].mean())
    for few in ([], [1.0], [1.0, 2.0]):
        np.testing.assert_array_equal(plot._smooth(np.array(few)), few)


def test_a_spike_or_nan_does_not_hide_the_curve(tmp_path: Path) -> None:
    losses = list(np.linspace(5.5, 1.5, 1000))
    losses[500], losses[501] = 1e4, float("nan")
    records = [{"step": i, "train/loss": x} for i, x in enumerate(losses)]
    figure = plot._draw({"a/b": [*records, {"step": 1000, "train/loss": float("inf")}]})
    assert figure.axes[0].get_ylim()[1] < 1e3
    assert np.isfinite(figure.axes[0].get_lines()[0].get_ydata()).all()


@pytest.mark.parametrize(
    "losses",
    [[2.0], [2.0, 2.0], [0.0, 0.0], [-1.0, 1.0], [float("nan")] * 3],
    ids=["one", "flat", "zero", "negative", "nan"],
)
def test_odd_runs_are_drawn_without_a_warning(tmp_path: Path, losses: list[float]) -> None:
    run = make_run(tmp_path / "a" / "b", losses, **{"train/indexer_kl": 0.0})
    assert plot.save_loss_plot(run).exists()


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / name / "t0", [3.0, 2.0]) for name in ("tiny", "wide")]
    out = tmp_path / "both.svg"
    assert plot.main([*map(str, runs), "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    assert "<svg" in out.read_text()
    made = tmp_path / "a" / "folder" / "that is missing.svg"
    assert plot.main([str(runs[0]), "--out", str(made)]) == 0
    assert "<svg" in made.read_text()


def test_the_picture_is_beside_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    runs = [make_run(tmp_path / "tiny" / name, [3.0, 2.0]) for name in ("t0", "t1")]
    for given, place in ((runs[:1], runs[0]), (runs, tmp_path / "tiny")):
        assert plot.main([*map(str, given)]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == str(place / "loss.png")
        assert (place / "loss.png").exists()
    assert not list(here.iterdir())


def test_a_full_disk_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    run = make_run(tmp_path / "tiny", [3.0, 2.0])
    monkeypatch.setattr(os, "replace", full)
    assert plot.main([str(run), "--out", str(tmp_path / "x.png")]) == 2
    text = f"k31fn.plot: {tmp_path}/x.png: [Errno 28] No space left on device\n"
    assert capsys.readouterr().err == text


def test_of_a_folder_of_runs_the_newest_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("20260101-120000-9", "20260101-120000-10", "20250101-120000"):
        make_run(tmp_path / "tiny" / name, [3.0, 2.0])
    assert plot.main([str(tmp_path / "tiny"), "--out", str(tmp_path / "x.svg")]) == 0
    assert "20260101-120000-10" in capsys.readouterr().out


def test_the_table_has_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = list(np.linspace(5.0, 1.0, 41))
    rates = {"tokens_per_second": 1500.0, "mfu": 0.1234, "skipped": 1, "grad_norm": 0.5}
    runs = [
        make_run(tmp_path / "a" / "t0", losses, **rates),
        make_run(tmp_path / "b" / "t0", [3.0, 2.0]),
    ]
    assert plot.main([*map(str, runs), "--out", str(tmp_path / "x.png")]) == 0
    head, first, second, _ = capsys.readouterr().out.splitlines()
    assert (
        " ".join(head.split())
        == "run steps train loss held out KL load grad norm tokens/s MFU skipped"
    )
    last, held_out = np.mean(losses[-4:]), losses[39] + 0.1
    assert first.split() == [
        "a/t0",
        "41",
        f"{last:.4f}",
        f"{held_out:.4f}",
        "-",
        "-",
        "0.5000",
        "1,500",
        "12.3%",
        "41",
    ]
    assert second.split() == ["b/t0", "2", "2.0000", *"-------"]
    assert len({len(line) for line in (head, first, second)}) == 1


def test_phases_and_details_of_one_run() -> None:
    records = [
        {
            "step": i,
            "train/loss": 2.0,
            "phase": int(i >= 3),
            "grad_norm": 2.0,
            "grad_norm/head": 1.0,
            "grad_norm/kda": i,
        }
        for i in range(6)
    ]
    loss, norm = plot._draw({"a/b": records}).axes
    for axes in (loss, norm):
        assert [line.get_xdata() for line in axes.get_lines() if line.get_linestyle() == ":"] == [
            [3.0, 3.0]
        ]
    assert [t.get_text() for t in norm.get_legend().get_texts()] == ["head", "kda"]
    assert plot._draw({"a/b": records, "c/d": records}).axes[1].get_legend() is None


def test_legend_names_are_the_shortest_that_differ() -> None:
    assert list(plot._names([Path("/r/tiny/t0"), Path("/r/wide/t0")])) == ["tiny/t0", "wide/t0"]
    assert list(plot._names([Path("/r/tiny/t0"), Path("/q/tiny/t0")])) == ["r/tiny/t0", "q/tiny/t0"]


def test_mistakes_are_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "tiny" / "t0", [3.0, 2.0])
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    cases = {
        (str(tmp_path / "absent"),): "has no metrics.jsonl; give the folder of a run",
        (str(run), str(run.parent)): "a run is given twice",
        (str(empty),): "has no loss in its 0 records",
        (str(run), str(run)): "a run is given twice",
        (str(run), "--out", str(tmp_path / "x.xyz")): "must end in one of",
        (str(run), "--out", str(empty / "metrics.jsonl" / "x.png")): "File exists",
    }
    for arguments, message in cases.items():
        assert plot.main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("k31fn.plot: ")
        assert message in line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "tiny"]


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "tiny" / "t0", [3.0])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"k31fn\[train\]"):
        plot.save_loss_plot(run)


@pytest.mark.parametrize("name", ["_debug", "a$b$c", "_$x^$", "caf\udce9"])
def test_any_name_of_a_run_is_shown_letter_by_letter(tmp_path: Path, name: str) -> None:
    """Matplotlib hides what begins with "_", and reads formulas between "$"."""
    records = [{"step": i, "train/loss": 2.0 - i} for i in (0, 1)]
    wanted = name.encode("utf-8", "replace").decode()
    two = plot._draw({name: records, "other": records})
    one = plot._draw({name: records})
    for figure in (one, two):
        figure.savefig(tmp_path / "loss.png")  # where a formula would be read
    texts = [text.get_text() for text in two.axes[0].get_legend().get_texts()]
    shown = [texts[0].removesuffix(" train"), one.axes[0].get_title(loc="left")]
    assert [text.strip().replace(r"\$", "$") for text in shown] == [wanted, wanted]
    assert texts[1] == "other train"
