"""Muon against AdamW: in what share of the steps it has AdamW's loss. ``python -m
benchmarks.optimizers --jobs 14``.

A recipe is trained with each optimiser, three learning rates and three seeds (which draw the
initial values and the order of the data), each run in a process of one thread, for so many steps;
then the same for Muon with four fifths of the steps and a schedule of that length. Of an optimiser
the learning rate counts whose mean final loss over the seeds is least. A run's loss at a step is
the mean training loss of the 20 steps up to it: runs of one seed have seen the same rows then.

Two answers. In one run: the first step at which Muon's mean loss is at most AdamW's final one, as a
share of the steps; its learning rate is high then, so this is the harder test. And with a schedule
for it: whether Muon's final loss after 0.8 of the steps is at most AdamW's.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.measure import told
from k31fn import config, data, trainer
from k31fn.trainer.phases import learning_rate

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
WINDOW, SHARE = 20, 0.8
KINDS = ("adamw", "muon")


class Run(NamedTuple):
    """One training run."""

    kind: str
    lr: float
    seed: int
    steps: int


def losses(path: str, run: Run) -> list[float]:
    """The training loss of each step, in nats per token."""
    base = config.load_recipe(path)
    optimizer = dataclasses.replace(
        base.optimizer, kind=run.kind, peak_lr=run.lr, warmup_steps=run.steps // 10
    )
    recipe = dataclasses.replace(
        base, optimizer=optimizer, steps=run.steps, seed=run.seed, checkpoint_every=run.steps
    )
    rows = trainer.load_corpus(recipe).dataset
    assert isinstance(rows, data.Dataset)
    state = trainer.init_state(trainer.lay_out(recipe), CPU)
    step = trainer.make_step(trainer.lay_out(recipe))
    found = []
    for i in range(run.steps):
        batches = trainer.make_batches(recipe, rows.batch_at(i), CPU)
        state, numbers = step(state, batches, learning_rate(recipe, i))
        found.append(float(numbers.loss))
    return found


def in_process(path: str, run: Run) -> dict[str, Any]:
    """The same in a process of one thread."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.optimizers", "--config", path, "--run", json.dumps(run)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{run} failed:\n{done.stderr}")
    seconds = time.monotonic() - began
    print(f"{run}: {seconds:.0f} s", flush=True)
    return {
        **run._asdict(),
        "losses": json.loads(done.stdout.splitlines()[-1]),
        "seconds": round(seconds, 1),
    }


def smooth(values: list[float]) -> list[float]:
    """Mean of the last losses at each step."""
    parts = (values[max(0, i + 1 - WINDOW) : i + 1] for i in range(len(values)))
    return [statistics.fmean(part) for part in parts]


def curves(results: list[dict[str, Any]]) -> dict[tuple[str, float, int], list[float]]:
    """Smoothed losses by kind, learning rate and steps: means over seeds."""
    runs: dict[tuple[str, float, int], list[list[float]]] = defaultdict(list)
    for r in results:
        runs[r["kind"], r["lr"], r["steps"]].append(smooth(r["losses"]))
    return {
        key: [statistics.fmean(at) for at in zip(*each, strict=True)] for key, each in runs.items()
    }


def report(results: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Prints the table and the answers."""
    found = curves(results)
    short = round(SHARE * steps)
    print(
        f"\n{'optimiser':10} {'peak lr':>9} {'steps':>6} {'final loss':>11} "
        f"{'spread over seeds':>19}"
    )
    for (kind, lr, count), curve in sorted(found.items()):
        ends = [
            smooth(r["losses"])[-1]
            for r in results
            if (r["kind"], r["lr"], r["steps"]) == (kind, lr, count)
        ]
        print(
            f"{kind:10} {lr:9.1e} {count:6} {curve[-1]:11.4f} {min(ends):9.4f} .. {max(ends):.4f}"
        )
    best = {
        kind: min((c[-1], lr) for (k, lr, n), c in found.items() if k == kind and n == steps)
        for kind in KINDS
    }
    goal, muon = best["adamw"][0], found["muon", best["muon"][1], steps]
    reached = next((i + 1 for i, loss in enumerate(muon) if loss <= goal), 0)
    shorter = min(c[-1] for (k, _, n), c in found.items() if k == "muon" and n == short)
    answer = {
        "adamw_final_loss": goal,
        "adamw_lr": best["adamw"][1],
        "muon_final_loss": best["muon"][0],
        "muon_lr": best["muon"][1],
        "muon_reaches_it_at_share_of_steps": reached / steps,
        "muon_final_loss_with_0.8_of_steps": shorter,
    }
    print(
        f"\nAdamW's final loss {goal:.4f} (lr {best['adamw'][1]:.1e}); Muon's "
        f"{best['muon'][0]:.4f}",
        end=" ",
    )
    print(f"(lr {best['muon'][1]:.1e})")
    where = f"at step {reached} of {steps}: {reached / steps:.2f}" if reached else "never"
    print(
        f"Muon has it in its own run {where}; with a schedule of {short} steps it ends at "
        f"{shorter:.4f}"
    )
    for kind in KINDS:
        lrs = sorted({r["lr"] for r in results})
        edge = best[kind][1]
        if edge in (lrs[0], lrs[-1]):
            print(
                f"note: {kind}'s best learning rate {edge:.1e} is the first or last of those tried"
            )
    return answer


def draw(results: list[dict[str, Any]], answer: dict[str, Any], steps: int, out: Path) -> None:
    """The mean curves at the best learning rates."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    for kind in KINDS:
        curve = curves(results)[kind, answer[f"{kind}_lr"], steps]
        axes.plot(
            range(WINDOW, steps + 1),
            curve[WINDOW - 1 :],
            label=f"{kind}, lr {answer[f'{kind}_lr']:.1e}",
        )
    axes.axhline(answer["adamw_final_loss"], color="#909090", linewidth=0.8, linestyle="dotted")
    axes.set(xlabel="step", ylabel=f"training loss, mean of {WINDOW} steps and of seeds")
    axes.legend(frameon=False)
    figure.savefig(out, dpi=120, bbox_inches="tight")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=str(ROOT / "configs" / "tiny.py"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lrs", type=float, nargs="+", default=[2.5e-3, 5e-3, 1e-2])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--out",
        default=str(ROOT / "benchmarks" / "results" / "optimizers"),
        help="without a suffix",
    )
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(losses(args.config, Run(*json.loads(args.run)))))
        return
    told(parser, lambda: config.load_recipe(args.config))
    # the longest first, so that none is left alone at the end
    lengths = [
        ("muon", args.steps),
        ("adamw", args.steps),
        ("muon", round(SHARE * args.steps)),
    ]
    runs = []
    for kind, steps in lengths:
        for lr in args.lrs:
            runs += [Run(kind, lr, seed, steps) for seed in range(args.seeds)]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda run: in_process(args.config, run), runs))
    answer = report(results, args.steps)
    about = {
        "config": args.config,
        "steps": args.steps,
        "window": WINDOW,
        "torch": torch.__version__,
    }
    about |= {"machine": platform.processor() or platform.machine(), "jobs": args.jobs}
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(
        json.dumps({**about, **answer, "runs": results}, indent=1) + "\n"
    )
    draw(results, answer, args.steps, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
