"""Loss curves: ``python -m k31fn.plot RUN [RUN...] [--out FILE]`` compares runs in one picture.

A run is a folder with a ``metrics.jsonl``; of a folder of runs the newest is shown. Above, training
loss (smoothed, the raw values faint behind it) and held-out loss (dots, dashed); below, where
recorded, the indexer's KL, the experts' load, the gradient's norm, tokens per second and MFU. Of a
run alone also the load of each layer and the norm of each part. Dotted lines are borders of phases.
The command prints the numbers in a table.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from k31fn import commands, metrics, regular_files

__all__ = ["main", "save_loss_plot"]


def __dir__() -> list[str]:
    return __all__


_RECORDS = "metrics.jsonl"
_LARGEST = 1e100
_GRID = {"color": "#d0d0d0", "linewidth": 0.6}
_PANELS = (
    ("indexer KL, nats", "train/indexer_kl"),
    ("expert load, max / mean", "moe/load_max_over_mean"),
    ("gradient norm", "grad_norm"),
    ("tokens per second", "tokens_per_second"),
    ("MFU", "mfu"),
)
_DETAILS = {"moe/load_max_over_mean": "moe/load/", "grad_norm": "grad_norm/"}  # by layer, by part
_COLUMNS = (  # heading, metric, over which of its values, format
    ("train loss", "train/loss", "last", "12.4f"),
    ("held out", "heldout/loss", "end", "10.4f"),
    ("KL", "train/indexer_kl", "last", "9.4f"),
    ("load", "moe/load_max_over_mean", "last", "7.2f"),
    ("grad norm", "grad_norm", "last", "12.4f"),
    ("tokens/s", "tokens_per_second", "all", "11,.0f"),
    ("MFU", "mfu", "all", "8.1%"),
    ("skipped", "skipped", "sum", "9,.0f"),
)


class _Series(NamedTuple):
    """One metric of one run: the steps that have it, and its values; values that are not finite are
    left out.
    """

    steps: np.ndarray
    values: np.ndarray


def save_loss_plot(run: str | Path) -> Path:
    """Draws ``RUN/loss.png`` from the run's metrics, and returns its path.

    Raises:
        ValueError: the run has no metrics.
        ImportError: matplotlib is not installed.
    """
    return _compare([run], Path(run) / "loss.png")


def _compare(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Draws the loss curves of several runs into one picture; its format follows from the name's
    ending.

    The picture is written under another name and moved to its place, so a viewer never sees half of
    it.

    Raises:
        ValueError: a run has no metrics, or ``out`` is of a kind that matplotlib does not write.
        ImportError: matplotlib is not installed.
        OSError: ``out`` cannot be written; its folder is made if it is missing.
    """
    records = {}
    for name, run in _names(runs).items():
        records[name] = _records(run)
    figure = _draw(records)
    out = Path(out)
    kinds = sorted(figure.canvas.get_supported_filetypes())
    if out.suffix[1:] not in kinds:
        raise ValueError(f"--out {str(out)!r} must end in one of .{', .'.join(kinds)}")
    # the ending stays last: matplotlib takes the format from it
    temporary = out.with_name(f".{out.stem}.partial{out.suffix}")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(temporary, dpi=150)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    return out


def _records(run: Path) -> list[dict[str, Any]]:
    path = run / _RECORDS
    if not path.is_file():
        raise ValueError(
            f"{str(run)!r} has no metrics.jsonl; give the folder of a run, such as runs/NAME/TIME"
        )
    records = metrics.read(path)
    if not any("train/loss" in r or "heldout/loss" in r for r in records):
        raise ValueError(
            f"{str(path)!r} has no loss in its {len(records)} records; the run has not made a "
            "step yet"
        )
    return records


def _newest(path: Path) -> Path:
    """``path`` itself, or if it is a folder of runs, the newest of them."""
    runs = [] if (path / _RECORDS).is_file() else [p.parent for p in path.glob(f"*/{_RECORDS}")]
    return metrics.oldest_first(runs)[-1] if runs else path


def _names(runs: Sequence[str | Path]) -> dict[str, Path]:
    """A legend entry for each run: the shortest ending of its path, of two names or more, that no
    other run has.

    Runs are ``runs/NAME/TIME``, and a time alone would say little.
    """
    parts = [Path(run).resolve().parts for run in runs]
    if len(set(parts)) < len(parts):
        raise ValueError("a run is given twice; give each once")

    def name(path: tuple[str, ...]) -> str:
        for n in range(2, len(path) + 1):
            ending = path[-n:]
            if [p[-n:] for p in parts].count(ending) == 1:
                return "/".join(ending)
        return "/".join(path)  # the path of another run ends in all of this one's

    names = {}
    for path, run in zip(parts, runs, strict=True):
        names[name(path)] = Path(run)
    return names


