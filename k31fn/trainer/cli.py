"""The command line of ``train.py``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from k31fn import device as devices
from k31fn.checkpoint import CheckpointError
from k31fn.config import Recipe, load_recipe, override
from k31fn.trainer import folder
from k31fn.trainer.console import View
from k31fn.trainer.log import NonFiniteError
from k31fn.trainer.run import Corpus, Outcome, load_corpus, train
from k31fn.trainer.stop import Stop

__all__ = ["main"]

_USAGE = """usage: train.py CONFIG [--FIELD VALUE ...]

CONFIG is a recipe, configs/NAME.py, or a run to go on with, RUN/config.json.

  train.py configs/tiny.py                          trains the recipe; the run goes to runs/tiny/<time>
  train.py configs/tiny.py --steps 300 --optimizer.peak-lr 3e-3
                                                    any field of the recipe can be set
  train.py configs/tiny.py --resume auto            goes on with the newest run of the recipe, or starts one
  train.py runs/tiny/<time>/config.json             goes on with that run
  train.py configs/tiny.py --help                   lists all fields with their values
"""
_DESCRIPTION = "Trains the recipe. Ctrl-C and SIGTERM end the run after the step under way, saved."


@dataclass(frozen=True)
class _Options:
    """This call.

    Attributes:
        resume: "auto" goes on with the newest run of the recipe's name, or starts one if there is none; a run folder:
            goes on with that run.
        runs: where run folders go.
        device: cpu, cuda, cuda:1, npu:0; if empty, the best of this machine.
        threads: CPU threads; 0: one per core.
    """

    resume: str = ""
    runs: Path = Path("runs")
    device: str = ""
    threads: int = 0

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ValueError(f"threads={self.threads} must be at least 0")


@dataclass(frozen=True)
class _Call:
    """All that a call can set; both parts' fields stand side by side."""

    options: _Options = field(metadata={"flat": True})
    recipe: Recipe = field(metadata={"flat": True})


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit status.

    0: done, or stopped by a signal with everything saved. 1: failed. 2: a wrong call, and nothing was written.
    130: interrupted before there was anything to save, or by a second Ctrl-C.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(_USAGE, end="", file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    try:
        return _main(args)
    except KeyboardInterrupt as error:
        return _fail(error, 130, "interrupted")


def _main(args: Sequence[str]) -> int:
    try:
        if args[0].startswith("-"):
            raise ValueError(f"the config comes first, then {args[0]}: train.py configs/tiny.py {shlex.join(args)}")
        config = Path(args[0])
        call = _Call(_Options(), load_recipe(config))
        call = override(call, args[1:], prog=f"train.py {args[0]}", description=_DESCRIPTION)
        recipe, options = call.recipe, call.options
        device = devices.parse(options.device) if options.device else devices.default()
        devices.keep_heap(device)
        where = _existing(recipe, options, config)
        corpus = load_corpus(recipe)
        if options.threads:
            torch.set_num_threads(options.threads)
        where = where or folder.new(options.runs, recipe)
    except (ValueError, ImportError, OSError) as error:
        return _fail(error, 2)
    return _run(recipe, corpus, where, device)


def _existing(recipe: Recipe, options: _Options, config: Path) -> Path | None:
    """The run folder to go on with; None: a new one."""
    if config.name == folder.CONFIG:
        return folder.open_existing(config.parent, recipe)
    if options.resume == "auto":
        return folder.newest(options.runs, recipe)
    return folder.open_existing(Path(options.resume), recipe) if options.resume else None


def _run(recipe: Recipe, corpus: Corpus, where: Path, device: torch.device) -> int:
    try:
        with Stop().listening() as stop:
            outcome = train(recipe, corpus, where, device=device, view=View(), stop=stop)
    except (ValueError, ImportError, OSError, NonFiniteError, CheckpointError) as error:
        return _fail(error, 1)
    _report(outcome, where, stop)
    return 0


def _report(outcome: Outcome, where: Path, stop: Stop) -> None:
    if outcome.complete:
        print(f"curve:   {where / 'loss.png'}")
        print(f"metrics: {where / 'metrics.jsonl'}")
        print(f"sample:  {_command('-m', 'k31fn.sample', str(where), '--prompt', 'def ')}")
    else:
        print(f"stopped by {stop.signal} after {outcome.step} steps, saved; to go on:")
        print(_command("train.py", str(where / folder.CONFIG)))


def _command(*args: str) -> str:
    """A command line that runs in this folder as it stands."""
    inside = os.path.relpath(sys.executable)
    return shlex.join([sys.executable if inside.startswith(os.pardir) else inside, *args])


def _fail(error: BaseException, status: int, text: str = "") -> int:
    for line in (text or str(error), *getattr(error, "__notes__", ())):
        print(f"train.py: {line}", file=sys.stderr)
    return status
