# pyright: reportMissingImports=false
"""``make ascend-check``: every Triton kernel compiled for Ascend up to machine code, and its IR run
on the CPU.

By default each kernel in the first of its listed shapes, for one target, which take turns; ``make
ascend-check ARGS=--all`` has all shapes for all targets.

Proves every step before machine code and the numbers of the front half. It does not prove a run on
an NPU, nor its speed. Fails when a kernel fails, when one is skipped, when none ran, when a kernel
that cannot fit UB compiles, and when an adapter calls an operator that torch_npu does not have.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from k31fn import tree
from k31fn.autodiff import vjp
from k31fn.kernels.launch import Build
from k31fn.kernels.registry import OPS
from tools.ascend.cases import CASES, COMPILED_ONLY, Case
from tools.ascend.compile import TARGETS, CompileError, Hivm, to_hivm, to_linalg
from tools.ascend.operators import WHEELS, unconfirmed, wanted
from tools.ascend.run import OnCpu, load_shim
from tools.kernel_builds import builds, modules

__all__ = ["compile_all", "main", "one_of_each", "operators", "run_all", "too_large"]

_FRONTEND = threading.Lock()


def one_of_each(kernels: list[Build], targets: tuple[str, ...]) -> list[tuple[Build, str]]:
    """The first listed form of each kernel, for one of the targets in turn."""
    first: dict[str, Build] = {}
    for build in kernels:
        first.setdefault(build.kernel.__name__, build)
    return [(build, targets[i % len(targets)]) for i, build in enumerate(first.values())]


def compile_all(pairs: list[tuple[Build, str]]) -> int:
    """Compiles each for its target, a process per core, prints a line each, and returns how many
    failed.
    """

    def compiled(build: Build, target: str) -> tuple[bool, str]:
        started = time.perf_counter()
        try:
            made = _compile(build, target)
            told = (
                f"{made.mode}, {made.scalar} scalar "
                f"accesses{', planned twice' if made.retried else ''}"
            )
        except CompileError as e:
            return False, f"FAILED: {e}, {time.perf_counter() - started:.1f} s"
        return True, f"{told}, {time.perf_counter() - started:.1f} s"

    failed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda pair: compiled(*pair), pairs)
        for (build, target), (good, told) in zip(pairs, results, strict=True):
            failed += not good
            print(f"compile  {build.name:44}  {target:15}  {told}", flush=True)
    return failed


def too_large(kernels: list[Build], target: str) -> int:
    """The first kernel of pieces with pieces far too wide must overflow UB; returns 1 if it
    compiles.
    """
    build = next(b for b in kernels if b.constants.get("BLOCK", 0) >= 1024)
    try:
        _compile(build._replace(constants={**build.constants, "BLOCK": 65536}), target)
    except CompileError as e:
        if "overflow" in str(e):
            print(
                f"too large  {build.name} with 65536 features at once is refused: {str(e)[:90]}",
                flush=True,
            )
            return 0
        print(f"too large  {build.name}: refused, but for another reason: {e}", flush=True)
    return 1


def _compile(build: Build, target: str) -> Hivm:
    with _FRONTEND:  # in this process; the rest is one of its own
        linalg = to_linalg(build.kernel, build.signature, build.constants, target)
    return to_hivm(linalg, target)


def operators(wheels: list[Path]) -> int:
    """Whether torch_npu has the operators of the adapters; returns how many it does not."""
    if not wheels:
        print(
            f"operators  FAILED: no wheel of torch_npu in {WHEELS}; remove the environment and "
            "start again"
        )
        return 1
    missing = unconfirmed(wheels[-1], wanted())
    for schema in missing:
        print(f"operators  FAILED: {wheels[-1].name} has no {schema}")
    print(
        f"operators  {len(wanted()) - len(missing)} of {len(wanted())} schemas stand in "
        f"{wheels[-1].name}"
    )
    return len(missing) + (not wanted())


def run_all(found: dict[str, Any]) -> int:
    """Runs each op's lowered kernels, forward and backward, against the float64 reference; returns
    how many failed.
    """
    failed = 0
    for name, module in found.items():
        own = {b.kernel.__name__ for b in module.builds("npu")}
        # of ops in the same package too, whose kernels it may launch
        package = [m for m in modules().values() if m.__package__ == module.__package__]
        stand_ins = {b.kernel.__name__: OnCpu(b.kernel) for m in package for b in m.builds("npu")}
        for case in CASES[name]:
            started = time.perf_counter()
            torch.manual_seed(0)
            try:
                worst = _worst(name, module, case, stand_ins)
                good, told = (
                    worst <= case.tolerance,
                    f"error {worst:.1e} of at most {case.tolerance:.1e}",
                )
            except CompileError as e:
                good = False
                told = str(e)
            failed += not good
            told = f"{'' if good else 'FAILED: '}{told}, {time.perf_counter() - started:.1f} s"
            print(f"run  {name:20}  {told}", flush=True)
        ran = {kernel for kernel in own if stand_ins[kernel].built}
        idle = sorted(own - ran - COMPILED_ONLY)
        failed += bool(idle)
        told = f"FAILED: {idle} did not run" if idle else f"{len(ran)} of {len(own)} kernels"
        print(f"run  {name:20}  {told}", flush=True)
    return failed


def _worst(op: str, module: Any, case: Case, stand_ins: dict[str, OnCpu]) -> float:
    """Largest error of values, and of gradients where there are any, each over its largest
    element.
    """
    args = case.args()
    values, structure = tree.flatten(args)
    floating = [isinstance(v, Tensor) and v.is_floating_point() for v in values]
    index = [i for i, yes in enumerate(floating) if yes]

    def of(f: Callable[..., Any], dtype: torch.dtype | None) -> list[Tensor]:
        def call(*leaves: Tensor) -> Any:
            given = list(values)
            for i, leaf in zip(index, leaves, strict=True):
                given[i] = leaf
            return f(*tree.unflatten(structure, given))

        # copies: some write in place
        leaves = [values[i].to(dtype or values[i].dtype, copy=True) for i in index]
        out, pull = vjp(call, *leaves)
        if not OPS[op].differentiable:
            return tree.leaves(out)
        cts = tree.map(
            lambda y: torch.linspace(-1, 1, y.numel()).view(y.shape).bfloat16().to(y.dtype), out
        )
        return [*tree.leaves(out), *pull(cts)]

    with contextlib.ExitStack() as stack:
        # where the kernels are, too: one family of them serves several ops
        packages = {module.__package__}
        packages |= {b.kernel.__module__.rpartition(".")[0] for b in module.builds("npu")}
        prefixes = tuple(f"{package}." for package in packages)
        for part in [m for name, m in sys.modules.items() if name.startswith(prefixes)]:
            for tiles in [
                x for name, x in vars(part).items() if name.strip("_") == "TILES" and "npu" in x
            ]:
                stack.enter_context(mock.patch.dict(tiles, cpu=tiles["npu"]))
            stack.enter_context(mock.patch.dict(vars(part), _as_on_npu(part)))
            used = {name: stand_ins[name] for name in stand_ins.keys() & vars(part).keys()}
            stack.enter_context(mock.patch.dict(vars(part), used))
        ours = of(getattr(module, op), None)
    exact = of(OPS[op].reference, torch.float64)
    pairs = [(a.double(), b.double()) for a, b in zip(ours, exact, strict=True)]
    # what has no gradient has zeros in both
    errors = torch.stack([(a - b).abs().max() / b.abs().max().clamp(min=1e-30) for a, b in pairs])
    return float(errors.max())  # NaN if one is; Python's max would lose it


def _as_on_npu(module: Any) -> dict[str, Any]:
    """The module's functions of a kind of device, ``f(kind, ...)``, as for an NPU whatever kind
    they are given.
    """
    functions = {name: f for name, f in vars(module).items() if inspect.isfunction(f)}
    of_kind = {
        name: f
        for name, f in functions.items()
        if next(iter(inspect.signature(f).parameters), "") == "kind"
    }
    return {
        name: lambda _, *args, f=f, **kwargs: f("npu", *args, **kwargs)
        for name, f in of_kind.items()
    }


def main() -> int:
    """Returns 0 if all is well."""
    parser = argparse.ArgumentParser(prog="python -m tools.ascend.check", description=__doc__)
    parser.add_argument("--target", action="append", help=f"default: {', '.join(TARGETS)}")
    parser.add_argument("--all", action="store_true", help="all shapes for all targets")
    parser.add_argument("--only", default="", help="kernels and ops whose name contains this")
    args = parser.parse_args()
    kernels = [b for b in builds("npu") if args.only in b.name]
    found = {op: module for op, module in modules().items() if args.only in op}
    missing = set(found) - set(CASES)
    if missing:
        print(f"no case in tools/ascend/cases.py for {sorted(missing)}")
        return 1
    targets = tuple(args.target or TARGETS)
    if args.all:
        pairs = [(build, target) for build in kernels for target in targets]
    else:
        pairs = one_of_each(kernels, targets)
    failed = compile_all(pairs)
    if not args.only:
        failed += too_large(kernels, TARGETS[-1]) + operators(
            sorted(WHEELS.glob("torch_npu-*.whl"))
        )
    with tempfile.TemporaryDirectory() as folder:
        load_shim(Path(folder))
        failed += run_all(found)
    forms = f"{len(pairs)} of {len(kernels) * len(targets)} forms compiled"
    print(f"{forms}, {len(found)} ops run, {failed} failures")
    return 1 if failed or not kernels or not found else 0


if __name__ == "__main__":
    sys.exit(main())
