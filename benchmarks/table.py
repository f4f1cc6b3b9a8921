"""The table of operators in ``docs/results.md``, from the JSON files.

``python -m benchmarks.table docs/results.md [--check]``.

Writes the table between the two marker comments of the file; with ``--check`` changes nothing and
fails if it is not what the JSON files give.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import told

__all__ = ["BEGIN", "END", "RESULTS", "main", "render", "replaced"]

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
RESULTS = Path(__file__).parent / "results"
_HEAD = (
    "| operator, shape | forward | backward | both | peak | eager | eager, graph | torch.compile, "
    "graph "
    "| fla-core, graph |"
)


def render(found: Sequence[Mapping[str, Any]]) -> str:
    """A table with a row per op and shape, and under it what was measured on what.

    Times of the fused op are those of its kernels, replayed from a CUDA graph, with the share of
    the floor: the time in which the device moves the bytes that must move.
    """
    # of a result whose rows have other names the text has a table of its own
    found = [r for r in found if any(row["name"].startswith("fused") for row in r["rows"])]
    lines = [_HEAD, "|" + "---|" * 9]
    for result in found:
        shapes = list(dict.fromkeys(r["shape"] for r in result["rows"]))
        lines += [_line(result["op"], shape, result["rows"]) for shape in shapes]
    on = {
        f"{r['hardware']} ({', '.join(f'{k} {v}' for k, v in r['versions'].items())})"
        for r in found
    }
    return "\n".join(
        [
            *lines,
            "",
            f"Measured on {'; '.join(sorted(on))}; peers in the same run, forward / both, ms.",
        ]
    )


def _line(op: str, shape: str, rows: Sequence[Mapping[str, Any]]) -> str:
    by_name = {r["name"]: r for r in rows if r["shape"] == shape}
    fused = by_name["fused, graph"] if "fused, graph" in by_name else by_name["fused"]
    backward, floor = fused["both"] - fused["forward"], fused["both_floor"] - fused["forward_floor"]
    cells = [
        f"{op}, {shape}",
        _share(fused["forward"], fused["forward_floor"]),
        _share(backward, floor),
        _share(fused["both"], fused["both_floor"]),
        f"{fused['peak_bytes'] / 2**20:,.0f} MiB" if fused["peak_bytes"] else "-",
        _peer(by_name.get("eager")),
        _peer(by_name.get("eager, graph")),
        _peer(by_name.get("torch.compile, graph")),
        _peer(by_name.get("fla, graph")),
    ]
    return "| " + " | ".join(cells) + " |"


def _share(milliseconds: float, floor: float) -> str:
    if not milliseconds:
        return "-"  # a step has no backward
    return f"{milliseconds:.3f} ms, {floor / milliseconds:.0%}"


def _peer(row: Mapping[str, Any] | None) -> str:
    if row is None or row["forward"] is None:
        return "-"
    if row["both"] is None:
        return f"{row['forward']:.2f} / -"
    if row["both"] == row["forward"]:
        return f"{row['forward']:.2f}"  # of one pass
    return " / ".join(f"{t:.3f}" if t < 0.1 else f"{t:.2f}" for t in (row["forward"], row["both"]))


def replaced(text: str, table: str) -> str:
    """``text`` with the table between the markers.

    Raises:
        ValueError: not one marker of each kind, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(
            f"the file has no place for the table; write a line {BEGIN} and, after it, a line {END}"
        )
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Returns 1 if ``--check`` finds another table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.table", description="the table of operators in docs/results.md"
    )
    parser.add_argument("file", type=Path, help="with the two marker comments")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of JSON files")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if not args.file.is_file():
        parser.error(f"{args.file}: no such file")
    found = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(args.results.glob("*.json"))
    ]
    found = [r for r in found if "rows" in r and "op" in r]
    if not found:
        parser.error(f"--results {args.results}: no result of an operator in it")
    text = args.file.read_text(encoding="utf-8")
    wanted = told(parser, lambda: replaced(text, render(found)))
    if args.check and text != wanted:
        print(
            f"{args.file}: the table is not that of {args.results}; run python -m "
            f"benchmarks.table {args.file}"
        )
        return 1
    if not args.check:
        args.file.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
