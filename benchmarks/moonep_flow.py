"""The flow of MoonEP as a picture: ``python -m benchmarks.moonep_flow docs/moonep_flow.png``.

The published example, by the plan that training uses: ranks whose experts have 4, 0, 16, 0, 0, 8, 0
and 4 rows compute 4 each. Below it the stages of a layer, in the order in which they run, with what
runs while something travels.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k31fn.parallel.moonep.plan import Plan, make_plan

__all__ = ["EXAMPLE", "draw", "example", "main"]

EXAMPLE = (4, 0, 16, 0, 0, 8, 0, 4)
"""Rows of each rank's experts; there is one expert a rank."""

_STAGES = (
    ("router", "which experts", ""),
    ("plan", "counts of all ranks", ""),
    ("fetch", "replicas to slots", "latent projection"),
    ("send", "each token once", "shared experts, in"),
    ("experts", "equal rows", ""),
    ("send back", "sums of copies", "shared experts, out"),
    ("add", "ranks in order", ""),
)


def example() -> tuple[Tensor, Plan]:
    """The counts ``[R, E]`` of the example, dealt out over the source ranks, and their plan."""
    num_ranks = len(EXAMPLE)
    counts = torch.zeros(num_ranks, num_ranks, dtype=torch.int64)
    row = 0
    for expert, rows in enumerate(EXAMPLE):
        for _ in range(rows):
            counts[row % num_ranks, expert] += 1
            row += 1
    return counts, make_plan(counts, sum(EXAMPLE) // num_ranks, 1)


def draw(out: Path) -> None:
    """Before, moves, after; and the stages."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    counts, plan = example()
    figure = plt.figure(figsize=(11, 6.2), layout="constrained")
    panels = figure.subplot_mosaic([["before", "after"], ["stages"] * 2], height_ratios=(3, 1.5))
    before, after = panels["before"], panels["after"]
    colours = [f"C{rank}" for rank in range(len(EXAMPLE))]
    mean = sum(EXAMPLE) // len(EXAMPLE)
    for rank, rows in enumerate(counts.sum(0).tolist()):
        before.bar(rank, rows, color=colours[rank])
    before.set(title="rows by the owner of their expert: plain EP", ylabel="rows")
    for rank in range(len(EXAMPLE)):
        own, copied = plan.sizes[rank].tolist()
        after.bar(rank, own, color=colours[rank])
        home = int(plan.slots[rank, 0])
        if home >= 0:
            after.bar(rank, copied, bottom=own, color=colours[home], hatch="//", edgecolor="white")
            label = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            after.text(rank, own + copied / 2, f"of {home}", ha="center", va="center", bbox=label)
    after.set(title="rows by rank: MoonEP; hatched: by a replica in a slot")
    for panel in (before, after):
        panel.set(xticks=range(len(EXAMPLE)), xlabel="rank", ylim=(0, max(EXAMPLE) + 1))
        panel.axhline(mean, color="black", lw=0.8, ls="--")
    _draw_stages(panels["stages"])
    temporary = out.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=90)
    temporary.replace(out)
    plt.close(figure)


def _draw_stages(panel: Any) -> None:
    """Boxes from left to right; under a journey what runs meanwhile."""
    panel.set(xlim=(-0.5, len(_STAGES) - 0.5), ylim=(-1.3, 0.8))
    panel.axis("off")
    for i, (name, what, meanwhile) in enumerate(_STAGES):
        style = {"boxstyle": "round", "facecolor": "#cfe3f7" if meanwhile else "#eeeeee"}
        panel.text(i, 0.2, f"{name}\n{what}", ha="center", va="center", fontsize=9, bbox=style)
        if i:
            arrow = {"arrowstyle": "->"}
            panel.annotate("", (i - 0.43, 0.2), (i - 0.57, 0.2), arrowprops=arrow)
        if meanwhile:
            panel.text(i, -0.75, f"meanwhile:\n{meanwhile}", ha="center", va="center", fontsize=9)


def main() -> None:
    """Draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the picture, docs/moonep_flow.png")
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
