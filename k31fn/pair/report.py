"""Results of a paired run as lines of text, as records and as a picture."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k31fn import model
from k31fn.pair.judge import (
    REVERSED,
    SMALLEST_SCALE,
    Leaf,
    Probes,
    loss_differs,
    losses_apart,
    not_finite,
    size,
)
from k31fn.pair.runs import Runs, Step

__all__ = ["Report", "groups", "record", "save_plot"]

_SHOWN = 8  # parameters in the table, and most lines of one kind


@dataclass(frozen=True)
class Report:
    """The verdict.

    Attributes:
        lines: what a person reads.
        data: the same for a program; numbers that JSON has not are text, as in ``metrics.jsonl``.
        differs: why the sides differ; empty: they do not.
    """

    lines: list[str]
    data: dict[str, Any]
    differs: list[str]

    @classmethod
    def of(cls, runs: Runs, steps: Sequence[Step]) -> Report:
        """The report of all steps together."""
        losses: dict[str, list[float]] = {}
        for name in runs.runs:
            losses[name] = _losses(steps, name)
        apart, noise, losses_differ = losses_apart(
            losses["a"], losses["b"], losses.get("noise", [])
        )
        leaves = runs.probes.judged()
        operators = runs.operators.judged()
        probe_losses = [s.probe.losses for s in steps if s.probe]
        probe_differs = loss_differs(probe_losses, runs.probes.rounding)
        reasons = list(filter(None, (probe_differs, losses_differ, _norms(steps))))
        # operators first: where one is wrong, the parameters below it are only its consequence
        unresolved = []
        for leaf in (*operators, *leaves):
            if leaf.differs:
                reasons.append(f"gradient of {leaf.path}: {leaf.differs}")
            if leaf.unresolved:
                unresolved.append(leaf.path)
        lines = ["", *_table(runs.probes, groups(list(runs.probes.rows), runs.model))]
        if operators:
            lines += ["", *_operators(operators)]
        lines += ["", *_runs(runs, apart, noise)]
        if unresolved:
            some = ", ".join(unresolved[:_SHOWN])
            lines += ["", f"too noisy to see 1% in: {some}{_more(unresolved)}"]
        lines += ["", *_verdict(reasons)]
        milliseconds, peak_bytes = {}, {}
        for name, run in runs.runs.items():
            milliseconds[name] = runs.milliseconds(name)
            peak_bytes[name] = run.peak
        data = {
            "parameters": leaves,
            "operators": operators,
            "losses_apart": apart,
            "noise": noise if "noise" in losses else None,
            "milliseconds": milliseconds,
            "peak_bytes": peak_bytes,
            "differs": reasons,
        }
        return cls(lines, _strict(data), reasons)


def _losses(steps: Sequence[Step], name: str) -> list[float]:
    return [step.losses[name] for step in steps]


def _largest(apart: Mapping[str, float], paths: Iterable[str]) -> float:
    """The largest of the parameters' differences; NaN is larger than any."""
    return max((apart[path] for path in paths), key=size)


def _norms(steps: Sequence[Step]) -> str:
    """Which runs have steps that changed nothing, since their gradient was not finite."""
    norms = [(s.norms["a"], s.norms["b"], s.norms.get("noise", 0.0)) for s in steps]
    lost = not_finite(norms, "steps", third=REVERSED)
    return f"gradient norm: {lost}" if lost else ""


def _strict(x: Any) -> Any:
    """``x`` with leaves as dicts, and numbers that JSON has not as text."""
    if isinstance(x, Leaf):
        return _strict(x._asdict())
    if isinstance(x, dict):
        return {name: _strict(part) for name, part in x.items()}
    if isinstance(x, list):
        return [_strict(part) for part in x]
    # "NaN" in quotes: a bare NaN is no JSON, and a reader in another language would stop at it
    return json.dumps(x) if isinstance(x, float) and not math.isfinite(x) else x


def _more(listed: Sequence[str]) -> str:
    return f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""


