"""What a run does before its first step under ``train.py --warmup``: compiles its kernels, and
rehearses a step.

Which kernels follows from the recipe: each rank runs its step on meta tensors and notes the calls
of operators. The first process of each host compiles the kernels of all ranks, in processes of its
own, into a cache that the others load. The rehearsal is a step of rows without labels, which
changes nothing: it makes the libraries of the device load and choose their own kernels, and the
ranks connect.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

from k31fn import data
from k31fn import device as devices
from k31fn.config.phase import spans
from k31fn.config.recipe import Recipe
from k31fn.kernels.launch import INTERPRETED, missing_triton
from k31fn.kernels.registry import watch_calls
from k31fn.kernels.shapes import shapes_only
from k31fn.kernels.warmup import Launch, OpCalls, launches
from k31fn.kernels.warmup.pool import Compilers, WarmUpError
from k31fn.layers import losses
from k31fn.parallel.backends.processes import exchange_json
from k31fn.parallel.collectives import own_index
from k31fn.parallel.mesh import MeshAxes
from k31fn.trainer.console import View
from k31fn.trainer.forecast.abstract_rank import run_step
from k31fn.trainer.ranks.agreement import Ranks
from k31fn.trainer.state import TrainState
from k31fn.trainer.step import Step, make_batches

__all__ = ["rehearse", "warm_up"]


class _Warmed(NamedTuple):
    """What a warm-up did.

    Attributes:
        states: of the kernels that this process had compiled: "found", "compiled", "rebuilt"; how
            many of each.
        found_s: seconds in which it was found out what to compile.
        compiled_s: in which it was compiled.
        loaded_s: in which it was loaded.
    """

    states: Counter[str]
    found_s: float
    compiled_s: float
    loaded_s: float

    def __str__(self) -> str:
        parts = []
        for name in ("compiled", "rebuilt", "found"):
            if self.states[name]:
                parts.append(f"{self.states[name]} {name}")
        seconds = (
            f"{self.found_s:.1f} s to find them, {self.compiled_s:.1f} s to compile, "
            f"{self.loaded_s:.1f} s to load"
        )
        return f"warm-up: {self.states.total()} kernels ({', '.join(parts)}); {seconds}"


def _calls_of(recipe: Recipe, stage_rank: int = 0) -> OpCalls:
    """The calls of operators in a step of a rank of that stage of the pipeline, in every phase of
    the run.
    """
    calls = OpCalls()
    starts = [span.start for span in spans(recipe.phases, recipe.steps)] or [0]
    with shapes_only(), watch_calls(calls):
        for step in starts:  # a replay of remat calls what the forward did
            now = recipe.at(step)
            # all micro-batches are alike; an interleaved pipeline takes as many at a time as it has
            # ranks
            count = now.mesh.pp if now.pipeline.num_chunks > 1 and now.mesh.pp > 1 else 1
            size = now.batch_size // now.micro_batches * count
            one = dataclasses.replace(now, micro_batches=count, batch_size=size, remat="none")
            run_step(one, stage_rank)
    return calls


def warm_up(
    recipe: Recipe,
    device: torch.device,
    view: View,
    *,
    ranks: Ranks,
    compiles: bool,
    processes: int = 0,
) -> _Warmed | None:
    """Compiles and loads what a step of ``recipe`` launches on ``device``, by the implementations
    in force.

    Args:
        recipe: the run.
        device: of this rank.
        view: where it says what it does.
        ranks: of the run; all call this.
        compiles: whether this is the process of its host that compiles.
        processes: that compile at the same time; 0: one per core.

    Returns:
        What was done; None where there are no kernels to compile.

    Raises:
        WarmUpError: a kernel does not compile.
        ValueError: an operator refuses its arguments.
        OtherRankError: one of these on another rank.
    """
    if device.type == "cpu" or missing_triton() or INTERPRETED:
        view.note(f"warm-up: no kernels to compile on {device.type}")
        return None
    # by name: the module imports triton, which need not be installed
    cache = importlib.import_module("k31fn.kernels.warmup.triton")
    folder: Path = cache.folder(devices.name(device))
    cache.use_folder(folder)
    count = 0
    if compiles:
        count = processes or devices.num_cores(torch.device("cpu"))
    clock = [time.perf_counter()]
    # The processes import torch and triton, which takes them seconds, while this one finds out what
    # to compile.
    with Compilers(count, folder) as compilers:
        own = ranks.on_each(lambda: launches(_calls_of(recipe, own_index(ranks.axes.pp)), device))
        clock.append(time.perf_counter())
        wanted = _of_all(own, ranks)
        states = Counter[str]()
        error = None
        if compiles:
            try:
                with view.working("compiling kernels", len(wanted)) as advance:
                    states.update(compilers.compile(wanted, lambda state: advance(1)))
            except WarmUpError as e:
                error = e
        clock.append(time.perf_counter())
        # until then the others wait here: they must not look for a kernel that is being compiled
        ranks.agree(error=error)
    cache.load(own, on_device=True)
    clock.append(time.perf_counter())
    done = _Warmed(states, *(b - a for a, b in itertools.pairwise(clock)))
    view.note(str(done))
    return done


def _of_all(own: list[Launch], ranks: Ranks) -> list[Launch]:
    """What any rank launches: the stages of a pipeline differ, and a host may have ranks of
    several.
    """
    wanted: dict[Launch, None] = {}  # in the order of the ranks, each once
    for of_rank in exchange_json(own, ranks.axes.atoms):
        for module, name, tile, dtypes in of_rank:
            # lists since they came as JSON, which has no tuples
            wanted[Launch(module, name, (tile[0], tile[1], tile[2]), dtypes)] = None
    return list(wanted)


def rehearse(
    recipe: Recipe,
    step: Step,
    state: TrainState,
    rows: data.Example,
    device: torch.device,
    axes: MeshAxes,
) -> tuple[TrainState, float]:
    """A step of these rows without their labels, so that it is skipped; all ranks call this.

    Args:
        recipe: of the phase that begins.
        step: of that phase; gives up the state, as any step.
        state: before.
        rows: of this rank.
        device: of this rank.
        axes: of the run's mesh, bound to this rank.

    Returns:
        The state with the values that it had, and the seconds that it took.
    """
    began = time.perf_counter()
    unlabelled = dataclasses.replace(rows, labels=torch.full_like(rows.labels, losses.IGNORED))
    # the step counts itself although it is skipped, and the run must not be one ahead
    done = state.step
    batches = make_batches(recipe, unlabelled, device, axes)
    new, _ = step(state, batches, devices.number(0.0, device))
    devices.synchronize(device)
    return dataclasses.replace(new, step=done), time.perf_counter() - began
