"""The command line of ``train.py``."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch

from k31fn import commands, data, regular_files, trackers
from k31fn import device as devices
from k31fn.checkpoint.errors import CheckpointError
from k31fn.config.files import load_recipe, register_kinds
from k31fn.config.mesh_checks import check_placement, check_split
from k31fn.config.overrides import override
from k31fn.config.recipe import Recipe
from k31fn.jit.function import CaptureError
from k31fn.kernels import choice
from k31fn.kernels.registry import use_impl
from k31fn.kernels.warmup.pool import WarmUpError
from k31fn.layers import kinds
from k31fn.trainer import folder
from k31fn.trainer.console import View
from k31fn.trainer.corpus import load_corpus
from k31fn.trainer.current_phase import JitMode, check_jit
from k31fn.trainer.init_source import check_start, settled_base, with_base
from k31fn.trainer.log import NonFiniteError
from k31fn.trainer.profile import parse_steps
from k31fn.trainer.ranks.agreement import OtherRankError, Ranks
from k31fn.trainer.ranks.launch import Process, join
from k31fn.trainer.ranks.stop import Stop
from k31fn.trainer.run import Outcome, train
from k31fn.trainer.warmup import warm_up

__all__ = ["main"]

_USAGE = """usage: train.py CONFIG [--FIELD VALUE ...]

CONFIG is a recipe, configs/NAME.py, or a run to go on with, RUN/config.json.

  train.py configs/tiny.py                       trains the recipe; the run goes to runs/tiny/<time>
  train.py configs/tiny.py --steps 300 --optimizer.peak-lr 3e-3
                                                    any field of the recipe can be set
  train.py configs/tiny.py --resume auto    goes on with the newest run of the recipe, or starts one
  train.py runs/tiny/<time>/config.json             goes on with that run
  train.py runs/mine/<time>/config.json --recipe mine.py
                                                    the same, of layers that mine.py registers
  train.py configs/tiny.py --help                   lists all fields with their values

  torchrun --nproc_per_node=4 train.py configs/tiny.py --mesh.fsdp 2 --mesh.ep 2 --mesh.dp 2
                                                    a process per device; the mesh has as many ranks
"""
# What a run may end with, with everything saved; anything else is a mistake, with its traceback.
_FAILURES = (CaptureError, NonFiniteError, CheckpointError, OtherRankError, WarmUpError)
_MOST_THREADS = 1024
_LONGEST_S = 1e8  # three years; the process group's clock takes no more than some hundred
_DESCRIPTION = (
    "Trains the recipe. Ctrl-C, SIGTERM and --max-minutes end the run after the step under way, "
    "saved."
)


@dataclass(frozen=True)
class _RunOptions:
    """How this process runs the recipe; no field of it changes a number of the run.

    Attributes:
        resume: "auto" goes on with the newest run of the recipe's name, or starts one if there is
            none; a run folder: goes on with that run. RUN/config.json goes on with RUN by itself.
        recipe: the recipe file that registers layers of the run's that are not the library's, for
            RUN/config.json, whose values count.
        runs: where run folders go.
        device: cpu, cuda, cuda:1, npu:0; if empty, the best of this machine. With several processes
            the kind alone.
        threads: CPU threads; 0: one per core.
        kernels: implementations of operators, such as "reference", "triton" or
            "attn_res:triton,mhc_pre:reference"; if empty, the device's own. No number of a run
            depends on them, but for rounding.
        profile: FIRST:END records a trace of these steps, without the last; 10:12 are steps 10 and
            11.
        warmup: before the first step compile the kernels in parallel processes, and rehearse a
            step.
        warmup_processes: how many; 0: one per core.
        jit: whether a step is captured as one graph, which later steps launch: "auto" on one GPU,
            where that works; "on", "off". The numbers of the run are the same.
        timeout: seconds that a rank waits for the others before the run ends with a report of who
            is missing.
        max_minutes: after which the run ends, once the step under way is through, saved.
    """

    resume: str = ""
    recipe: str = ""
    runs: str = "runs"
    device: str = ""
    threads: int = 0
    kernels: str = ""
    profile: str = ""
    warmup: bool = False
    warmup_processes: int = 0
    jit: str = "auto"
    timeout: float = 600.0
    max_minutes: float = float("inf")

    def __post_init__(self) -> None:
        for name in ("threads", "warmup_processes"):
            if not 0 <= getattr(self, name) <= _MOST_THREADS:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least 0 and at most {_MOST_THREADS}"
                )
        parse_steps(self.profile)
        regular_files.path(self.runs, "runs")  # or a clear error before any work
        if not 0 < self.timeout <= _LONGEST_S:
            raise ValueError(
                f"timeout={self.timeout} must be a positive number of seconds, at most "
                f"{_LONGEST_S:.0f}"
            )
        if not self.max_minutes > 0:
            raise ValueError(f"max_minutes={self.max_minutes} must be more than 0")


@dataclass(frozen=True)
class _CliArgs:
    """All that the command line can set; both parts' fields stand side by side."""

    options: _RunOptions = field(metadata={"flat": True})
    recipe: Recipe = field(metadata={"flat": True})