def _series(records: list[dict[str, Any]], name: str) -> _Series:
    steps: list[float] = []
    values: list[float] = []
    for record in records:
        value = record.get(name)
        # NaN and infinities have no place in a picture, nor what its scales cannot multiply
        if isinstance(value, int | float) and abs(value) < _LARGEST:
            steps.append(min(record["step"], _LARGEST))
            values.append(value)
    return _Series(np.array(steps, dtype=float), np.array(values, dtype=float))


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a centred window of 1/25 of the run, which does not lag.

    At the start, where a loss falls steeply, the window narrows to stay centred; at the end it is
    cut.
    """
    # by differences of a running total: the window's width does not matter for the time
    index = np.arange(len(values))
    back = np.minimum(len(values) // 50, index)
    ahead = np.minimum(back, index[::-1])
    total = np.concatenate([[0.0], np.cumsum(values)])
    return (total[index + ahead + 1] - total[index - back]) / (back + ahead + 1)


def _draw(runs: dict[str, list[dict[str, Any]]]) -> Any:
    try:
        from matplotlib.figure import Figure  # without pyplot: no window system, no global state
    except ImportError as error:
        raise ImportError(
            f"no plot: {error}; pip install 'k31fn[train]' adds matplotlib"
        ) from error
    panels = []
    for label, name in _PANELS:
        if any(len(_series(records, name).steps) for records in runs.values()):
            panels.append((label, name))
    figure = Figure(layout="constrained")
    loss, *below = _layout(figure, len(panels))
    for i, (run, records) in enumerate(runs.items()):
        prefix, held_out_colour = "", "C1"
        if len(runs) > 1:  # a colour for each run, and so both of its losses in one
            prefix, held_out_colour = f"{_shown(run)} ", f"C{i}"
        _draw_loss(loss, records, prefix, f"C{i}", held_out_colour)
        for axes, (_, name) in zip(below, panels, strict=True):
            if len(runs) == 1 and name in _DETAILS:
                _draw_details(axes, records, _DETAILS[name])
            _draw_panel(axes, _series(records, name), f"C{i}")
        for axes in (loss, *below):
            for step in _borders(records):
                axes.axvline(step, color=f"C{i}", linestyle=":", linewidth=0.9)
    _finish_loss(loss, runs)
    for axes, (label, name) in zip(below, panels, strict=True):
        _finish(axes, label)
        # it falls by orders of magnitude; a step without queries has 0
        if name == "train/indexer_kl" and _all_positive(runs, name):
            axes.set_yscale("log")
    return figure


def _shown(name: str) -> str:
    """A run's name as matplotlib shows it letter by letter."""
    # it hides what begins with "_", and reads what stands between two "$" as a formula
    name = name.encode("utf-8", "replace").decode("utf-8").replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def _all_positive(runs: dict[str, list[dict[str, Any]]], name: str) -> bool:
    return all((_series(records, name).values > 0).all() for records in runs.values())


