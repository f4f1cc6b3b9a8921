"""Runs the parts that were asked for; the first process writes the file after each."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

import torch

import benchmarks.meshes as package
from benchmarks.meshes import cost, numbers
from benchmarks.meshes.here import RECIPES, Here
from k31fn import data
from k31fn import device as devices
from k31fn.parallel import Mesh, axes_of_process, start_processes, stop_processes
from k31fn.parallel.backends.processes import exchange_json

PARTS = {
    "equality": numbers.equality,
    "training": numbers.training,
    "timing": cost.timing,
    "checkpoint": numbers.restoring,
}


def _options() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "benchmarks.meshes", description=package.__doc__, formatter_class=form
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=RECIPES, default=["tiny"])
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32"], help="float64, float32, bfloat16"
    )
    parser.add_argument("--meshes", nargs="*", default=[], help="some of them: 'fsdp2 ep2' tp2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--out", type=Path, default=Path("meshes.json"), help="a file that is there is added to"
    )
    parser.add_argument("--steps", type=int, default=50, help="of training")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rows", type=int, default=2, help="of the wide model's step")
    parser.add_argument("--length", type=int, default=4096, help="of its rows, in tokens")
    parser.add_argument("--experts", type=int, default=32, help="of each of its layers")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("its processes are ranks: torchrun --nproc_per_node=2 -m benchmarks.meshes")
    return options


def main() -> None:
    """See the package."""
    options = _options()
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    device = devices.of_rank(torch.device(options.device), int(os.environ["LOCAL_RANK"]))
    start_processes(device.type, timeout=180.0)
    axes, _ = axes_of_process(Mesh(dp=size))
    text = data.load(data.Config(path="stdlib"), data.ByteTokenizer()).train
    here = Here(device, axes.atoms, rank, size, text, options)
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    found["machine"] = {"ranks": size, "device": kind, "torch": torch.__version__}
    for part in options.parts:
        for name in options.models:
            for dtype in options.dtypes:
                recipe = dataclasses.replace(RECIPES[name](options), compute=dtype)
                sizes = {
                    k: getattr(recipe, k) for k in ("batch_size", "length", "compute", "remat")
                }
                found.setdefault(part, {})[f"{name} {dtype}"] = {
                    "sizes": sizes,
                    "of": PARTS[part](recipe, here),
                }
                if rank == 0:
                    options.out.write_text(json.dumps(found, indent=1))
    exchange_json("done", axes.atoms)  # the first process holds what the others need for leaving
    stop_processes(axes)


if __name__ == "__main__":
    main()
