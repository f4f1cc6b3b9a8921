"""Trains two versions of one run on the same rows and says whether they compute the same: ``python
-m k31fn.pair``.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from k31fn import commands, metrics, regular_files
from k31fn import device as devices
from k31fn.checkpoint.errors import CheckpointError
from k31fn.config.files import load_recipe
from k31fn.config.overrides import override
from k31fn.config.recipe import Recipe
from k31fn.kernels import choice
from k31fn.pair.judge import LEAST_PROBES
from k31fn.pair.report import Report, groups, record, save_plot
from k31fn.pair.runs import Runs, Step
from k31fn.pair.sides import check_alike, parse_side
from k31fn.pair.start import start
from k31fn.trainer import folder
from k31fn.trainer.corpus import load_corpus

__all__ = ["main"]

_USAGE = """usage: python -m k31fn.pair CONFIG --a WHAT... --b WHAT... [--FIELD VALUE ...]

Trains two sides from one seed or checkpoint on the same rows, and side a a second time with its
sums in another order. Exit status: 0 the sides agree up to rounding, 1 they differ, 2 a wrong call.

WHAT is kernels=... or a field of the recipe:
  kernels=reference                   every operator by its reference
  kernels=triton                 Triton where an operator has it, else as the device does by default
  kernels=attn_res:triton,mhc_pre:reference
  remat=layer  compute=bfloat16  model.residual.block-size=4
  optimizer.peak-lr=1e-3  model.moe.qat=true

  python -m k31fn.pair configs/tiny.py --a kernels=reference --b kernels=triton \\
      --steps 300 --compute bfloat16
  python -m k31fn.pair configs/tiny.py --b remat=layer --steps 40      --a alone: as the config says
  python -m k31fn.pair runs/tiny/<time>/config.json --start runs/tiny/<time> \\
      --b kernels=triton --steps 100
  python -m k31fn.pair configs/tiny.py --help                     lists all fields with their values

Writes pairs/<name>/<time>/: pair.jsonl (a line per step), report.json, pair.png.
"""
_DESCRIPTION = "Compares two versions of a run. Fields of the recipe are those of both sides."
_MOST_PROBES = 60  # by default: five in each of the judge's blocks


@dataclass(frozen=True)
class _PairOptions:
    """This comparison.

    Attributes:
        a: side a: kernels=WHAT and FIELD=VALUE; nothing: as the config says.
        b: side b.
        start: a run folder, whose newest checkpoint both begin with; "": the seed's initial values.
        probe_every: steps from one comparison of gradients at equal parameters to the next; 0:
            about 60 in all.
        out: where the folder of the results goes.
        device: cpu, cuda, cuda:1, npu:0; if empty, the best of this machine.
        threads: CPU threads; 0: one per core.
    """

    a: tuple[str, ...] = ()
    b: tuple[str, ...] = ()
    start: str = ""
    probe_every: int = 0
    out: Path = Path("pairs")
    device: str = ""
    threads: int = 0

    def __post_init__(self) -> None:
        for name in ("probe_every", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")


@dataclass(frozen=True)
class _PairArgs:
    """All that a call can set; both parts' fields stand side by side."""

    options: _PairOptions = field(metadata={"flat": True})
    recipe: Recipe = field(metadata={"flat": True})


