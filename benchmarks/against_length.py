"""Time and memory against the number of tokens, from the JSON file of a benchmark.

``python -m benchmarks.against_length benchmarks/results/kda.json docs/kda.png``. Draws, on
logarithmic axes, each implementation's forward and backward together and the floor, and beside it
the peak memory over the inputs. Rows are taken whose shape is the first one's but for its tokens.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

__all__ = ["by_length", "main"]


def by_length(rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Rows by implementation, as (tokens, row) in order of tokens.

    A shape is written ``T<tokens> <rest>``; other rests than the first row's are left out.
    """
    rest = rows[0]["shape"].split(" ", 1)[1]
    series: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for row in rows:
        match = re.fullmatch(r"T(\d+) (.*)", row["shape"])
        if match is not None and match[2] == rest and row["both"] is not None:
            series.setdefault(row["name"], []).append((int(match[1]), row))
    return {name: sorted(points, key=lambda p: p[0]) for name, points in series.items()}


def draw(series: dict[str, list[tuple[int, dict[str, Any]]]], title: str, file: Path) -> None:
    """Writes the picture: time on the left, memory on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (time, memory) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for name, points in series.items():
        tokens = [n for n, _ in points]
        # A graph has no time of the host: the same work as called would show the launches.
        if name.endswith("graph") or name + ", graph" not in series:
            label = name.removesuffix(", graph")
            time.plot(tokens, [row["both"] for _, row in points], marker="o", label=label)
            peak = [row["peak_bytes"] / 2**30 for _, row in points]
            memory.plot(tokens, peak, marker="o", label=label)
    longest = max(series.values(), key=len)
    floor = [row["both_floor"] for _, row in longest]
    time.plot([n for n, _ in longest], floor, "k--", label="floor (bytes)")
    time.set_ylabel("forward and backward, ms")
    memory.set_ylabel("peak over the inputs, GiB")
    for axes in (time, memory):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(title)
    temporary = file.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=110)
    temporary.replace(file)
    plt.close(figure)


def main() -> int:
    """Writes the picture; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against_length")
    parser.add_argument("results", type=Path, help="JSON file of a benchmark, with rows by length")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    args = parser.parse_args()
    if not args.results.is_file():
        parser.error(f"results={args.results}: no such file; run the benchmark with --json first")
    result = json.loads(args.results.read_text(encoding="utf-8"))
    series = by_length(result.get("rows") or [{"shape": "T0 ", "name": "", "both": None}])
    if not any(len(points) > 1 for points in series.values()):
        parser.error(f"results={args.results}: no shape T<tokens> at two lengths or more")
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    draw(series, f"{result['op']}: {result['hardware']} ({versions})", args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