@commands.outlives_output("train.py: standard output is gone, and the run goes on")
def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit status.

    0: done, or stopped by a signal with everything saved. 1: failed. 2: a wrong call, and nothing
    was written.
    130: interrupted before there was anything to save, or by a second Ctrl-C.

    Each process of a run on several calls this. What they all have to say, one says; what one has
    to say, it says with its rank and its place in the mesh.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    process = Process.of_environment()
    if not args or args[0] in ("-h", "--help"):
        with process.speaking():
            print(_USAGE, end="", file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    try:
        return _main(args, process)
    except KeyboardInterrupt as error:
        return _fail(error, 130, "interrupted")


def _main(args: Sequence[str], process: Process) -> int:
    # Up to here no rank knows of another: all read the same arguments and come to the same end.
    with process.speaking():
        try:
            call = _parse(args)
            kernels = choice.parse(call.options.kernels)
            process.check(call.recipe.mesh, args)
            _check_profile(call)
            device = _device(call.options, process)
            choice.check(kernels, device.type)
            check_jit(call.recipe, device, call.options.jit)
        except (ValueError, ImportError, OSError) as error:
            return _fail(error, 2)
    # before the first tensor, or the allocator's settings come too late for what it holds by then
    devices.keep_heap(device)
    config = Path(args[0])
    with use_impl(**kernels):
        if process.world_size == 1:
            return _run(call, config, device, Ranks(), process)
        with join(call.recipe.mesh, device, call.options.timeout) as ranks:
            return _run(call, config, device, ranks, process)


def _check_profile(call: _CliArgs) -> None:
    # a trace that never ends would only be missed when the run is over
    steps = parse_steps(call.options.profile)
    if steps and steps[-1] >= call.recipe.steps:
        raise ValueError(
            f"profile={call.options.profile!r} ends after the run's {call.recipe.steps} steps"
        )


def _device(options: _RunOptions, process: Process) -> torch.device:
    device = devices.parse(options.device) if options.device else devices.default()
    if process.world_size == 1:
        return device
    # several processes: the option names the kind alone, and each takes one of this machine's
    return devices.of_rank(device, process.local_rank)


def _parse(args: Sequence[str]) -> _CliArgs:
    if args[0].startswith("-"):
        raise ValueError(
            f"the config comes first, then {args[0]}: train.py configs/tiny.py {shlex.join(args)}"
        )
    config = Path(args[0])
    registers = _recipe_option(args)
    if registers and config.suffix != ".json":
        raise ValueError(
            f"recipe={registers!r} goes with RUN/config.json; {config} is a recipe itself: leave "
            "--recipe out"
        )
    if registers:
        register_kinds(regular_files.path(registers, "recipe"))
    call = _CliArgs(_RunOptions(), load_recipe(config))
    call = override(call, args[1:], prog=f"train.py {args[0]}", description=_DESCRIPTION)
    # not in Recipe itself: a forecast makes recipes of few layers, of which less may split
    check_split(call.recipe.mesh, call.recipe.model)
    check_placement(call.recipe.mesh, call.recipe.model)
    return call


def _recipe_option(args: Sequence[str]) -> str:
    """What ``--recipe`` says; empty: it is not there, or without a value."""
    # By hand: the other arguments are fields of the run's layers, whose kinds it registers first.
    value = ""
    for place, argument in enumerate(args):
        name, equals, rest = argument.partition("=")
        if name == "--recipe":
            value = rest if equals else "".join(args[place + 1 : place + 2])
    return value


def _run(call: _CliArgs, config: Path, device: torch.device, ranks: Ranks, process: Process) -> int:
    recipe, options = call.recipe, call.options
    runs = regular_files.path(options.runs, "runs")
    stop = Stop(options.max_minutes)  # the clock starts here, so reading the text counts
    # All that can be refused is refused before the folder is made: a wrong call leaves nothing. The
    # first rank alone looks at folders, which may change between two looks.
    try:
        ranks.on_first(lambda: trackers.check(recipe.trackers))
        existing = ranks.on_first(lambda: _existing(recipe, options, config))
        if not existing:
            ranks.on_first(lambda: check_start(recipe))
        began_as = Path(existing) if existing else None
        recipe = with_base(recipe, ranks.on_first(lambda: settled_base(recipe, began_as)))
        corpus = ranks.on_each(lambda: load_corpus(recipe))
        if options.threads:
            torch.set_num_threads(options.threads)
        where = Path(existing or ranks.on_first(lambda: str(folder.new(runs, recipe))))
    except (ValueError, ImportError, OSError, CheckpointError, OtherRankError) as error:
        return _fail(error, 2)
    if ranks.first:
        for note in corpus.notes:
            print(f"train.py: {regular_files.shown(note)}", file=sys.stderr)
    view = View() if ranks.first else View.silent()
    ranks.record_in(where / "failure")
    try:
        if options.warmup:
            warm_up(
                recipe,
                device,
                view,
                ranks=ranks,
                compiles=process.local_rank == 0,  # one per host; the others load what it made
                processes=options.warmup_processes,
            )
        # Signals end the run cleanly only from here on, and a rank that stays away is looked for:
        # before, there is nothing to save, and compiling may take longer than the timeout.
        with stop.listening(), ranks.watch:
            outcome = train(
                recipe,
                corpus,
                where,
                device=device,
                view=view,
                stop=stop,
                ranks=ranks,
                profile=parse_steps(options.profile),
                rehearsal=options.warmup,
                jit=cast(JitMode, options.jit),
            )
    except (ValueError, ImportError, OSError, *_FAILURES) as error:
        # after an OSError the folder stays: a full disk may have room again
        if ranks.first and not existing and not isinstance(error, OSError):
            folder.drop_if_unused(where)
        if isinstance(error, NonFiniteError) and not ranks.first:
            return 1  # every rank has the same numbers; the first one says it
        return _fail(error, 1)
    if ranks.first:
        registers = options.recipe or str(config)
        _report(outcome, recipe, where, registers, stop, process)
    return 0


def _existing(recipe: Recipe, options: _RunOptions, config: Path) -> str:
    """The run folder to go on with; empty: a new one."""
    run: Path | None = None
    if config.name == folder.CONFIG:
        names_a_run = options.resume not in ("", "auto")
        if names_a_run and Path(options.resume).resolve() != config.parent.resolve():
            raise ValueError(
                f"resume={options.resume!r}: {config} goes on with its own run; give one of the "
                "two alone"
            )
        run = folder.open_existing(config.parent, recipe)
    elif options.resume == "auto":
        run = folder.newest(regular_files.path(options.runs, "runs"), recipe)
    elif options.resume:
        run = folder.open_existing(regular_files.path(options.resume, "resume"), recipe)
    return str(run or "")


def _report(
    outcome: Outcome, recipe: Recipe, where: Path, registers: str, stop: Stop, process: Process
) -> None:
    # A config.json registers no kinds of layers: where the run has some, the recipe does.
    added = kinds.added((*recipe.model.sublayers.values(), recipe.model.residual))
    with_kinds = ["--recipe", registers] if added else []
    if outcome.complete:
        print(f"curve:   {where / 'loss.png'}")
        print(f"metrics: {where / 'metrics.jsonl'}")
        # a prompt of text: what a run on prepared data has learnt to go on with is not known here
        if isinstance(recipe.data, data.Config):
            python = Process().command().removesuffix(" train.py")
            words = ["-m", "k31fn.sample", str(where), *with_kinds, "--prompt", "def "]
            print(f"sample:  {python} {shlex.join(words)}")
        return
    saved = ", saved" if outcome.step else ""
    print(f"stopped by {stop.cause} after {outcome.step} steps{saved}; to go on:")
    # the run's config.json, not the recipe with --resume, which knows no override of this call
    arguments = [str(where / folder.CONFIG), *with_kinds]
    # config.json has the mesh that the run began on; this process may have had another one
    began = dataclasses.asdict(folder.recipe_of(where).mesh)
    for view, size in dataclasses.asdict(recipe.mesh).items():
        if size != began[view]:
            arguments += [f"--mesh.{view}", str(size)]
    print(f"{process.command()} {shlex.join(arguments)}")


def _fail(error: BaseException, status: int, text: str = "") -> int:
    """Says what went wrong, unless another rank does."""
    if not isinstance(error, OtherRankError):
        commands.print_own_traceback(error)
        for line in (text or str(error), *getattr(error, "__notes__", ())):
            print(f"train.py: {regular_files.shown(line)}", file=sys.stderr)
    return status