def _layout(figure: Any, num_panels: int) -> list[Any]:
    """The loss above, and up to three panels in each row below it."""
    columns = 2 if num_panels in (2, 4) else min(num_panels, 3) or 1  # 4 as 2 x 2, not as 3 + 1
    rows = -(-num_panels // columns)
    figure.set_size_inches(8.4, 4.4 + 2.2 * rows)
    # six columns: rows of one, two or three panels all fill the width
    grid = figure.add_gridspec(1 + rows, 6, height_ratios=[5] + [3] * rows)
    axes = [figure.add_subplot(grid[0, :])]
    for i in range(num_panels):
        row, column = divmod(i, columns)
        width = 6 // min(columns, num_panels - row * columns)
        axes.append(figure.add_subplot(grid[1 + row, column * width : (column + 1) * width]))
    return axes


def _draw_details(axes: Any, records: list[dict[str, Any]], start: str) -> None:
    """A thin line for each metric of that beginning, named by the rest."""
    names: set[str] = set()
    for record in records:  # phases may measure different parts
        names.update(record)
    detailed = sorted(name for name in names if name.startswith(start))
    for i, name in enumerate(detailed):
        series = _series(records, name)
        axes.plot(
            series.steps,
            _smooth(series.values),
            color=f"C{1 + i % 9}",  # C0 is the thick line of the whole
            linewidth=0.7,
            alpha=0.7,
            label=name.removeprefix(start),
        )
    if 0 < len(detailed) <= 16:  # a legend of a hundred layers would hide the curves
        axes.legend(frameon=False, fontsize=5, ncols=2)


def _borders(records: list[dict[str, Any]]) -> list[float]:
    """First steps of the phases after the first."""
    phases = _series(records, "phase")
    return phases.steps[1:][np.diff(phases.values) != 0].tolist()


def _table(runs: Sequence[str | Path]) -> list[str]:
    """The runs' numbers, a line each: means over the last tenth of the steps, medians of rates,
    steps skipped.

    Raises:
        ValueError: a run has no metrics.
    """
    names = _names(runs)
    width = max(map(len, names))
    header = f"{'run':<{width}}{'steps':>8}"
    for head, _, _, form in _COLUMNS:
        header += f"{head:>{_width(form)}}"
    lines = [header]
    for name, run in names.items():
        records = _records(run)
        steps = 1 + max(record["step"] for record in records)  # the last line may be an evaluation
        line = f"{name:<{width}}{steps:>8,}"
        for _, metric, over, form in _COLUMNS:
            line += _cell(_series(records, metric).values, over, form)
        lines.append(line)
    return lines


def _width(form: str) -> int:
    return int(form.partition(".")[0].rstrip(","))


def _cell(values: np.ndarray, over: str, form: str) -> str:
    if not len(values):
        return f"{'-':>{_width(form)}}"
    if over == "last":
        # a mean: losses of single steps are too noisy to compare runs by
        number = values[-max(len(values) // 10, 1) :].mean()
    else:
        number = {"end": values[-1], "all": np.median(values), "sum": values.sum()}[over]
    return f"{number:>{form}}"


def _draw_loss(
    axes: Any, records: list[dict[str, Any]], prefix: str, colour: str, held_out_colour: str
) -> None:
    train = _series(records, "train/loss")
    held_out = _series(records, "heldout/loss")
    axes.plot(train.steps, train.values, color=colour, alpha=0.22, linewidth=0.8)
    axes.plot(
        train.steps, _smooth(train.values), color=colour, linewidth=1.6, label=f"{prefix}train"
    )
    if len(held_out.steps):
        last = held_out.values[-1]
        label = f"{prefix}held out, last {last:.3f}"
        axes.plot(
            held_out.steps,
            held_out.values,
            "o--",
            color=held_out_colour,
            markersize=4,
            linewidth=1,
            label=label,
        )


def _draw_panel(axes: Any, series: _Series, colour: str) -> None:
    axes.plot(series.steps, series.values, color=colour, alpha=0.22, linewidth=0.8)
    axes.plot(series.steps, _smooth(series.values), color=colour, linewidth=1.4)


def _finish_loss(axes: Any, runs: dict[str, list[dict[str, Any]]]) -> None:
    """A logarithmic scale where the loss falls far, as most of a run goes on in the last tenth of
    the fall.

    Single spikes do not set the limits.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    shown = []
    for records in runs.values():
        shown.append(_smooth(_series(records, "train/loss").values))
        shown.append(_series(records, "heldout/loss").values)
    values = np.concatenate(shown)  # none if every loss was NaN
    low, high = (values.min(), values.max()) if len(values) else (0.0, 0.0)
    # 1.5: a loss that falls less is as well read on a linear scale
    if low > 0 and high > 1.5 * low:
        axes.set_yscale("log")
        axes.set_ylim(low * 0.92, high * 1.08)
        axes.yaxis.set_major_locator(
            LogLocator(subs=(1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0))
        )
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="y", which="minor", left=False)
    _finish(axes, "loss, nats per token")
    axes.legend(frameon=False, fontsize=9)
    title = _shown(next(iter(runs))) if len(runs) == 1 else ""
    axes.set_title(title, fontsize=10, loc="left")


def _finish(axes: Any, label: str) -> None:
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel(label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(True, **_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


@commands.outlives_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m k31fn.plot", description="Compares runs: a picture and a table."
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folder of a run, such as runs/tiny/20260131-120000, or a folder of runs such as "
        "runs/tiny: the newest of them",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the picture (default: loss.png in the run's folder, of several beside the first)",
    )
    options = commands.parse_arguments(parser, arguments)
    try:
        runs = [_newest(regular_files.path(run, "RUN")) for run in options.runs]
        out = (runs[0] if len(runs) == 1 else runs[0].parent) / "loss.png"
        if options.out is not None:
            out = regular_files.path(options.out, "out")
        print("\n".join([*_table(runs), str(_compare(runs, out))]))
    except (ValueError, ImportError, OSError) as error:
        print(f"k31fn.plot: {regular_files.shown(error, options.out or '')}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