def _verdict(reasons: Sequence[str]) -> list[str]:
    if not reasons:
        return ["the sides agree"]
    lines = ["the sides differ:"]
    lines += [f"  {reason}" for reason in reasons[:_SHOWN]]
    more = _more(reasons)
    return [*lines, f" {more}"] if more else lines


def groups(paths: Sequence[str], cfg: model.Config) -> dict[str, list[str]]:
    """Parameters by part of the model, all its layers together: the names of token mixers,
    ``ffn.experts``, ``attn_mix``.
    """
    found: dict[str, list[str]] = {}
    for path in paths:
        layer = re.match(r"layers\.(\d+)\.", path)
        parts = path[layer.end() :].split(".") if layer else path.split(".")
        if layer and parts[0] == "attn":
            parts[0] = cfg.layers[int(layer[1])][0]
        found.setdefault(".".join(parts[:-1]) or parts[0], []).append(path)
    return found


def _table(probes: Probes, parts: dict[str, list[str]]) -> list[str]:
    rows = [
        ("gradients at equal parameters", "b / a", "+-", "error a", "error b", "worst parameter")
    ]
    by_path = {leaf.path: leaf for leaf in probes.judged()}
    for name, paths in [*parts.items(), ("all together", list(probes.rows))]:
        # a verdict outranks a number: a leaf may differ by its error while its scale is the best
        leaves = [by_path[p] for p in paths]
        worst = max(leaves, key=lambda leaf: (bool(leaf.differs), _suspicion(leaf)))
        text = f"{worst.path} {1 + worst.scale:.4f}{' !' if worst.differs else ''}"
        rows.append((name, *_numbers(probes.group(paths)), text))
    return _aligned(rows)


def _operators(leaves: Sequence[Leaf]) -> list[str]:
    rows = [("operators alone (argument)", "b / a", "+-", "error a", "error b", "")]
    for leaf in leaves:
        rows.append((leaf.path, *_numbers(leaf), "!" if leaf.differs else ""))
    return _aligned(rows)


def _suspicion(leaf: Leaf) -> float:
    # the constant keeps a leaf that both sides compute alike (deviation 0) from being the worst
    return size(leaf.scale / (leaf.deviation + 1e-4))


def _numbers(leaf: Leaf) -> tuple[str, str, str, str]:
    return (
        f"{1 + leaf.scale:.4f}",
        f"{leaf.deviation:.1e}",
        f"{leaf.error_a:.1e}",
        f"{leaf.error_b:.1e}",
    )


def _runs(runs: Runs, apart: float, noise: float) -> list[str]:
    rows = [("runs", "step", "peak", "loss in the last half, from a")]
    far = {"a": "", "b": f"{apart:.2g} nats (rms)", "noise": f"{noise:.2g} nats (rms)"}
    for name, run in runs.runs.items():
        text = f"{name}: {run.side.text}" + (", rows in reverse order" if run.reverse else "")
        rows.append(
            (text, f"{runs.milliseconds(name):.1f} ms", f"{run.peak / 2**20:.1f} MiB", far[name])
        )
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = []
    for column in zip(*rows, strict=True):
        widths.append(max(map(len, column)))
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("  ".join(cells).rstrip())
    return lines


def record(step: Step, runs: Runs, parts: dict[str, list[str]]) -> dict[str, Any]:
    """A line of ``pair.jsonl``: losses and gradient norms of the runs and, at a probe, the
    gradients' difference.
    """
    line: dict[str, Any] = {"step": step.number}
    for name in runs.runs:
        line[f"loss/{name}"] = step.losses[name]
        line[f"grad_norm/{name}"] = step.norms[name]
    if step.probe:
        apart = step.probe.apart
        line["grad_apart"] = apart[""]
        for part, paths in parts.items():
            line[f"grad_apart/{part}"] = _largest(apart, paths)
        worst = max(runs.probes.rows, key=lambda path: size(apart[path]))
        line["worst"] = worst
        line["worst_apart"] = apart[worst]
        line |= zip(("probe/a", "probe/b", "probe/exact"), step.probe.losses, strict=True)
    return line


