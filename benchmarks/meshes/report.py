"""The results of ``benchmarks.meshes``, as tables and a plot: ``python -m benchmarks.meshes.report
FILES --plot a.png``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.meshes.here import HALVES, ONE

Found = dict[str, Any]


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def equality(runs: Found) -> Iterator[str]:
    """Relative differences from one device; in bfloat16 beside those of one that sums in the mesh's
    order.
    """
    for name, run in runs.items():
        rounded = "bfloat16" in name
        head = ["mesh", "loss", "KL, nats", "gradients", "worst in", "of indexers", "tokens moved"]
        head += ["norm", "norm of the threads", "mesh from its threads"] if rounded else []
        rows = []
        for mesh, found in run["of"].items():
            if "error" in found:
                rows.append([mesh, found["error"], *[""] * (len(head) - 2)])
                continue
            d = found[ONE]
            cells = [mesh, *(f"{d[k]:.1e}" for k in ("loss", "kl", "largest")), f"`{d['worst']}`"]
            cells += [f"{d['indexer']:.1e}", f"{d['moved']:g}"]
            if rounded:
                other = found.get("threads from one GPU"), found.get("threads")
                cells += [f"{d['norm']:.1e}", *(f"{o['norm']:.1e}" if o else "" for o in other)]
            rows.append(cells)
        yield f"Equality, {name}, {run['sizes']}\n\n{table(head, rows)}"


def training(runs: Found) -> Iterator[str]:
    """Losses of the steps beside those of one device."""
    for name, run in runs.items():
        one = [row[0] for row in run["of"][ONE]["steps"]]
        rows = []
        for mesh, found in run["of"].items():
            if "error" in found:
                rows.append([mesh, found["error"], "", "", ""])
                continue
            losses = [row[0] for row in found["steps"]]
            apart = [abs(a - b) / b for a, b in zip(losses, one, strict=True)]
            first, ten, last = (f"{x:.1e}" for x in (apart[0], max(apart[:10]), max(apart)))
            rows.append([mesh, f"{losses[-1]:.5f}", first, ten, last])
        head = [
            "mesh",
            f"loss of step {len(one)}",
            "apart at step 1",
            "within 10 steps",
            f"within {len(one)}",
        ]
        yield f"Training, {name}, {run['sizes']}\n\n{table(head, rows)}"


def timing(runs: Found) -> Iterator[str]:
    """Step time, memory and communication."""
    head = [
        "mesh",
        "step",
        "of one device",
        "state",
        "peak",
        "compute, ms",
        "NCCL, ms",
        "exposed, ms",
        "of which",
        "handed in",
    ]
    for name, run in runs.items():
        rows = []
        for mesh, found in run["of"].items():
            if "error" in found:
                rows.append([mesh, found["error"], *[""] * (len(head) - 2)])
                continue
            share = found["seconds"] / run["of"][ONE]["seconds"]
            cells = [mesh, f"{1e3 * found['seconds']:.0f} ms", f"{share:.2f}"]
            cells += [f"{found[k] / 2**30:.1f} GiB" for k in ("state_bytes", "peak_bytes")]
            profiles = found.get("profile", [])
            if profiles:
                cells += [
                    _range([1e3 * p[k] for p in profiles])
                    for k in ("compute", "communication", "exposed")
                ]
                kinds = {kind for p in profiles for kind in p["by_kind"]}
                spans = {
                    kind: [1e3 * p["by_kind"].get(kind, 0) for p in profiles] for kind in kinds
                }
                spans = dict(sorted(spans.items(), key=lambda span: -max(span[1])))
                cells.append(
                    ", ".join(f"{kind} {_range(v)}" for kind, v in spans.items() if max(v) >= 0.5)
                )
            else:
                cells += [""] * 4
            sent = sorted(found["sent_bytes"].items(), key=lambda kind: -kind[1])
            cells.append(", ".join(f"{kind} {n / 1e6:.0f} MB" for kind, n in sent if n >= 1e6))
            rows.append(cells)
        yield f"Timing, {name}, {run['sizes']}\n\n{table(head, rows)}"


def _range(values: list[float]) -> str:
    """Least and most of the ranks."""
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low}-{high}"


def restoring(runs: Found) -> Iterator[str]:
    """Bits and the next step's loss."""
    for name, run in runs.items():
        rows = [[mesh, *(str(v) for v in found.values())] for mesh, found in run["of"].items()]
        widest = max(run["of"].values(), key=len)
        yield f"Checkpoints, {name}\n\n{table(['mesh', *widest], rows)}"


def plot(runs: Found, out: Path) -> None:
    """Above, the losses of all meshes, one on the other; below, how far each is from one device
    (1e-8: equal).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[3, 3], sharex=True)
    run = next(iter(runs.values()))["of"]
    one = [row[0] for row in run[ONE]["steps"]]
    for i, (mesh, found) in enumerate((m, f) for m, f in run.items() if "steps" in f):
        losses = [row[0] for row in found["steps"]]
        style = (
            {"color": "black", "linestyle": ":"}
            if mesh in (ONE, HALVES)
            else {"color": f"C{i - 2}"}
        )
        above.plot(losses, linewidth=1.2, **style)
        if mesh != ONE:
            apart = [max(abs(a - b) / b, 1e-8) for a, b in zip(losses, one, strict=True)]
            below.plot(apart, label=mesh, linewidth=1.2, **style)
    above.set_ylabel("loss, nats per byte")
    below.set_ylabel("relative difference from one device")
    below.set_yscale("log")
    below.set_xlabel("step")
    below.legend(frameon=False, fontsize=8, ncols=3)
    for axes in (above, below):
        axes.grid(True, color="#d0d0d0", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150)


def _put(some: Found, found: Found) -> None:
    """Adds nested entries; later ones count."""
    for key, value in some.items():
        if isinstance(value, dict) and isinstance(found.get(key), dict):
            _put(value, found[key])
        else:
            found[key] = value


def main() -> None:
    """Prints the tables of the parts that are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "files", type=Path, nargs="+", help="several of the same machine are put together"
    )
    parser.add_argument("--plot", type=Path, help="where to draw the training")
    options = parser.parse_args()
    found: Found = {}
    for file in options.files:
        _put(json.loads(file.read_text()), found)
    print(found["machine"])
    parts = {"equality": equality, "training": training, "timing": timing, "checkpoint": restoring}
    for part, write in parts.items():
        for text in write(found.get(part, {})):
            print(f"\n{text}")
    if options.plot:
        plot(found["training"], options.plot)


if __name__ == "__main__":
    main()
