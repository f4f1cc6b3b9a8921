"""What training costs beyond the loss and its gradient: ``python -m benchmarks.trainer_overhead``.

A step of the trainer (rows, batches, loss and gradient, clipping, optimiser, balance, metrics file,
TensorBoard, a line on the terminal) against the same loss and gradient of the same rows called in a
bare loop. The two take turns, so a machine that is shared with others slows both; medians. The
optimiser is shown apart: Muon's is mostly the matrix products of Newton-Schulz, about 2.8 GFLOP a
step for configs/tiny.py whatever the size of the batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.measure import told
from k31fn import config, data, model, optim, params, trackers, trainer
from k31fn.autodiff import value_and_grad
from k31fn.trainer.console import View
from k31fn.trainer.log import Log

CPU = torch.device("cpu")
LIMIT = 0.10


def bare(recipe: config.Recipe, weights: Any) -> Callable[[model.Batch], Any]:
    """Loss and gradient, and nothing else."""
    balance = model.init_balance(recipe.model)

    def loss(p: Any, batch: model.Batch) -> Any:
        return model.loss(p, batch, recipe.model, balance=balance)

    gradient = value_and_grad(loss, has_aux=True)
    return lambda batch: gradient(weights, batch)


def full(recipe: config.Recipe, dataset: data.Rows, folder: Path) -> Iterator[None]:
    """The trainer's steps."""
    state = trainer.init_state(trainer.lay_out(recipe), CPU)
    step_fn = trainer.make_step(trainer.lay_out(recipe))
    view = View(Console(file=io.StringIO(), soft_wrap=True, highlight=False))
    view.begin(recipe, folder, 0, dataset)
    log = Log(folder / "metrics.jsonl", trackers.tensorboard(folder / "events", warn=print), view)
    for step in range(recipe.steps):
        lr = optim.warmup_cosine(step, peak=1e-3, num_steps=recipe.steps, warmup_steps=1)
        rows = dataset.batch_at(step)
        state, numbers = step_fn(state, trainer.make_batches(recipe, rows, CPU), lr)
        log.push(step, numbers, lr, rows.tokens.numel())
        yield


def optimiser(recipe: config.Recipe, weights: Any, grads: Any) -> Callable[[], Any]:
    """One update, in place, that is never skipped."""
    transform = trainer.make_optimizer(recipe, trainer.trained_specs(recipe))
    state = transform.init(weights)
    skip = torch.tensor(False)
    return lambda: transform.update(grads, state, weights, lr=1e-6, skip=skip, donate=True)


def timed(times: dict[str, list[float]], name: str, f: Callable[[], Any]) -> None:
    """Adds the seconds that ``f()`` takes."""
    started = time.perf_counter()
    f()
    times[name].append(time.perf_counter() - started)


def measure(recipe: config.Recipe, dataset: data.Rows, warmup: int) -> dict[str, float]:
    """Median seconds of each part."""
    specs = trainer.trained_specs(recipe)
    weights = params.init(specs, torch.zeros(2, dtype=torch.int64), dtype=torch.float32)
    gradient = bare(recipe, weights)
    (batch,) = trainer.make_batches(recipe, dataset.batch_at(0), CPU)
    update = optimiser(recipe, weights, gradient(batch)[1])
    times: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        steps = full(recipe, dataset, Path(folder))
        for step in range(recipe.steps):
            (batch,) = trainer.make_batches(recipe, dataset.batch_at(step), CPU)
            timed(times, "bare", lambda: gradient(batch))  # noqa: B023
            timed(times, "full", lambda: next(steps))
            timed(times, "optimiser", update)
    return {name: statistics.median(values[warmup:]) for name, values in times.items()}


def main() -> int:
    """Prints a line per optimiser; the exit status is 1 if more than a tenth of a step is
    machinery.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=str(Path(__file__).parents[1] / "configs" / "tiny.py"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    base = told(parser, lambda: config.load_recipe(args.config))
    dataset = trainer.load_corpus(base).dataset
    over = False
    for kind in ("adamw", "muon"):
        recipe = dataclasses.replace(
            base, steps=args.steps, micro_batches=1, optimizer=config.Optimizer(kind=kind)
        )
        t = measure(recipe, dataset, args.warmup)
        rest = t["full"] - t["bare"] - t["optimiser"]
        share = (t["full"] - t["bare"]) / t["full"]
        print(
            f"{kind:6} step {1e3 * t['full']:7.1f} ms = loss and gradient {1e3 * t['bare']:.1f} + "
            "optimiser "
            f"{1e3 * t['optimiser']:.1f} + the rest {1e3 * rest:.1f}; machinery {share:.1%} of "
            "the step, "
            f"{rest / t['full']:.1%} without the optimiser"
        )
        over |= share > LIMIT
    return int(over)


if __name__ == "__main__":
    raise SystemExit(main())