def save_plot(out: Path, runs: Runs, steps: Sequence[Step]) -> None:
    """Draws losses, their difference beside the noise, the gradients' difference, and each
    parameter's scale.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        # here, for a machine without it; and not pyplot, which wants a window system
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"no plot: {error}; pip install 'k31fn[train]' adds matplotlib"
        ) from error
    figure = Figure(figsize=(10, 7), layout="constrained")
    (top, between), (grads, scales) = figure.subplots(2, 2)
    _draw_losses(top, between, runs, steps)
    _draw_gradients(grads, runs, steps)
    _draw_scales(scales, runs.probes.judged())
    # written beside and renamed: a reader sees the old picture or the whole new one
    temporary = out.with_name(f".{out.stem}.partial{out.suffix}")
    figure.savefig(temporary, dpi=130)
    os.replace(temporary, out)


def _draw_losses(losses: Any, gaps: Any, runs: Runs, steps: Sequence[Step]) -> None:
    """The losses of both sides, and below them how far b and the noise are from a."""
    numbers = [s.number for s in steps]
    losses_a = _losses(steps, "a")
    colours = {"a": "C0", "b": "C1", "noise": "C2"}
    for name, run in runs.runs.items():
        of_run = _losses(steps, name)
        style: Any = {"color": colours[name]}
        if name != "noise":  # it would hide side a, which it is
            losses.plot(numbers, of_run, **style, linewidth=1, label=run.side.text)
        if name != "a":
            # NaN in place of 0 leaves a gap: a logarithmic axis has no place for it
            apart = [abs(x - y) or math.nan for x, y in zip(of_run, losses_a, strict=True)]
            label = f"|{name} - a|, where not 0"
            gaps.plot(numbers, apart, ".-", **style, linewidth=0.9, markersize=3, label=label)
    gaps.sharex(losses)
    _finish(losses, "loss, nats per token", "step")
    some_apart = any(0 < abs(s.losses["a"] - s.losses["b"]) < math.inf for s in steps)
    _finish(gaps, "loss apart, nats", "step", log=some_apart)


def _draw_gradients(axes: Any, runs: Runs, steps: Sequence[Step]) -> None:
    """Draws how far the gradients of all parameters, and of the worst, are apart at each probe."""
    numbers, together, worst = [], [], []
    for step in steps:
        if step.probe:
            apart = step.probe.apart
            numbers.append(step.number)
            together.append(apart[""] or math.nan)
            worst.append(_largest(apart, runs.probes.rows) or math.nan)
    axes.plot(numbers, together, "o-", markersize=3, linewidth=1, label="all parameters")
    axes.plot(numbers, worst, ".", markersize=3, label="the worst")
    title = "gradients apart at equal parameters, relative"
    _finish(axes, title, "step", log=any(map(math.isfinite, together)))


def _draw_scales(axes: Any, leaves: Sequence[Leaf]) -> None:
    """The scale of each parameter whose scale is known, in ascending order."""
    shown = [x for x in leaves if not x.unresolved and math.isfinite(x.scale)]
    shown.sort(key=lambda leaf: leaf.scale)
    for wanted, colour, label in ((False, "C0", "agree"), (True, "C3", "differ")):
        places, scales, deviations = [], [], []
        for place, leaf in enumerate(shown):
            if bool(leaf.differs) is wanted:
                places.append(place)
                scales.append(leaf.scale)
                deviations.append(leaf.deviation)
        if places:
            style: Any = {"fmt": ".", "color": colour, "elinewidth": 0.6, "label": label}
            axes.errorbar(places, scales, yerr=deviations, **style)
    # within the band no scale counts, however certain it is
    axes.axhspan(-SMALLEST_SCALE, SMALLEST_SCALE, color="#dddddd")
    _finish(axes, "gradient of b / of a - 1, and its standard error", "parameter")


def _finish(axes: Any, label: str, below: str, *, log: bool = False) -> None:
    if log:
        axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(below, fontsize=9)
    axes.set_title(label, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    axes.grid(True, color="#d0d0d0", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
