# pyright: reportMissingImports=false
"""Compiles every Triton kernel of k31fn for sm_90, without a GPU: ``python -m tools.compile_cuda``.

A process per core. Prints a line per kernel and fails on the first that does not compile. Needs the
upstream triton package.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

os.environ.pop("TRITON_INTERPRET", None)
# Triton 3.9 warns where it is not said; this is its default
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from k31fn.kernels.launch import Build
from tools.kernel_builds import builds

__all__ = ["compile_one", "main"]

_SHARED = {90: 227 * 2**10}  # bytes of shared memory that a program can have, by compute capability


def compile_one(build: Build, capability: int) -> str:
    """Compiles one kernel and returns what it takes.

    Raises:
        ValueError: more shared memory than there is, so that it would not be launched.
    """
    started = time.perf_counter()
    signature = {**build.signature, **dict.fromkeys(build.constants, "constexpr")}
    names = build.kernel.arg_names
    # as a launch would find pointers and a model's sizes: multiples of 16 bytes
    wide = [i for i, n in enumerate(names) if signature[n].startswith("*") or n in build.aligned]
    attributes = {(i,): [["tt.divisibility", 16]] for i in wide}
    source = ASTSource(
        fn=build.kernel, signature=signature, constexprs=dict(build.constants), attrs=attributes
    )
    options = {"num_warps": build.tile.warps, "num_stages": build.tile.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    shared = compiled.metadata.shared
    if shared > _SHARED.get(capability, shared):
        raise ValueError(
            f"{build.name} needs {shared} bytes of shared memory, sm_{capability} has "
            f"{_SHARED[capability]}"
        )
    return (
        f"{len(compiled.asm['cubin'])} bytes, shared {shared}, "
        f"{time.perf_counter() - started:.1f} s"
    )


def _compile_named(name: str, capability: int) -> str:
    return compile_one(next(b for b in builds("cuda") if b.name == name), capability)


def main() -> int:
    """Prints a line per kernel and returns 0 if all compile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sm", type=int, default=90, help="compute capability")
    parser.add_argument("--only", default="", help="names that contain this")
    args = parser.parse_args()
    wanted = [b for b in builds("cuda") if args.only in b.name]
    names = [build.name for build in wanted]
    # fork: kernels are imported once, and a list of them cannot be sent
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        for name, told in zip(names, pool.map(_compile_named, names, repeat(args.sm)), strict=True):
            print(f"ok  {name:44}  {told}", flush=True)
    print(f"{len(wanted)} kernels compiled for sm_{args.sm}")
    return 0 if wanted else 1


if __name__ == "__main__":
    sys.exit(main())
