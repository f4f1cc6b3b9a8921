"""The first step of a run with and without warm-up: ``python -m benchmarks.warmup configs/tiny.py
--compute bfloat16``.

Each measurement is a process of its own with an empty cache of kernels: a cold first step; a
warm-up by 1, 4 and 12 processes, a rehearsed step, and the first step after it; the same with
everything in the cache. After a warm-up no step may compile anything, or the benchmark fails. The
rows are random tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import told
from k31fn import data, random, segments
from k31fn import device as devices
from k31fn.config import Recipe, load_recipe, override
from k31fn.kernels import choice
from k31fn.kernels.registry import use_impl
from k31fn.parallel import MeshAxes
from k31fn.trainer import init_state, lay_out, make_batches, make_step
from k31fn.trainer.console import View
from k31fn.trainer.ranks.agreement import Ranks
from k31fn.trainer.warmup import rehearse, warm_up

__all__ = ["main"]

_PROCESSES = (1, 4, 12)


def one(recipe: Recipe, processes: int) -> dict[str, Any]:
    """A warm-up by so many processes and a rehearsal (0: neither), then three steps; seconds and
    compilations.
    """
    from k31fn.kernels.warmup import triton as cache  # needs triton

    device = devices.default()
    found = dict[str, Any](processes=processes, device=devices.name(devices.default()))
    (
        torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    ).sum().item()  # the device and its library
    cache.use_folder(cache.folder(devices.name(device)))
    if processes:
        began = time.perf_counter()
        warmed = warm_up(
            recipe, device, View.silent(), ranks=Ranks(), compiles=True, processes=processes
        )
        found["warm_up_s"] = time.perf_counter() - began
        if warmed is not None:
            found |= {**warmed._asdict(), "states": dict(warmed.states)}
    state = init_state(lay_out(recipe), device)
    step = make_step(lay_out(recipe))
    tokens = (
        random.bits(random.key(0), (recipe.batch_size, recipe.length)) % recipe.model.vocab_size
    )
    packing = segments.whole(*tokens.shape)
    rows = data.Example(tokens, segments.next_token_labels(tokens, packing), packing, ())
    if processes:
        with cache.compilations() as made:
            state, found["rehearsed_s"] = rehearse(recipe, step, state, rows, device, MeshAxes())
        found["rehearsed_compiled"] = list(made)
    for number in range(3):
        devices.synchronize(device)
        began = time.perf_counter()
        with cache.compilations() as made:
            state, _ = step(state, make_batches(recipe, rows, device), 1e-3)
            devices.synchronize(device)
        found[f"step_{number}_s"] = time.perf_counter() - began
        found[f"step_{number}_compiled"] = list(made)
    return found


def _measured(args: Sequence[str], folder: str, processes: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.warmup", *args, "--one", str(processes)]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_CACHE_DIR": folder},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _late(found: dict[str, Any]) -> list[str]:
    """The kernels that were compiled after a warm-up."""
    return [*found.get("rehearsed_compiled", ()), *found["step_0_compiled"]]


def _row(name: str, found: dict[str, Any]) -> str:
    kernels = sum(found.get("states", {}).values())
    compiled = len(_late(found))
    named = ("warm_up_s", "found_s", "compiled_s", "loaded_s", "rehearsed_s")
    parts = [f"{found[k]:.2f} s" if k in found else "" for k in named]
    steps = [f"{found['step_0_s']:.2f} s", f"{found['step_2_s']:.2f} s"]
    return (
        "| "
        + " | ".join([name, str(kernels or ""), *parts, steps[0], str(compiled), steps[1]])
        + " |"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and writes JSON; returns 1 if a step after a warm-up compiled anything."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.warmup", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--kernels", default="", help="implementations, as for train.py")
    parser.add_argument("--json", default="", help="where the numbers go")
    parser.add_argument("--one", type=int, default=-1, help=argparse.SUPPRESS)
    given, fields = parser.parse_known_args(argv)
    recipe = told(
        parser, lambda: override(load_recipe(given.config), fields, prog="benchmarks.warmup")
    )
    if given.one >= 0:
        with use_impl(**choice.parse(given.kernels)):
            print(json.dumps(one(recipe, given.one)))
        return 0
    if devices.default().type == "cpu":
        parser.error("this machine has no device with kernels to compile; needs a CUDA device")
    again, results = [str(given.config), "--kernels", given.kernels, *fields], {}
    with tempfile.TemporaryDirectory() as folder:
        results["cold"] = _measured(again, f"{folder}/cold", 0)
        for n in _PROCESSES:
            results[f"{n} processes"] = _measured(again, f"{folder}/{n}", n)
        results["from the cache"] = _measured(again, f"{folder}/{_PROCESSES[-1]}", 1)
    print(
        "| warm-up | kernels | in all | found | compiled | loaded | rehearsed | first step | late "
        "| third step |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, found in results.items():
        print(_row(name, found))
    if given.json:
        Path(given.json).write_text(
            json.dumps({"torch": torch.__version__, **results}, indent=1) + "\n"
        )
    status = 0
    for name, found in results.items():
        kernels = _late(found)
        if kernels and name != "cold":  # without a warm-up all of them are compiled late
            print(f"{name}: compiled after the warm-up: {', '.join(kernels)}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
