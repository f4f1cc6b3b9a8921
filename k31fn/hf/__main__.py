"""Checkpoints in K3's names, from and to runs: ``python -m k31fn.hf``.

* ``verify FOLDER`` compares a checkpoint with its config, without loading it.
* ``import FOLDER configs/tiny.py`` makes a run that starts from a checkpoint, to sample from or to
  train on.
* ``export RUN FOLDER`` writes a run's newest checkpoint, ``export RUN/checkpoints/STEP FOLDER``
  that one; adapters are merged into the weights that they adapt.

The commands are one process, which holds the whole model; ``hf.load`` and ``hf.export`` work in
slices on any mesh.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path

import torch

from k31fn import data, hf, lora, model, params, regular_files, sample, trainer
from k31fn.checkpoint.checkpointer import Checkpointer
from k31fn.commands import outlives_output, parse_arguments, print_own_traceback
from k31fn.config.files import load_recipe
from k31fn.hf_format.config import describe
from k31fn.hf_format.leaves import check_new
from k31fn.trainer import folder
from k31fn.trainer.corpus import check_vocabulary

__all__ = ["main"]


@outlives_output()
def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status.

    0: done. 1: what ``verify`` looked at is not right, or reading or writing failed. 2: a wrong
    call, of which nothing was written.
    """
    args = parse_arguments(_parser(), arguments)
    command = {"verify": _verify, "import": _import, "export": _export}[args.command]
    try:
        return command(args)
    except (ValueError, RuntimeError, OSError) as error:
        # A line instead of a traceback: what these say is meant for the one who typed the command.
        print_own_traceback(error)
        print(f"k31fn.hf: {regular_files.shown(error, args.folder)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m k31fn.hf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "verify", help="compare a folder with its config.json, from headers alone"
    )
    command.add_argument(
        "folder", type=regular_files.path, help="of safetensors files and config.json"
    )
    command = commands.add_parser(
        "import", help="make a run whose first state has the weights of a checkpoint"
    )
    command.add_argument(
        "folder", type=regular_files.path, help="of safetensors files and config.json"
    )
    command.add_argument(
        "config", type=regular_files.path, help="a recipe; its model becomes the checkpoint's"
    )
    command.add_argument(
        "--runs", type=regular_files.path, default=Path("runs"), help="where run folders go"
    )
    command = commands.add_parser("export", help="write a checkpoint of a run")
    command.add_argument(
        "run",
        type=regular_files.path,
        help="a run folder, RUN/checkpoints/STEP, or a folder of runs: the newest",
    )
    command.add_argument("folder", type=regular_files.path, help="a new one")
    command.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights"
    )
    command.add_argument("--quantise", action="store_true", help="routed experts as MXFP4")
    return parser


def _verify(args: argparse.Namespace) -> int:
    if not args.folder.is_dir():
        raise ValueError(
            f"{str(args.folder)!r} is no folder; give one of safetensors files and config.json"
        )
    report = hf.verify(args.folder)
    tensors = f"{report.num_tensors:,} tensors ({report.num_quantised:,} of them MXFP4 codes)"
    print(f"{args.folder}: {report.num_weights:,} weights in {tensors} in {report.num_files} files")
    # Counts first, also of what does not fit: they often say what the folder is instead.
    print(regular_files.shown(report.problems) or "fits its config")
    return 1 if report.problems else 0


def _import(args: argparse.Namespace) -> int:
    """The checkpoint's model, trained as the recipe says: what a config file cannot keep is the
    recipe's.
    """
    recipe = load_recipe(args.config)
    # A run of adapters saves only them and reads their base at each start: nothing to import.
    if recipe.lora:
        raise ValueError(
            f"{args.config} trains adapters, and a checkpoint is what they are of: python "
            f"train.py {args.config} --lora.base {args.folder}"
        )
    # The checkpoint's sizes, whatever the recipe's model has.
    recipe = dataclasses.replace(recipe, model=hf.config_from_hf(args.folder))
    # Before the weights are read: the run would be made, and could not be trained on.
    tokenizer = data.open_tokenizer(recipe.data.tokenizer, end=recipe.data.end)
    fix = f"set data.tokenizer in {args.config} to its own"
    check_vocabulary(recipe, tokenizer, f"the checkpoint is of another tokenizer: {fix}")
    if tokenizer.vocab_size < recipe.model.vocab_size:
        # Not refused: a vocabulary is often padded, and a wrong tokenizer's ids all have a row.
        print(
            f"k31fn.hf: model.vocab_size={recipe.model.vocab_size} of {args.folder} is more than "
            f"the {tokenizer.vocab_size} tokens of data.tokenizer={recipe.data.tokenizer!r}: it is "
            f"padded, or the checkpoint is of another tokenizer; then {fix}",
            file=sys.stderr,
        )
    weights, biases = hf.load(args.folder, recipe.model, dtype=recipe.precision.param)
    # The state before step 0: training goes on from it as from any checkpoint.
    state = trainer.first_state(trainer.lay_out(recipe), weights, biases)
    run = folder.new(args.runs, recipe)
    try:
        # The whole state, with an optimiser that has taken no step: a run restores never less.
        with Checkpointer(run / "checkpoints", keep=recipe.keep) as checkpoints:
            checkpoints.save(0, state)
    except BaseException:
        # Of a run without that state training would begin with weights that it draws.
        shutil.rmtree(run, ignore_errors=True)
        raise
    print(f"run: {run}")
    print(f"train on: python train.py {run / folder.CONFIG}")
    return 0


def _export(args: argparse.Namespace) -> int:
    # What can be refused is refused before the model is read, which may take an hour.
    run, step = folder.resolve_step(args.run)
    check_new(args.folder)
    dtype = getattr(torch, args.dtype)
    describe(folder.recipe_of(run).model, dtype, quantised=args.quantise)
    recipe, weights, biases = sample.load(run, where=torch.device("cpu"), step=step)
    # Adapters are merged in float32, then rounded once; what the specs keep wide stays so.
    weights = params.cast(lora.merge(weights), model.specs(recipe.model), dtype)
    hf.export(weights, biases, recipe.model, args.folder, quantise=args.quantise)
    print(f"{args.run if step is not None else run} written to {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
