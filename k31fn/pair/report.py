"""What a paired run found, as lines of text, as records and as a picture."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k31fn import model
from k31fn.layers import kda
from k31fn.pair.judge import REVERSED, Leaf, Probes, loss_differs, losses_apart, not_finite, size
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
        """What all steps say together."""
        losses = {name: [s.losses[name] for s in steps] for name in runs.runs}
        apart, noise, differs = losses_apart(losses["a"], losses["b"], losses.get("noise", []))
        leaves, operators = runs.probes.judged(), runs.operators.judged()
        probes = [s.probe.losses for s in steps if s.probe]
        reasons = [
            r for r in (loss_differs(probes, runs.probes.rounding), differs, _norms(steps)) if r
        ]
        reasons += [
            f"gradient of {x.path}: {x.differs}" for x in (*operators, *leaves) if x.differs
        ]
        lines = ["", *_table(runs.probes, groups(list(runs.probes.rows), runs.model))]
        if operators:
            lines += ["", *_operators(operators)]
        lines += ["", *_runs(runs, apart, noise)]
        unseen = [x.path for x in (*operators, *leaves) if x.unresolved]
        if unseen:
            lines += ["", f"too noisy to see 1% in: {', '.join(unseen[:_SHOWN])}{_more(unseen)}"]
        lines += ["", *_verdict(reasons)]
        found = {
            "parameters": [leaf._asdict() for leaf in leaves],
            "operators": [leaf._asdict() for leaf in operators],
            "losses_apart": apart,
            "noise": noise if "noise" in losses else None,
            "milliseconds": {name: runs.milliseconds(name) for name in runs.runs},
            "peak_bytes": {name: run.peak for name, run in runs.runs.items()},
            "differs": reasons,
        }
        return cls(lines, _strict(found), reasons)


def _norms(steps: Sequence[Step]) -> str:
    """Which runs have steps that changed nothing, since their gradient was not finite."""
    norms = [(s.norms["a"], s.norms["b"], s.norms.get("noise", 0.0)) for s in steps]
    lost = not_finite(norms, "steps", third=REVERSED)
    return f"gradient norm: {lost}" if lost else ""


def _strict(x: Any) -> Any:
    """``x`` with numbers that JSON has not as text."""
    if isinstance(x, dict):
        return {name: _strict(part) for name, part in x.items()}
    if isinstance(x, list):
        return [_strict(part) for part in x]
    return json.dumps(x) if isinstance(x, float) and not math.isfinite(x) else x


def _more(listed: Sequence[str]) -> str:
    return f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""


def _verdict(reasons: Sequence[str]) -> list[str]:
    if not reasons:
        return ["the sides agree"]
    return [
        "the sides differ:",
        *(f"  {r}" for r in reasons[:_SHOWN]),
        *([f" {more}"] if (more := _more(reasons)) else []),
    ]


def groups(paths: Sequence[str], cfg: model.Config) -> dict[str, list[str]]:
    """Parameters by part of the model, all its layers together: ``kda``, ``full``, ``ffn.experts``,
    ``attn_mix``.
    """
    kinds = {
        i: "kda" if isinstance(c.attention, kda.Config) else "full"
        for i, c in enumerate(model.layer_configs(cfg))
    }
    found: dict[str, list[str]] = {}
    for path in paths:
        layer = re.match(r"layers\.(\d+)\.", path)
        parts = path[layer.end() :].split(".") if layer else path.split(".")
        if layer and parts[0] == "attn":
            parts[0] = kinds[int(layer[1])]
        found.setdefault(".".join(parts[:-1]) or parts[0], []).append(path)
    return found


def _table(probes: Probes, parts: dict[str, list[str]]) -> list[str]:
    rows = [
        ("gradients at equal parameters", "b / a", "+-", "error a", "error b", "worst parameter")
    ]
    by_path = {leaf.path: leaf for leaf in probes.judged()}
    for name, paths in [*parts.items(), ("all together", list(probes.rows))]:
        worst = max(
            (by_path[p] for p in paths), key=lambda leaf: (bool(leaf.differs), _suspicion(leaf))
        )
        text = f"{worst.path} {1 + worst.scale:.4f}{' !' if worst.differs else ''}"
        rows.append((name, *_numbers(probes.group(paths)), text))
    return _aligned(rows)


def _operators(leaves: Sequence[Leaf]) -> list[str]:
    rows = [("operators alone (argument)", "b / a", "+-", "error a", "error b", "")]
    return _aligned([*rows, *((x.path, *_numbers(x), "!" if x.differs else "") for x in leaves)])


def _suspicion(leaf: Leaf) -> float:
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
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def record(step: Step, runs: Runs, parts: dict[str, list[str]]) -> dict[str, Any]:
    """A line of ``pair.jsonl``: losses and gradient norms of the runs and, at a probe, the
    gradients' difference.
    """
    found: dict[str, Any] = {"step": step.number}
    for name in runs.runs:
        found |= {f"loss/{name}": step.losses[name], f"grad_norm/{name}": step.norms[name]}
    if step.probe:
        apart = step.probe.apart
        found["grad_apart"] = apart[""]
        found |= {
            f"grad_apart/{part}": max((apart[p] for p in paths), key=size)
            for part, paths in parts.items()
        }
        worst = max(runs.probes.rows, key=lambda path: size(apart[path]))
        found |= {"worst": worst, "worst_apart": apart[worst]}
        found |= dict(zip(("probe/a", "probe/b", "probe/exact"), step.probe.losses, strict=True))
    return found


def save_plot(out: Path, runs: Runs, steps: Sequence[Step]) -> None:
    """Draws losses, their difference beside the noise, the gradients' difference, and each
    parameter's scale.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot: no window system, no global state
    except ImportError as error:
        raise ImportError(
            f"no plot: {error}; pip install 'k31fn[train]' adds matplotlib"
        ) from error
    figure = Figure(figsize=(10, 7), layout="constrained")
    (top, between), (grads, scales) = figure.subplots(2, 2)
    numbers = [s.number for s in steps]
    for i, name in enumerate(("a", "b")):
        top.plot(
            numbers,
            [s.losses[name] for s in steps],
            color=f"C{i}",
            linewidth=1,
            label=runs.runs[name].side.text,
        )
    for i, name in enumerate(n for n in ("b", "noise") if n in runs.runs):
        gaps = [abs(s.losses[name] - s.losses["a"]) or math.nan for s in steps]
        style: Any = {"color": f"C{1 + i}", "linewidth": 0.9, "markersize": 3}
        between.plot(numbers, gaps, ".-", **style, label=f"|{name} - a|, where not 0")
    between.sharex(top)
    probed = [s.number for s in steps if s.probe]
    apart = [s.probe.apart for s in steps if s.probe]
    grads.plot(
        probed,
        [x[""] or math.nan for x in apart],
        "o-",
        markersize=3,
        linewidth=1,
        label="all parameters",
    )
    worst = [max((x[p] for p in runs.probes.rows), key=size) or math.nan for x in apart]
    grads.plot(probed, worst, ".", markersize=3, label="the worst")
    _draw_scales(scales, runs.probes.judged())
    _finish(top, "loss, nats per token", "step")
    _finish(
        between,
        "loss apart, nats",
        "step",
        log=any(0 < abs(s.losses["a"] - s.losses["b"]) < math.inf for s in steps),
    )
    _finish(
        grads,
        "gradients apart at equal parameters, relative",
        "step",
        log=any(0 < x[""] < math.inf for x in apart),
    )
    _finish(scales, "gradient of b / of a - 1, and its standard error", "parameter")
    temporary = out.with_name(f".{out.stem}.partial{out.suffix}")
    figure.savefig(temporary, dpi=130)
    os.replace(temporary, out)


def _draw_scales(axes: Any, leaves: Sequence[Leaf]) -> None:
    shown = sorted(
        (x for x in leaves if not x.unresolved and math.isfinite(x.scale)),
        key=lambda leaf: leaf.scale,
    )
    for wanted, colour, label in ((False, "C0", "agree"), (True, "C3", "differ")):
        places = [(i, leaf) for i, leaf in enumerate(shown) if bool(leaf.differs) is wanted]
        if places:
            axes.errorbar(
                [i for i, _ in places],
                [leaf.scale for _, leaf in places],
                yerr=[leaf.deviation for _, leaf in places],
                fmt=".",
                color=colour,
                elinewidth=0.6,
                label=label,
            )
    axes.axhspan(-0.004, 0.004, color="#dddddd")


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