@commands.outlives_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Compares; returns 0 if the sides agree, 1 if not or if it failed, 2 for a wrong call, 130
    when interrupted.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(_USAGE, end="", file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    try:
        return _main(args)
    except KeyboardInterrupt:
        print("k31fn.pair: interrupted", file=sys.stderr)
        return 130


def _main(args: Sequence[str]) -> int:
    try:
        if args[0].startswith("-"):
            raise ValueError(
                f"the config comes first, then {args[0]}: configs/tiny.py {shlex.join(args)}"
            )
        _check_once(args)
        parsed = override(
            _PairArgs(_PairOptions(), load_recipe(Path(args[0]))),
            args[1:],
            prog=f"python -m k31fn.pair {args[0]}",
            description=_DESCRIPTION,
        )
        options = parsed.options
        a = parse_side("a", options.a, parsed.recipe)
        b = parse_side("b", options.b, parsed.recipe)
        check_alike(a, b, parsed.recipe)
        every = _every(options, parsed.recipe)
        device = devices.parse(options.device) if options.device else devices.default()
        for side in (a, b):
            choice.check(side.kernels, device.type, f"--{side.name} kernels")
        if options.threads:
            torch.set_num_threads(options.threads)
        devices.keep_heap(device)
        corpus = load_corpus(parsed.recipe)
        done, states = start(a, b, device, Path(options.start) if options.start else None)
        # steps are counted from the start of the checkpoint's run, whose rows go on
        recipe = dataclasses.replace(parsed.recipe, steps=done + parsed.recipe.steps)
        runs = Runs(a.until(recipe.steps), b.until(recipe.steps), states, done, device, every)
        # last: a call that is refused leaves no empty folder
        where = folder.new(options.out, recipe)
    except (ValueError, ImportError, OSError, CheckpointError) as error:
        return _fail(error, 2)
    print(
        f"pair {where}: {recipe.steps - done} steps of {recipe.batch_size} x {recipe.length} on "
        f"{device}"
    )
    for side in (a, b):
        print(f"  {side.name}: {side.text}, {side.recipe.compute}")
    try:
        steps = _steps(runs, corpus.dataset, recipe.steps, where / "pair.jsonl")
        return _report(runs, steps, where)
    except (ValueError, OSError, ImportError) as error:
        return _fail(error, 1)


def _check_once(args: Sequence[str]) -> None:
    # tyro takes the last of two flags silently, and half of a side would be lost
    for flag in ("--a", "--b"):
        if sum(arg.partition("=")[0] == flag for arg in args) > 1:
            raise ValueError(
                f"{flag} is given twice, and the last would replace the first; put all its words "
                "after one"
            )


def _every(options: _PairOptions, recipe: Recipe) -> int:
    every = options.probe_every or max(1, recipe.steps // _MOST_PROBES)
    num_probes = -(-recipe.steps // every)  # rounded up: the first step is one
    if num_probes < LEAST_PROBES:
        raise ValueError(
            f"steps={recipe.steps} with probe_every={every}: gradients are compared {num_probes} "
            f"times, which decides nothing; at least {LEAST_PROBES}"
        )
    return every


def _steps(runs: Runs, dataset: object, stop: int, file: Path) -> list[Step]:
    """Takes all steps; a line for each in ``file``, for some on the screen."""
    steps = []
    parts: dict[str, list[str]] = {}
    shown = max(1, stop // 20)  # some 20 lines on the screen, however long the run
    for step in runs.steps(dataset):  # pyright: ignore[reportArgumentType]
        steps.append(step)
        # the parameters are known when the first probe has been taken, with the first step
        parts = parts or groups(list(runs.probes.rows), runs.model)
        line = record(step, runs, parts)
        metrics.append(file, line)
        if step.number % shown == 0 or step.number == stop - 1:
            print(_progress(step, line), flush=True)
    return steps


def _progress(step: Step, line: dict[str, Any]) -> str:
    """The line of a step on the screen."""
    loss_a = step.losses["a"]
    text = f"step {step.number}: loss {loss_a:.4f}  b - a {step.losses['b'] - loss_a:+.1e}"
    if "noise" in step.losses:
        text += f"  noise {step.losses['noise'] - loss_a:+.1e}"
    if step.probe:
        text += f"  gradients {line['grad_apart']:.1e}, {line['worst']} {line['worst_apart']:.1e}"
    return text


def _report(runs: Runs, steps: Sequence[Step], where: Path) -> int:
    report = Report.of(runs, steps)
    folder.write(where / "report.json", json.dumps(report.data, indent=2, allow_nan=False) + "\n")
    print("\n".join(report.lines))
    # without matplotlib the verdict stands, and so does the exit status
    try:
        save_plot(where / "pair.png", runs, steps)
    except ImportError as error:
        print(error)
    print(f"\nrecords: {where / 'pair.jsonl'}\nplot:    {where / 'pair.png'}")
    return 1 if report.differs else 0


def _fail(error: BaseException, status: int) -> int:
    commands.print_own_traceback(error)
    # notes say which field or file an error was met in
    for line in (str(error), *getattr(error, "__notes__", ())):
        print(f"k31fn.pair: {regular_files.shown(line)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
