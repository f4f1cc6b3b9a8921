"""What warming up does without a GPU: kernels for sm_90, compiled on the CPU. Prints what it saw,
as JSON.

Runs in a process of its own, since the other tests run Triton's interpreter. The implementation of
AttnRes is made to believe that it runs on the CPU; a driver that only names a target stands in for
the device.
"""

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from k31fn.kernels.attn_res import attn_res
from k31fn.kernels.attn_res.triton import one_pass as kernels
from k31fn.kernels.registry import Implementation, watch_calls
from k31fn.kernels.shapes import shapes_only
from k31fn.kernels.warmup import Compilers, Launch, OpCalls, WarmUpError, launches
from k31fn.kernels.warmup import triton as cache

CPU = torch.device("cpu")


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def found() -> tuple[OpCalls, list[Launch]]:
    """A call that is made twice."""
    calls = OpCalls()
    with shapes_only(), watch_calls(calls):
        for _ in range(2):
            attn_res((meta(2, 8, 64),), meta(64), meta(64), 1e-5)
    return calls, launches(calls, CPU)


def launched(calls: OpCalls) -> str:
    """What stops the calls now: a kernel that is loaded is not compiled but launched, for which
    there is no device.
    """
    try:
        launches(calls, CPU)
    except AttributeError as error:
        return str(error)
    return "nothing"


def all_found(wanted: list[Launch], folder: Path) -> bool:
    cache.use_folder(folder)
    return [cache.ensure(x)[1] for x in wanted] == ["found"] * len(wanted)


def damaged(wanted: list[Launch], folder: Path, compilers: Compilers) -> dict[str, list[str]]:
    """How an entry is made again after something happened to it."""

    def cut(at: Path) -> None:
        at.write_bytes(at.read_bytes()[: at.stat().st_size // 2])

    def flipped(at: Path) -> None:
        data = bytearray(at.read_bytes())
        data[len(data) // 2] ^= 1
        at.write_bytes(data)

    def swapped(at: Path) -> None:
        at.write_text(json.dumps({"child_paths": {}}))

    def odd(at: Path) -> None:
        at.write_text("[]")

    harms = {
        "cut binary": ("*.cubin", cut),
        "flipped bit": ("*.cubin", flipped),
        "cut description": ("attn_res_forward.json", cut),
        "no sums": ("k31fn-sha256.json", Path.unlink),
        "missing file": ("*.ptx", Path.unlink),
        "empty group": ("__grp__*", swapped),
        "odd group": ("__grp__*", odd),
    }
    states, one = {}, wanted[:1]
    cache.use_folder(folder)
    place = Path(next(iter(cache.ensure(one[0])[0].metadata_group.values()))).parent
    for name, (pattern, harm) in harms.items():
        harm(next(iter(place.glob(pattern))))
        states[name] = compilers.compile(one) + compilers.compile(one)
    return states


def believed(wanted: list[Launch], folder: Path) -> bool:
    """Whether Triton alone takes half a binary for a whole one."""
    cache.use_folder(folder)
    cache.ensure(wanted[0])
    (binary,) = folder.glob("*/*.cubin")
    binary.write_bytes(binary.read_bytes()[:100])
    with cache.compilations() as made:
        kernel = getattr(kernels, wanted[0].function).preload(wanted[0].data)
    return not made and len(kernel.asm["cubin"]) == 100


def raced(wanted: list[Launch], folder: Path) -> tuple[Counter[str], bool]:
    """Two pools at the same kernels at the same time; how each was made, and whether all are whole
    afterwards.
    """
    states: list[str] = []

    def one() -> None:
        with Compilers(1, folder) as compilers:
            states.extend(compilers.compile(wanted))

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Counter(states), all_found(wanted, folder)


def killed(wanted: list[Launch], folder: Path) -> tuple[list[str], bool]:
    """A process killed in the middle of its work: the kernels are there all the same, and whole."""
    with Compilers(1, folder) as compilers:
        (pid,) = compilers.pids

        def kill() -> None:
            while not any(folder.glob("*/*.ttir")):  # it has begun, and not finished
                time.sleep(0.01)
            os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        states = compilers.compile(wanted)
        thread.join()
        return states, compilers.pids != [pid] and all_found(wanted, folder)


def refused(launch: Launch, compilers: Compilers) -> str:
    try:
        compilers.compile([launch])
    except WarmUpError as error:
        return str(error)
    return ""


def main(folder: Path) -> dict[str, Any]:
    attn_res.implementations.clear()
    module = "k31fn.kernels.attn_res.triton.one_pass"
    attn_res.register(Implementation("here", ("cpu",), kernels.attn_res, kernels=module))
    target = ("cuda", 90, 32)
    cache.ahead_of_time(target)
    calls, wanted = found()
    result: dict[str, Any] = {"calls": len(list(calls)), "functions": [x.function for x in wanted]}
    result["targets"] = sorted({x.target for x in wanted})
    progress: list[str] = []
    wrong = wanted[0].data.replace('"*bf16"', '"*nothing"')
    with Compilers(2, folder / "a") as compilers:
        result["cold"] = compilers.compile(wanted, progress.append)
        result["warm"] = compilers.compile(wanted)
        result["damaged"] = damaged(wanted, folder / "a", compilers)
        result["wrong"] = refused(wanted[0]._replace(data=wrong), compilers)
        result["dies"] = refused(
            Launch("tests.kernels.warmed.dies", "kernel", target, "{}"), compilers
        )
    result["progress"] = progress
    cache.use_folder(folder / "a")
    with cache.compilations() as made:
        cache.load(wanted, on_device=False)
    result["compiled_by_load"], result["launch"] = made, launched(calls)
    result["believed"] = believed(wanted, folder / "b")
    result["raced"] = raced(wanted, folder / "c")
    result["killed"] = killed(wanted, folder / "d")
    return result


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
